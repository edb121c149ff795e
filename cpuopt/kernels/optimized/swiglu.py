"""SwiGLU on vectors: one exp serves both gradients."""

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, chunks_of, loop_of
from .silu import silu, silu_and_slope


@helper(forceinline=True)
def value(x, up):
    """Compute the output."""
    return (silu(x) * up,)


@helper(forceinline=True)
def slopes(dout, x, up):
    """Compute the gradients of x and up."""
    y, slope = silu_and_slope(x)
    return dout * up * slope, dout * y  # out = x * s * up


forward, backward = loop_of(value), loop_of(slopes)
all_forward, all_backward = chunks_of(forward), chunks_of(backward)


@kernel(ops.swiglu_forward, "optimized", parallel=False)
def swiglu_forward(out, inp, up):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    all_forward((out,), SET, (inp, up))


@kernel(ops.swiglu_backward, "optimized", parallel=False)
def swiglu_backward(dinp, dinp_add, dup, dup_add, dout, inp, up):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    all_backward((dinp, dup), (dinp_add, dup_add), (dout, inp, up))
