"""Blocks of int8 into numbers, and rows of numbers into int8, naive."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

ZERO, NAN = np.float32(0), np.float32(np.nan)
LEAST = np.float32(7.888609052210118e-31)  # 2^-100
MOST, LIMIT = np.float32(127), np.float32(1.7014118346046923e38)  # 2^127


@kernel(ops.dequantize, "vanilla")
def dequantize(out, q, scales):
    """Block by block.

    Parallel: the blocks.
    Bound: memory.
    """
    for n in prange(scales.shape[0]):
        for i in range(q.shape[1]):
            out[n, i] = np.float32(q[n, i]) * scales[n]


@kernel(ops.quantize_rows, "vanilla", fastmath=False)
def quantize_rows(q, scales, weight):
    """Row by row.

    Parallel: the rows.
    Bound: memory.
    """
    OC, C = weight.shape
    for o in prange(OC):
        most = ZERO
        for i in range(C):
            x = abs(np.float32(weight[o, i]))
            most = x if x > most or x != x else most
        scale = (most / MOST if most >= LEAST else ZERO) if most < LIMIT else NAN
        scales[o] = scale
        for i in range(C):
            q[o, i] = np.int8(np.rint(np.float32(weight[o, i]) / scale)) if scale > ZERO else np.int8(0)
