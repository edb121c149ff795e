"""GELU on vectors: the tanh written as a logistic function, so that one polynomial exp serves both directions.

``(1 + tanh(u))/2 = 1/(1 + exp(-2u))`` stays accurate where tanh(u) nears -1 and ``1 + tanh(u)`` cancels.
"""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, bounds, chunks, loop_of
from ..toolkit.lanes import exp, select_positive, smaller, spread

TWO_S = np.float32(2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)  # Hendrycks and Gimpel 2016
ZERO, ONE, THREE = np.float32(0), np.float32(1), np.float32(3)


@helper(forceinline=True)
def gelu(x):
    """Compute x/2 * (1 + tanh(u))."""
    return x / (exp((x * x * CUBIC + ONE) * x * -TWO_S) + ONE)


@helper(forceinline=True)
def gelu_and_slope(x):
    """Compute x * logistic(2u), and logistic(2u) + x * logistic'(2u) * 2u'.

    By z = exp(-|2u|) nothing overflows and nothing cancels.
    """
    x2 = x * x * CUBIC
    u2 = (x2 + ONE) * x * TWO_S
    z = exp(smaller(u2, ZERO - u2))
    q, s = spread(ONE) / (z + ONE), select_positive(u2, spread(ONE), z)
    return x * (s * q), q * (s + x * z * q * ((x2 * THREE + ONE) * TWO_S))


@helper(forceinline=True)
def value(x):
    """Compute the output."""
    return (gelu(x),)


@helper(forceinline=True)
def slope(dout, x):
    """Compute the gradient."""
    return (gelu_and_slope(x)[1] * dout,)


forward, backward = loop_of(value), loop_of(slope)


@kernel(ops.gelu_forward, "optimized")
def gelu_forward(out, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: compute, the exp.
    """
    for chunk in prange(chunks(out)):
        forward((out,), SET, (inp,), *bounds(chunk, out))


@kernel(ops.gelu_backward, "optimized")
def gelu_backward(dinp, dinp_add, dout, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: compute, the exp.
    """
    for chunk in prange(chunks(dinp)):
        backward((dinp,), (dinp_add,), (dout, inp), *bounds(chunk, dinp))  # out[i] = x/2 * (1 + tanh(u))
