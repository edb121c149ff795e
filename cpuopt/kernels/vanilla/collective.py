"""What ranks compute on each other's arrays, naive."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.accumulate, "vanilla")
def accumulate(total, part):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(total.shape[0]):
        total[i] += part[i]


@kernel(ops.copy, "vanilla")
def copy(out, inp):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(out.shape[0]):
        out[i] = inp[i]


@kernel(ops.sumsq_blocks, "vanilla")
def sumsq_blocks(out, inp):
    """Add up in float64.

    Parallel: the blocks.
    Bound: memory.
    """
    for block in prange(inp.shape[0]):
        total = 0.0
        for i in range(inp.shape[1]):
            total += np.float64(inp[block, i]) * np.float64(inp[block, i])
        out[block] = total
