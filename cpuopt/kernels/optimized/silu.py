"""SiLU on vectors: by z = exp(-|x|) nothing overflows and nothing cancels."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.constants import ONE, ZERO
from ..toolkit.elementwise import SET, bounds, chunks, loop_of
from ..toolkit.lanes import exp, select_positive, smaller, spread


@helper(forceinline=True)
def silu(x):
    """Compute x * s, with s = 1/(1 + exp(-x))."""
    return x / (exp(ZERO - x) + ONE)


@helper(forceinline=True)
def silu_and_slope(x):
    """Compute x * s and s + x * s * (1 - s): with q = 1/(1 + z), s is q or z * q, and s * (1 - s) is z * q * q."""
    z = exp(smaller(x, ZERO - x))
    q = spread(ONE) / (z + ONE)
    s = select_positive(x, spread(ONE), z) * q
    return x * s, s + x * (z * q * q)


@helper(forceinline=True)
def value(x):
    """Compute the output."""
    return (silu(x),)


@helper(forceinline=True)
def slope(dout, x):
    """Compute the gradient."""
    return (dout * silu_and_slope(x)[1],)  # out = x * s


forward, backward = loop_of(value), loop_of(slope)


@kernel(ops.silu_forward, "optimized")
def silu_forward(out, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: compute, the exp.
    """
    for chunk in prange(chunks(out)):
        forward((out,), SET, (inp,), *bounds(chunk, out))


@kernel(ops.silu_backward, "optimized")
def silu_backward(dinp, dinp_add, dout, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: compute, the exp.
    """
    for chunk in prange(chunks(dinp)):
        backward((dinp,), (dinp_add,), (dout, inp), *bounds(chunk, dinp))
