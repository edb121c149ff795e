"""A linear layer with GeGLU for few tokens: GeGLU takes a chunk of sums when they are there."""

from ... import ops
from ..compile.jit import helper, kernel
from ..optimized.geglu import forward
from ..toolkit.elementwise import SET
from .matmul import HALVES, linear_then


@helper(forceinline=True)
def activate(more, pre, lo, hi):
    """Activate a stretch of sums."""
    out, up = more
    forward((out,), SET, (pre, up), lo, hi)


linear, linear_bf16 = linear_then(activate), linear_then(activate, HALVES)


@kernel(ops.matmul_geglu_forward, "rows", parallel=False)
def matmul_geglu_forward(out, pre, inp, weight, bias, up):
    """Dot products, and their GeGLU.

    Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
    Bound: the memory that `weight` streams through, once.
    """
    linear(pre, (out, up), inp, weight, bias)


@kernel(ops.matmul_geglu_forward, "rows", of="bfloat16", parallel=False)
def matmul_geglu_forward_bf16(out, pre, inp, weight, bias, up):
    """Dot products of words, and their GeGLU.

    Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
    Bound: the memory that `weight` streams through, once.
    """
    linear_bf16(pre, (out, up), inp, weight, bias)
