"""Attention behind a cache: few queries on vectors, one pass over the keys and one over the values; more in tiles."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import NH, B, S
from ..compile.jit import helper, kernel
from ..toolkit.lanes import exp, larger, load, load_some, max_lanes, select_some, spread, store, store_some, sum_lanes
from ..toolkit.simd import LANES
from ..toolkit.threads import SMALL
from .attention import BLOCK, attend, forward_floats

TILED = 16  # queries from which on packing them into tiles pays
ZERO, ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


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
    """Turn n scores into exp(score - top); return the sum."""
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
    return sum_lanes(total)


@helper()
def gather(out, o, att, a, values, v, n, HS, scale):
    """Sum n rows of values, weighted; four vectors of each row at a time."""
    four, whole = HS - HS % (4 * LANES), HS - HS % LANES
    for i in range(0, four, 4 * LANES):
        s0, s1, s2, s3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
        for t in range(n):
            p, row = att[a + t], v + t * HS + i
            s0, s1 = s0 + load(values, row) * p, s1 + load(values, row + LANES) * p
            s2, s3 = s2 + load(values, row + 2 * LANES) * p, s3 + load(values, row + 3 * LANES) * p
        store(out, o + i, s0 * scale)
        store(out, o + i + LANES, s1 * scale)
        store(out, o + i + 2 * LANES, s2 * scale)
        store(out, o + i + 3 * LANES, s3 * scale)
    for i in range(four, whole, LANES):
        s = spread(ZERO)
        for t in range(n):
            s = s + load(values, v + t * HS + i) * att[a + t]
        store(out, o + i, s * scale)
    if HS > whole:
        s = spread(ZERO)
        for t in range(n):
            s = s + load_some(values, v + t * HS + whole, HS - whole) * att[a + t]
        store_some(out, o + whole, s * scale, HS - whole)


@helper()
def put_away(keys, values, cache, qkv, q, position, T, C, HS):
    """Copy a head's new keys and values behind those that are there."""
    for t in range(T):
        copy(keys, cache + (position + t) * HS, qkv, q + t * 3 * C + C, HS)
        copy(values, cache + (position + t) * HS, qkv, q + t * 3 * C + 2 * C, HS)


@helper()
def query(out, o, keys, values, cache, qkv, q, n, HS, att, a):
    """Compute a head's result for one query: scores, their softmax, the weighted sum of the values."""
    scale = ONE / np.sqrt(np.float32(HS))
    for t in range(n):
        att[a + t] = scale * dot(qkv, q, keys, cache + t * HS, HS)
    total = softmax(att, a, n)
    gather(out, o, att, a, values, cache, n, HS, ONE / total)


@helper()
def few(out, keys, values, qkv, position, att, bh):
    """Do one head of one row of the batch, query by query."""
    T, C = out.shape[1:]
    NH, S, HS = keys.shape[1:]
    b, h = bh // NH, bh % NH
    cache, q, o = bh * S * HS, b * T * 3 * C + h * HS, b * T * C + h * HS
    put_away(keys, values, cache, qkv, q, position, T, C, HS)
    for t in range(T):
        query(out, o + t * C, keys, values, cache, qkv, q + t * 3 * C, position + t + 1, HS, att, bh * S)


@helper()
def many(out, keys, values, qkv, position, work, bh):
    """Do one head of one row of the batch, a block of queries at a time."""
    T, C = out.shape[1:]
    NH, S, HS = keys.shape[1:]
    b, h = bh // NH, bh % NH
    cache, q, o, w = bh * S * HS, b * T * 3 * C + h * HS, b * T * C + h * HS, bh * forward_floats(HS)
    put_away(keys, values, cache, qkv, q, position, T, C, HS)
    for t in range(0, T, BLOCK):
        x, n = q + t * 3 * C, min(BLOCK, T - t)
        attend(out, o + t * C, C, qkv, x, 3 * C, keys, cache, values, cache, HS, position + t, n, HS, work, w)


def work_floats(sizes):
    """Size what each head works in: tiles, or a row of scores."""
    return sizes["B"] * sizes["NH"] * (forward_floats.py_func(sizes["HS"]) if sizes["T"] >= TILED else 0)


@kernel(ops.attention_decode, "optimized", scratch=[("att", B * NH * S), ("work", work_floats)])
def attention_decode(out, keys, values, qkv, position, att, work):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and head; each owns its channels of `out`, its part of the cache, and a slice of `att` and `work`.
    Where there is little to read, one thread does them all.
    Memory: one row of attention weights a head; tiles for each head where there are many queries.
    Bound: memory for one query; compute for many.
    Source: for many, Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    B, T, C = out.shape
    heads = B * keys.shape[1]
    if T < TILED and 8 * B * T * C * (position + T) < SMALL:
        for bh in range(heads):
            few(out, keys, values, qkv, position, att, bh)
    else:
        for task in prange(heads):
            bh = np.int64(task)
            if T < TILED:
                few(out, keys, values, qkv, position, att, bh)
            else:
                many(out, keys, values, qkv, position, work, bh)
