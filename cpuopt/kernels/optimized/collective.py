"""What ranks compute on each other's arrays, on vectors."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, bounds, chunks, loop_of


@helper(forceinline=True)
def itself(x):
    """Return it."""
    return (x,)


take = loop_of(itself)
ADD = (True,)


@kernel(ops.accumulate, "optimized")
def accumulate(total, part):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(total)):
        take((total,), ADD, (part,), *bounds(chunk, total))


@kernel(ops.copy, "optimized")
def copy(out, inp):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(out)):
        take((out,), SET, (inp,), *bounds(chunk, out))


@helper()
def sum_squares(inp):
    """Sum the squares of one block in float64."""
    total = 0.0
    for i in range(inp.shape[0]):
        total += np.float64(inp[i]) * np.float64(inp[i])
    return total


@kernel(ops.sumsq_blocks, "optimized")
def sumsq_blocks(out, inp):
    """Add up in float64, on vectors.

    Parallel: the blocks.
    Bound: memory.
    """
    for block in prange(inp.shape[0]):
        out[block] = sum_squares(inp[block])
