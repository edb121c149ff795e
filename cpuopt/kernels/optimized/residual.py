"""Residual connection on vectors."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, bounds, chunks, loop_of


@helper(forceinline=True)
def total(x, y):
    """Add."""
    return (x + y,)


@helper(forceinline=True)
def twice(dout):
    """Copy the gradient: it comes from memory once."""
    return dout, dout  # out = inp1 + inp2


add, share = loop_of(total), loop_of(twice)


@kernel(ops.residual_forward, "optimized")
def residual_forward(out, inp1, inp2):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(out)):
        add((out,), SET, (inp1, inp2), *bounds(chunk, out))


@kernel(ops.residual_backward, "optimized")
def residual_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(dinp1)):
        share((dinp1, dinp2), (dinp1_add, dinp2_add), (dout,), *bounds(chunk, dinp1))
