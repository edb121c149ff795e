"""GELU on vectors: the tanh written as a logistic function, so that one polynomial exp serves both directions.

``(1 + tanh(u))/2 = 1/(1 + exp(-2u))`` stays accurate where tanh(u) nears -1 and ``1 + tanh(u)`` cancels.
"""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.lanes import exp, load, load_some, select_positive, smaller, spread, store, store_some
from ..toolkit.simd import LANES

CHUNK = 4096  # elements: 16 KB an array, a multiple of all LANES; few enough that each of many threads gets some
TWO_S = np.float32(2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)  # Hendrycks and Gimpel 2016
ZERO, ONE, THREE = np.float32(0), np.float32(1), np.float32(3)


@helper(forceinline=True)
def value(x):
    """Compute x/2 * (1 + tanh(u))."""
    return x / (exp((x * x * CUBIC + ONE) * x * -TWO_S) + ONE)


@helper(forceinline=True)
def slope(x):
    """Compute logistic(2u) + x * logistic'(2u) * 2u'; by z = exp(-|2u|) nothing overflows and nothing cancels."""
    x2 = x * x * CUBIC
    u2 = (x2 + ONE) * x * TWO_S
    z = exp(smaller(u2, ZERO - u2))
    q = spread(ONE) / (z + ONE)
    return q * (select_positive(u2, spread(ONE), z) + x * z * q * ((x2 * THREE + ONE) * TWO_S))


@helper()
def forward(out, inp, lo, hi):
    """Do one chunk."""
    whole = hi - (hi - lo) % LANES
    for i in range(lo, whole, LANES):
        store(out, i, value(load(inp, i)))
    if whole < hi:
        store_some(out, whole, value(load_some(inp, whole, hi - whole)), hi - whole)


@helper()
def backward(dinp, dinp_add, dout, inp, lo, hi):
    """Do one chunk."""
    whole = hi - (hi - lo) % LANES
    for i in range(lo, whole, LANES):
        d = slope(load(inp, i)) * load(dout, i)  # out[i] = x/2 * (1 + tanh(u))
        store(dinp, i, load(dinp, i) + d if dinp_add else d)
    if whole < hi:
        n = hi - whole
        d = slope(load_some(inp, whole, n)) * load_some(dout, whole, n)
        store_some(dinp, whole, load_some(dinp, whole, n) + d if dinp_add else d, n)


@kernel(ops.gelu_forward, "optimized")
def gelu_forward(out, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: compute, the exp.
    """
    n = inp.shape[0]
    for chunk in prange((n + CHUNK - 1) // CHUNK):
        forward(out, inp, chunk * CHUNK, min(chunk * CHUNK + CHUNK, n))


@kernel(ops.gelu_backward, "optimized")
def gelu_backward(dinp, dinp_add, dout, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: compute, the exp.
    """
    n = inp.shape[0]
    for chunk in prange((n + CHUNK - 1) // CHUNK):
        backward(dinp, dinp_add, dout, inp, chunk * CHUNK, min(chunk * CHUNK + CHUNK, n))
