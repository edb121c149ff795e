"""A linear layer with GELU for few tokens: GELU takes a chunk of sums when they are there."""

from ... import ops
from ..compile.jit import helper, kernel
from ..optimized.gelu import forward
from ..toolkit.elementwise import SET
from .matmul import HALVES, linear_then


@helper(forceinline=True)
def activate(more, pre, lo, hi):
    """Activate a stretch of sums."""
    forward(more, SET, (pre,), lo, hi)


linear, linear_bf16 = linear_then(activate), linear_then(activate, HALVES)


@kernel(ops.matmul_gelu_forward, "rows", parallel=False)
def matmul_gelu_forward(out, pre, inp, weight, bias):
    """Dot products, and their GELU.

    Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
    Bound: the memory that `weight` streams through, once.
    """
    linear(pre, (out,), inp, weight, bias)


@kernel(ops.matmul_gelu_forward, "rows", of="bfloat16", parallel=False)
def matmul_gelu_forward_bf16(out, pre, inp, weight, bias):
    """Dot products of words, and their GELU.

    Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
    Bound: the memory that `weight` streams through, once.
    """
    linear_bf16(pre, (out,), inp, weight, bias)
