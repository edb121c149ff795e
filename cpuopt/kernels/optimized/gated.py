"""SwiGLU and GeGLU on vectors: one exp serves both gradients."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, bounds, chunks, loop_of
from .gelu import gelu, gelu_and_slope
from .silu import silu, silu_and_slope


def gated(first, last, activation, with_slope):
    """Make the loop of a gate, from its activation, and register the kernels of its two ops.

    Parameters
    ----------
    first, last : the ops, forward and backward.
    activation, with_slope : the activation alone, and with its slope.
    """

    @helper(forceinline=True)
    def value(x, up):
        """Compute the output."""
        return (activation(x) * up,)

    @helper(forceinline=True)
    def slopes(dout, x, up):
        """Compute the gradients of x and up."""
        y, slope = with_slope(x)
        return dout * up * slope, dout * y  # out = y * up

    forward, backward = loop_of(value), loop_of(slopes)

    @kernel(first, "optimized")
    def gated_forward(out, inp, up):
        """Vector by vector.

        Parallel: chunks of fixed size.
        Bound: memory.
        """
        for chunk in prange(chunks(out)):
            forward((out,), SET, (inp, up), *bounds(chunk, out))

    @kernel(last, "optimized")
    def gated_backward(dinp, dinp_add, dup, dup_add, dout, inp, up):
        """Vector by vector.

        Parallel: chunks of fixed size.
        Bound: memory.
        """
        for chunk in prange(chunks(dinp)):
            backward((dinp, dup), (dinp_add, dup_add), (dout, inp, up), *bounds(chunk, dinp))

    return forward


swiglu = gated(ops.swiglu_forward, ops.swiglu_backward, silu, silu_and_slope)
geglu = gated(ops.geglu_forward, ops.geglu_backward, gelu, gelu_and_slope)
