"""Dropout, naive; its backward is generated from these loops, and draws the same numbers again."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel

ZERO, ONE, UNIT = np.float32(0), np.float32(1), np.float32(2**-24)
GAMMA = np.uint64(0x9E3779B97F4A7C15)
M1, M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
U27, U30, U31, U40 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(40)


@helper()
def mix(bits):
    """Mix 64 bits, so that each of them depends on all."""
    first = (bits ^ (bits >> U30)) * M1
    second = (first ^ (first >> U27)) * M2
    return second ^ (second >> U31)


@kernel(ops.dropout_forward, "vanilla")
def dropout_forward(out, inp, p, stream, seed, counter):
    """Element by element.

    Parallel: the elements; a random number depends on the place of its element alone.
    Bound: compute, the random numbers.
    """
    rate = np.float32(p) if counter else ZERO
    key = mix(mix(mix(np.uint64(seed) + GAMMA) + np.uint64(counter) + GAMMA) + np.uint64(stream) + GAMMA)
    for i in prange(out.shape[0]):
        u = np.float32(mix(key + np.uint64(i) * GAMMA) >> U40) * UNIT
        out[i] = inp[i] / (ONE - rate) if u >= rate else ZERO * inp[i]
