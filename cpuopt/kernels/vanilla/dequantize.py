"""Blocks of int8 into numbers, naive."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.dequantize, "vanilla")
def dequantize(out, q, scales):
    """Block by block.

    Parallel: the blocks.
    Bound: memory.
    """
    for n in prange(scales.shape[0]):
        for i in range(q.shape[1]):
            out[n, i] = np.float32(q[n, i]) * scales[n]
