"""Attention behind a cache on vectors: one pass over the keys for the scores, one over the values."""

import numpy as np
from numba import prange

from ... import ops
from ...op import NH, B, S
from ..jit import helper, kernel
from ..lanes import exp, larger, load, load_some, max_lanes, select_some, spread, store, store_some, sum_lanes
from ..simd import LANES

ZERO, LOWEST = np.float32(0), np.float32(-np.inf)


@helper()
def dot(x, i, y, j, n):
    """Sum the products of n floats."""
    whole = n - n % LANES
    total = spread(ZERO)
    for k in range(0, whole, LANES):
        total = total + load(x, i + k) * load(y, j + k)
    if n > whole:
        total = total + load_some(x, i + whole, n - whole) * load_some(y, j + whole, n - whole)
    return sum_lanes(total)


@helper()
def copy(to, i, x, j, n):
    """Copy n floats."""
    whole = n - n % LANES
    for k in range(0, whole, LANES):
        store(to, i + k, load(x, j + k))
    if n > whole:
        store_some(to, i + whole, load_some(x, j + whole, n - whole), n - whole)


@helper()
def softmax(att, a, n):
    """Turn n scores into exp(score - top); give top and the sum."""
    whole = n - n % LANES
    m = spread(LOWEST)
    for k in range(0, whole, LANES):
        m = larger(load(att, a + k), m)
    if n > whole:
        m = larger(select_some(n - whole, load_some(att, a + whole, n - whole), spread(LOWEST)), m)
    top = max_lanes(m)
    total = spread(ZERO)
    for k in range(0, whole, LANES):
        e = exp(load(att, a + k) - top)
        store(att, a + k, e)
        total = total + e
    if n > whole:
        e = exp(load_some(att, a + whole, n - whole) - top)
        store_some(att, a + whole, e, n - whole)
        total = total + select_some(n - whole, e, spread(ZERO))
    return top, sum_lanes(total)


@helper()
def gather(out, o, att, a, values, v, row, n, HS, scale):
    """Sum n rows of values, weighted."""
    whole = HS - HS % LANES
    for i in range(0, whole, LANES):
        s = spread(ZERO)
        for t in range(n):
            s = s + load(values, v + t * row + i) * att[a + t]
        store(out, o + i, s * scale)
    if HS > whole:
        s = spread(ZERO)
        for t in range(n):
            s = s + load_some(values, v + t * row + whole, HS - whole) * att[a + t]
        store_some(out, o + whole, s * scale, HS - whole)


@kernel(ops.attention_decode, "optimized", scratch=[("att", B * NH * S)])
def attention_decode(out, lse, keys, values, qkv, position, att):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and head; each owns its channels of `out`, of the cache, and a slice of `att`.
    Memory: one row of attention weights a head.
    Bound: memory.
    """
    B, T, C = out.shape
    NH, S = lse.shape[1], keys.shape[1]
    HS = C // NH
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    for bh in prange(B * NH):
        b, h = bh // NH, bh % NH
        cache, a, q = b * S * C + h * HS, bh * S, b * T * 3 * C + h * HS
        for t in range(T):
            copy(keys, cache + (position + t) * C, qkv, q + t * 3 * C + C, HS)
            copy(values, cache + (position + t) * C, qkv, q + t * 3 * C + 2 * C, HS)
        for t in range(T):
            n = position + t + 1
            for t2 in range(n):
                att[a + t2] = scale * dot(qkv, q + t * 3 * C, keys, cache + t2 * C, HS)
            top, total = softmax(att, a, n)
            lse[b, h, t] = np.log(total) + top
            gather(out, (b * T + t) * C + h * HS, att, a, values, cache, C, n, HS, np.float32(1) / total)
