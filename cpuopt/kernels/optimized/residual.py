"""Residual connection on vectors."""

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, chunks_of, loop_of


@helper(forceinline=True)
def total(x, y):
    """Add."""
    return (x + y,)


@helper(forceinline=True)
def twice(dout):
    """Copy the gradient: it comes from memory once."""
    return dout, dout  # out = inp1 + inp2


add, share = loop_of(total), loop_of(twice)
add_all, share_all = chunks_of(add), chunks_of(share)


@kernel(ops.residual_forward, "optimized", parallel=False)
def residual_forward(out, inp1, inp2):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    add_all((out,), SET, (inp1, inp2))


@kernel(ops.residual_backward, "optimized", parallel=False)
def residual_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    share_all((dinp1, dinp2), (dinp1_add, dinp2_add), (dout,))
