"""A linear layer for few tokens: each row of the weight is read once and multiplied with all of them."""

import numpy as np
from numba import prange

from ... import ops
from ..jit import helper, kernel
from ..lanes import load, load_some, spread, sum_lanes
from ..simd import LANES

CHUNK = 16  # rows of the weight that a thread takes in one go: 48 KB at 768 channels
ZERO = np.float32(0)


@helper(forceinline=True)
def dot(x, i, w, j, n):
    """Sum the products of n floats, in four sums so that no product waits for the one before it.

    Eight vectors a round come nearer to the speed of memory than four.
    """
    whole, some = n - n % (8 * LANES), n - n % LANES
    s0, s1, s2, s3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
    for k in range(0, whole, 8 * LANES):
        s0 = s0 + load(x, i + k) * load(w, j + k)
        s1 = s1 + load(x, i + k + LANES) * load(w, j + k + LANES)
        s2 = s2 + load(x, i + k + 2 * LANES) * load(w, j + k + 2 * LANES)
        s3 = s3 + load(x, i + k + 3 * LANES) * load(w, j + k + 3 * LANES)
        s0 = s0 + load(x, i + k + 4 * LANES) * load(w, j + k + 4 * LANES)
        s1 = s1 + load(x, i + k + 5 * LANES) * load(w, j + k + 5 * LANES)
        s2 = s2 + load(x, i + k + 6 * LANES) * load(w, j + k + 6 * LANES)
        s3 = s3 + load(x, i + k + 7 * LANES) * load(w, j + k + 7 * LANES)
    for k in range(whole, some, LANES):
        s0 = s0 + load(x, i + k) * load(w, j + k)
    if n > some:
        s1 = s1 + load_some(x, i + some, n - some) * load_some(w, j + some, n - some)
    return sum_lanes((s0 + s1) + (s2 + s3))


@helper(forceinline=True)
def products(out, inp, weight, bias, lo, hi):
    """Give columns `lo` to `hi` of out."""
    BT, C = inp.shape
    for o in range(lo, hi):
        start = bias[o] if bias.shape[0] > 0 else ZERO
        for bt in range(BT):
            out[bt, o] = dot(inp, bt * C, weight, np.int64(o) * C, C) + start


@kernel(ops.matmul_forward, "rows")
def matmul_forward(out, inp, weight, bias):
    """Dot products.

    Parallel: chunks of rows of `weight`; each owns those columns of `out`.
    Bound: the memory that `weight` streams through, once.
    """
    OC = weight.shape[0]
    for chunk in prange((OC + CHUNK - 1) // CHUNK):
        products(out, inp, weight, bias, chunk * CHUNK, min(OC, chunk * CHUNK + CHUNK))
