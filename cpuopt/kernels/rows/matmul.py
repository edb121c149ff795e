"""A linear layer for few tokens: each row of the weight is read once and multiplied with all of them.

Four rows that lie far apart are read at a time, and what comes next of each is fetched: memory answers four streams
sooner than one, and the processor does not see by itself where a row goes on in the next page.
"""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..optimized.decode import dot
from ..toolkit.lanes import load, load_some, spread, sum_lanes
from ..toolkit.simd import LANES, LINE, at, prefetch
from ..toolkit.threads import SMALL

CHUNK = 8  # rows of each stream that a thread takes in one go
AHEAD = 256  # floats from what is multiplied to what is fetched; 64 to 2,048 were as fast
ZERO = np.float32(0)


@helper(forceinline=True)
def four(x, i, w, j, stride, C):
    """Multiply C floats with four rows, `stride` floats apart; two sums each, so that few products wait for others."""
    j1, j2, j3 = j + stride, j + 2 * stride, j + 3 * stride
    whole = C - C % (2 * LANES)
    a0, a1, a2, a3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
    b0, b1, b2, b3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
    for k in range(0, whole, 2 * LANES):
        for n in range(AHEAD, AHEAD + 2 * LANES, LINE):
            prefetch(at(w, j + k + n))
            prefetch(at(w, j1 + k + n))
            prefetch(at(w, j2 + k + n))
            prefetch(at(w, j3 + k + n))
        a, b = load(x, i + k), load(x, i + k + LANES)
        a0, b0 = a0 + a * load(w, j + k), b0 + b * load(w, j + k + LANES)
        a1, b1 = a1 + a * load(w, j1 + k), b1 + b * load(w, j1 + k + LANES)
        a2, b2 = a2 + a * load(w, j2 + k), b2 + b * load(w, j2 + k + LANES)
        a3, b3 = a3 + a * load(w, j3 + k), b3 + b * load(w, j3 + k + LANES)
    for k in range(whole, C, LANES):
        n = C - k
        a = load_some(x, i + k, n)
        a0, a1 = a0 + a * load_some(w, j + k, n), a1 + a * load_some(w, j1 + k, n)
        a2, a3 = a2 + a * load_some(w, j2 + k, n), a3 + a * load_some(w, j3 + k, n)
    return sum_lanes(a0 + b0), sum_lanes(a1 + b1), sum_lanes(a2 + b2), sum_lanes(a3 + b3)


@helper()
def products(out, inp, weight, bias, lo, hi):
    """Compute columns `lo` to `hi` of out, and those one, two and three quarters of all columns further."""
    BT, C = inp.shape
    quarter = weight.shape[0] // 4
    for o in range(lo, hi):
        for bt in range(BT):
            s0, s1, s2, s3 = four(inp, bt * C, weight, o * C, quarter * C, C)
            if bias.shape[0] > 0:
                s0, s1 = s0 + bias[o], s1 + bias[o + quarter]
                s2, s3 = s2 + bias[o + 2 * quarter], s3 + bias[o + 3 * quarter]
            out[bt, o], out[bt, o + quarter] = s0, s1
            out[bt, o + 2 * quarter], out[bt, o + 3 * quarter] = s2, s3


@helper()
def last_products(out, inp, weight, bias):
    """Compute the last columns, three at most, which quarters leave over."""
    BT, C = inp.shape
    OC = weight.shape[0]
    for o in range(OC - OC % 4, OC):
        for bt in range(BT):
            out[bt, o] = dot(inp, bt * C, weight, o * C, C) + (bias[o] if bias.shape[0] > 0 else ZERO)


@helper()
def nothing(more, x, lo, hi):
    """End a product without an epilogue."""


def linear_then(epilogue):
    """Make the function of a linear layer that calls ``epilogue(more, out, lo, hi)`` when out[lo:hi], flat, is there.

    `more` is the tuple of the arrays that the epilogue takes besides.
    """

    @helper()
    def chunk(out, more, inp, weight, bias, lo, hi):
        BT, OC = out.shape
        products(out, inp, weight, bias, lo, hi)
        for bt in range(BT):
            for quarter in range(4):
                start = bt * OC + OC // 4 * quarter
                epilogue(more, out, start + lo, start + hi)

    @helper(parallel=True)
    def linear(out, more, inp, weight, bias):
        BT, OC = out.shape
        quarter = OC // 4
        if 4 * OC * inp.shape[1] < SMALL:
            chunk(out, more, inp, weight, bias, 0, quarter)
        else:
            for i in prange((quarter + CHUNK - 1) // CHUNK):
                chunk(out, more, inp, weight, bias, i * CHUNK, min(quarter, i * CHUNK + CHUNK))
        last_products(out, inp, weight, bias)
        for bt in range(BT):
            epilogue(more, out, bt * OC + 4 * quarter, bt * OC + OC)

    return linear


linear = linear_then(nothing)


@kernel(ops.matmul_forward, "rows", parallel=False)
def matmul_forward(out, inp, weight, bias):
    """Dot products.

    Parallel: chunks of rows of `weight`; each owns those columns of `out`.
    Bound: the memory that `weight` streams through, once.
    """
    linear(out, (), inp, weight, bias)
