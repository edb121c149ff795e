"""GELU on vectors: the tanh written as a logistic function, so that one polynomial serves both directions.

``(1 + tanh(u))/2 = 1/(1 + exp(-2u))`` stays accurate where tanh(u) nears -1 and ``1 + tanh(u)`` cancels. It is a power
of 2, for which the polynomial of u takes its constants divided by ln 2.
"""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.constants import ONE, ZERO
from ..toolkit.elementwise import SET, bounds, chunks, loop_of
from ..toolkit.lanes import exp2, select_positive, smaller, spread

CUBIC = 0.044715  # Hendrycks and Gimpel 2016
TWO_S = 2 * np.sqrt(2 / np.pi)
U1, U3 = np.float32(TWO_S / np.log(2)), np.float32(TWO_S * CUBIC / np.log(2))  # 2u / ln 2 = U1 x + U3 x^3
D0, D2 = np.float32(TWO_S), np.float32(3 * TWO_S * CUBIC)  # 2u' = D0 + D2 x^2


@helper(forceinline=True)
def gelu(x):
    """Compute x/2 * (1 + tanh(u))."""
    return x / (exp2((x * x * -U3 - U1) * x) + ONE)


@helper(forceinline=True)
def gelu_and_slope(x):
    """Compute x * logistic(2u), and logistic(2u) + x * logistic'(2u) * 2u'.

    By z = exp(-|2u|) nothing overflows and nothing cancels.
    """
    x2 = x * x
    u = (x2 * U3 + U1) * x
    z = exp2(smaller(u, ZERO - u))
    q, s = spread(ONE) / (z + ONE), select_positive(u, spread(ONE), z)
    return x * (s * q), q * (s + x * z * q * (x2 * D2 + D0))


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
