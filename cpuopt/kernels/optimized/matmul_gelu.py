"""A linear layer with GELU: the products of ``matmul``, then GELU on all of the sums, as in ``matmul_gated``."""

from ... import ops
from ...ops.declaration import BT, C
from ..compile.jit import kernel
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
