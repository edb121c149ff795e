"""A linear layer with GELU, SwiGLU or GeGLU for few tokens: the activation takes each chunk of sums at once."""

from ... import ops
from ..compile.jit import helper, kernel
from ..optimized.gated import geglu, swiglu
from ..optimized.gelu import forward as gelu
from ..toolkit.elementwise import SET
from .matmul import HALVES, linear_then


@helper(forceinline=True)
def activate(more, pre, lo, hi):
    """Activate a stretch of sums."""
    gelu(more, SET, (pre,), lo, hi)


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


def linear_gated(op, gate):
    """Register the kernels of a linear layer with a gate, in both storage types, from the loop of the gate."""

    @helper(forceinline=True)
    def activate(more, pre, lo, hi):
        """Activate a stretch of sums."""
        out, up = more
        gate((out,), SET, (pre, up), lo, hi)

    linear, linear_bf16 = linear_then(activate), linear_then(activate, HALVES)

    @kernel(op, "rows", parallel=False)
    def matmul_gated_forward(out, pre, inp, weight, bias, up):
        """Dot products, and their gate.

        Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
        Bound: the memory that `weight` streams through, once.
        """
        linear(pre, (out, up), inp, weight, bias)

    @kernel(op, "rows", of="bfloat16", parallel=False)
    def matmul_gated_forward_bf16(out, pre, inp, weight, bias, up):
        """Dot products of words, and their gate.

        Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
        Bound: the memory that `weight` streams through, once.
        """
        linear_bf16(pre, (out, up), inp, weight, bias)


linear_gated(ops.matmul_swiglu_forward, swiglu)
linear_gated(ops.matmul_geglu_forward, geglu)
