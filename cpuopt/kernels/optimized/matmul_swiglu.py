"""A linear layer with SwiGLU: the kernels of ``matmul`` end each chunk with its SwiGLU."""

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, SET_BOTH
from .matmul import FORWARD, INPUT, linear_input_then, linear_then
from .swiglu import backward, forward


@helper(forceinline=True)
def activate(more, pre, lo, hi):
    """Activate a stretch of sums."""
    out, up = more
    forward((out,), SET, (pre, up), lo, hi)


@helper(forceinline=True)
def slopes(more, dpre, lo, hi):
    """Turn a stretch of the output's gradient into those of the inputs."""
    dup, pre, up = more
    backward((dpre, dup), SET_BOTH, (dpre, pre, up), lo, hi)


linear, linear_input = linear_then(activate), linear_input_then(slopes)


@kernel(ops.matmul_swiglu_forward, "optimized", scratch=FORWARD, parallel=False)
def matmul_swiglu_forward(out, pre, inp, weight, bias, up, panels, sums, queue):
    """Pack the tokens, then strips of rows of weight times all panels, and their SwiGLU.

    Parallel: packing by panel and slice; then chunks by ticket, each owns a block of `pre` and `out`.
    Memory: the packed tokens; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear(pre, (out, up), inp, weight, bias, panels, sums, queue)


@kernel(ops.matmul_swiglu_backward, "optimized", scratch=INPUT, parallel=False)
def matmul_swiglu_backward(dpre, dup, dout, weight, pre, up, panels, queue):
    """Blocks of tokens times panels of weight's columns, and the slopes of what is summed up.

    Parallel: chunks by ticket, each owns a block of `dpre` and `dup`.
    Memory: a panel, and a block of dout where there are few tokens, for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear_input(dpre, False, (dup, pre, up), dout, weight, panels, queue)
