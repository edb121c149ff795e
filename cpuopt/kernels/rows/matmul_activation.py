"""A linear layer with GELU, SwiGLU or GeGLU for few tokens: the activation takes each chunk of sums at once."""

from ... import ops
from ..compile.jit import helper, kernel
from ..optimized.gated import geglu, swiglu
from ..optimized.gelu import forward as gelu
from ..toolkit.elementwise import SET
from .matmul import BY, linear_then


@helper(forceinline=True)
def activate(more, pre, lo, hi):
    """Activate a stretch of sums."""
    gelu(more, SET, (pre,), lo, hi)


def register(of):
    """Register the kernel with GELU of a storage type."""
    linear = linear_then(activate, of)

    @kernel(ops.matmul_gelu_forward, "rows", of=of, parallel=False)
    def matmul_gelu_forward(out, pre, inp, weight, bias):
        """Dot products, and their GELU.

        Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
        Bound: the memory that `weight` streams through, once.
        """
        linear(pre, (out,), inp, weight, bias)


def register_gated(op, gate, of):
    """Register the kernel with a gate of a storage type, from the loop of the gate."""

    @helper(forceinline=True)
    def activate(more, pre, lo, hi):
        """Activate a stretch of sums."""
        out, up = more
        gate((out,), SET, (pre, up), lo, hi)

    linear = linear_then(activate, of)

    @kernel(op, "rows", of=of, parallel=False)
    def matmul_gated_forward(out, pre, inp, weight, bias, up):
        """Dot products, and their gate.

        Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
        Bound: the memory that `weight` streams through, once.
        """
        linear(pre, (out, up), inp, weight, bias)


for of in BY:
    register(of)
    register_gated(ops.matmul_swiglu_forward, swiglu, of)
    register_gated(ops.matmul_geglu_forward, geglu, of)
