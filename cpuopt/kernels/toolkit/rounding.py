"""Stochastic rounding of float32 to bfloat16, as ``cpuopt/ops/rounding.py`` defines it."""

import numpy as np

from ..compile.jit import helper
from .fastmath import as_float, as_int

STEPS, M1, M2 = np.uint32(0x9E3779B1), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
U15, U16, LOWER, UPPER = np.uint32(15), np.uint32(16), np.uint32(0xFFFF), np.uint32(0xFFFF0000)
WORD, HALF_WORD = np.int64(0xFFFFFFFF), np.int64(32)


@helper()
def round_at_random(out, x, draw, first, state):
    """out[i] = x[i], up or down by the random bits of element first + i; a NaN stays one."""
    lower, upper = np.uint32(draw & WORD), np.uint32(((draw >> HALF_WORD) + state // 2) & WORD)
    shift, begin = np.uint32(16 * (state % 2)), np.uint32(first & WORD)
    for i in range(x.shape[0]):
        z = np.uint32(np.uint32(np.uint32(begin + np.uint32(i)) * STEPS) + lower)
        z = np.uint32(np.uint32(np.uint32(z ^ np.uint32(z >> U16)) * M1) ^ upper)
        z = np.uint32(np.uint32(z ^ np.uint32(z >> U15)) * M2)
        z = np.uint32(z ^ np.uint32(z >> U16))
        r = np.uint32(np.uint32(z >> shift) & LOWER)
        bits = np.uint32(np.uint32(np.uint32(as_int(x[i])) + r) & UPPER)
        out[i] = as_float(np.int32(bits)) if x[i] == x[i] else x[i]
