"""A linear layer with GELU, SwiGLU or GeGLU: the products of ``matmul``, then the activation of all of the sums.

A chunk of a product is narrow. On it, an activation would take a few cache lines of each token at a time, and memory
delivers these far more slowly than whole rows.
"""

from ... import ops
from ...ops.declaration import BT, C
from ..compile.jit import kernel
from ..registry import KERNELS
from ..toolkit.tiles import flat
from .gelu import gelu_backward, gelu_forward
from .matmul import FORWARD, INPUT, matmul_backward_input, matmul_forward
from .matmul_bf16 import FORWARD_BF16, HALF, INPUT_BF16, as_words, linear_bf16, linear_input


@kernel(ops.matmul_gelu_forward, "optimized", scratch=FORWARD, parallel=False)
def matmul_gelu_forward(out, pre, inp, weight, bias, panels, sums, queue):
    """Pack the tokens, then strips of rows of weight times all panels; then GELU.

    Parallel: as the product; then chunks of fixed size.
    Memory: the packed tokens; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    matmul_forward(pre, inp, weight, bias, panels, sums, queue)
    gelu_forward(flat(out), flat(pre))


@kernel(ops.matmul_gelu_backward, "optimized", scratch=INPUT, parallel=False)
def matmul_gelu_backward(dpre, dout, weight, pre, panels, parts, queue):
    """Blocks of tokens times panels of weight's columns; then the slope, in the place of what is summed up.

    Parallel: as the product; then chunks of fixed size.
    Memory: a panel, and a block of dout if there are few tokens, for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    matmul_backward_input(dpre, False, dout, weight, panels, parts, queue)
    gelu_backward(flat(dpre), False, flat(dpre), flat(pre))


@kernel(ops.matmul_gelu_forward, "optimized", of=HALF, scratch=FORWARD_BF16, parallel=False)
def matmul_gelu_forward_bf16(out, pre, inp, weight, bias, panels, sums, queue, rows):
    """Pack the tokens, then strips of rows of weight times all panels; then GELU.

    Parallel: as the product; then chunks of fixed size.
    Memory: the packed tokens; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear_bf16(pre, inp, weight, bias, panels, sums, queue, rows)
    gelu_forward(flat(out), flat(pre))


@kernel(ops.matmul_gelu_backward, "optimized", of=HALF, scratch=[*INPUT_BF16, ("dact", BT * C)], parallel=False)
def matmul_gelu_backward_bf16(dpre, dout, weight, pre, panels, parts, queue, rows, dact):
    """Blocks of tokens times panels of weight's columns; then the slope of what is summed up.

    Parallel: as the product; then chunks of fixed size.
    Memory: the sums; a panel and a chunk of them for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear_input(dact.reshape(dpre.shape), False, as_words(dout, rows), weight, panels, parts, queue)
    gelu_backward(flat(dpre), False, dact, flat(pre))


def linear_gated(forward, backward):
    """Register the kernels of a linear layer with a gate, in both storage types, from the kernels of what it fuses."""
    gate, slopes = (KERNELS[op.fuses[-1].name, "optimized"].function for op in (forward, backward))

    @kernel(forward, "optimized", scratch=FORWARD, parallel=False)
    def matmul_gated_forward(out, pre, inp, weight, bias, up, panels, sums, queue):
        """Pack the tokens, then strips of rows of weight times all panels; then the gate.

        Parallel: as the product; then chunks of fixed size.
        Memory: the packed tokens; a strip of sums for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        matmul_forward(pre, inp, weight, bias, panels, sums, queue)
        gate(flat(out), flat(pre), flat(up))

    @kernel(backward, "optimized", scratch=INPUT, parallel=False)
    def matmul_gated_backward(dpre, dup, dout, weight, pre, up, panels, parts, queue):
        """Blocks of tokens times panels of weight's columns; then the slopes, in the place of what is summed up.

        Parallel: as the product; then chunks of fixed size.
        Memory: a panel, and a block of dout if there are few tokens, for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        matmul_backward_input(dpre, False, dout, weight, panels, parts, queue)
        slopes(flat(dpre), False, flat(dup), False, flat(dpre), flat(pre), flat(up))

    @kernel(forward, "optimized", of=HALF, scratch=FORWARD_BF16, parallel=False)
    def matmul_gated_forward_bf16(out, pre, inp, weight, bias, up, panels, sums, queue, rows):
        """Pack the tokens, then strips of rows of weight times all panels; then the gate.

        Parallel: as the product; then chunks of fixed size.
        Memory: the packed tokens; a strip of sums for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        linear_bf16(pre, inp, weight, bias, panels, sums, queue, rows)
        gate(flat(out), flat(pre), flat(up))

    @kernel(backward, "optimized", of=HALF, scratch=[*INPUT_BF16, ("dact", BT * C)], parallel=False)
    def matmul_gated_backward_bf16(dpre, dup, dout, weight, pre, up, panels, parts, queue, rows, dact):
        """Blocks of tokens times panels of weight's columns; then the slopes of what is summed up.

        Parallel: as the product; then chunks of fixed size.
        Memory: the sums; a panel and a chunk of them for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        linear_input(dact.reshape(dpre.shape), False, as_words(dout, rows), weight, panels, parts, queue)
        slopes(flat(dpre), False, flat(dup), False, dact, flat(pre), flat(up))


linear_gated(ops.matmul_swiglu_forward, ops.matmul_swiglu_backward)
linear_gated(ops.matmul_geglu_forward, ops.matmul_geglu_backward)
