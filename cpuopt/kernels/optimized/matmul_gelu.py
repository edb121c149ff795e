"""A linear layer with GELU: the kernels of ``matmul`` end each chunk with its GELU."""

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET
from .gelu import backward, forward
from .matmul import FORWARD, INPUT, linear_input_then, linear_then


@helper(forceinline=True)
def activate(more, pre, lo, hi):
    """Activate a stretch of sums."""
    forward(more, SET, (pre,), lo, hi)


@helper(forceinline=True)
def slope(more, dpre, lo, hi):
    """Turn a stretch of the output's gradient into that of the input."""
    backward((dpre,), SET, (dpre, more[0]), lo, hi)


linear, linear_input = linear_then(activate), linear_input_then(slope)


@kernel(ops.matmul_gelu_forward, "optimized", scratch=FORWARD, parallel=False)
def matmul_gelu_forward(out, pre, inp, weight, bias, panels, sums, queue):
    """Pack the tokens, then strips of rows of weight times all panels, and their GELU.

    Parallel: packing by panel and slice; then chunks by ticket, each owns a block of `pre` and `out`.
    Memory: the packed tokens; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear(pre, (out,), inp, weight, bias, panels, sums, queue)


@kernel(ops.matmul_gelu_backward, "optimized", scratch=INPUT, parallel=False)
def matmul_gelu_backward(dpre, dout, weight, pre, panels, queue):
    """Blocks of tokens times panels of weight's columns, and the slope of what is summed up.

    Parallel: chunks by ticket, each owns a block of `dpre`.
    Memory: a panel, and a block of dout where there are few tokens, for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear_input(dpre, False, (pre,), dout, weight, panels, queue)
