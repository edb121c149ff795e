"""GeGLU on vectors: one exp serves both gradients."""

from numba import prange

from ... import ops
from ..compile.jit import kernel
from ..toolkit.elementwise import SET, bounds, chunks
from .gelu import gelu, gelu_and_slope
from .swiglu import gated

forward, backward = gated(gelu, gelu_and_slope)


@kernel(ops.geglu_forward, "optimized")
def geglu_forward(out, inp, up):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(out)):
        forward((out,), SET, (inp, up), *bounds(chunk, out))


@kernel(ops.geglu_backward, "optimized")
def geglu_backward(dinp, dinp_add, dup, dup_add, dout, inp, up):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(dinp)):
        backward((dinp, dup), (dinp_add, dup_add), (dout, inp, up), *bounds(chunk, dinp))
