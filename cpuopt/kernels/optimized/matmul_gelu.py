"""A linear layer with GELU: the products of ``matmul``, then GELU on all of the sums, as in ``matmul_swiglu``."""

from ... import ops
from ..compile.jit import kernel
from ..toolkit.tiles import flat
from .gelu import gelu_backward, gelu_forward
from .matmul import FORWARD, INPUT, matmul_backward_input, matmul_forward


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
    Memory: a panel, and a block of dout where there are few tokens, for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    matmul_backward_input(dpre, False, dout, weight, panels, parts, queue)
    gelu_backward(flat(dpre), False, flat(dpre), flat(pre))
