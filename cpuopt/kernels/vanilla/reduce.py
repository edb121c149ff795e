"""Sums, copies and the transpose of axes, naive; their backwards are generated from these loops."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

ZERO = np.float32(0)


@kernel(ops.sum_forward, "vanilla")
def sum_forward(out, inp):
    """Row by row of those that are added.

    Parallel: the first axis.
    Bound: memory.
    """
    B, T, C = inp.shape
    for b in prange(B):
        for c in range(C):
            out[b, c] = ZERO
        for t in range(T):
            for c in range(C):
                out[b, c] += inp[b, t, c]


@kernel(ops.expand_forward, "vanilla")
def expand_forward(out, inp):
    """Row by row of the copies.

    Parallel: the first axis.
    Bound: memory.
    """
    B, T, C = out.shape
    for b in prange(B):
        for t in range(T):
            for c in range(C):
                out[b, t, c] = inp[b, c]


@kernel(ops.transpose_forward, "vanilla")
def transpose_forward(out, inp):
    """Row by row.

    Parallel: the first axis.
    Bound: memory.
    """
    B, T, NH, C = inp.shape
    for b in prange(B):
        for t in range(T):
            for h in range(NH):
                for c in range(C):
                    out[b, h, t, c] = inp[b, t, h, c]
