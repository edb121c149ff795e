"""SwiGLU on vectors: one exp serves both gradients."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, bounds, chunks, loop_of
from .silu import silu, silu_and_slope


def gated(activation, with_slope):
    """Make the loops of a gate and of its gradients, from its activation, alone and with the slope."""

    @helper(forceinline=True)
    def value(x, up):
        """Compute the output."""
        return (activation(x) * up,)

    @helper(forceinline=True)
    def slopes(dout, x, up):
        """Compute the gradients of x and up."""
        y, slope = with_slope(x)
        return dout * up * slope, dout * y  # out = y * up

    return loop_of(value), loop_of(slopes)


forward, backward = gated(silu, silu_and_slope)


@kernel(ops.swiglu_forward, "optimized")
def swiglu_forward(out, inp, up):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(out)):
        forward((out,), SET, (inp, up), *bounds(chunk, out))


@kernel(ops.swiglu_backward, "optimized")
def swiglu_backward(dinp, dinp_add, dup, dup_add, dout, inp, up):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(dinp)):
        backward((dinp, dup), (dinp_add, dup_add), (dout, inp, up), *bounds(chunk, dinp))
