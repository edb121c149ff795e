"""Attention behind a cache: few queries on vectors, one pass over the keys and one over the values; more in tiles.

All query heads that read a key head take a chunk of it while it is in the first-level cache: memory is read once.
"""

from typing import Any

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import NH, B, S
from ..compile.jit import helper, kernel
from ..toolkit.constants import LOWEST, ONE, ZERO
from ..toolkit.lanes import (
    exp,
    larger,
    load,
    load_some,
    max_lanes,
    select_some,
    spread,
    store,
    store_some,
    sum_lanes,
    tanh,
)
from ..toolkit.pairs import add_pairs, is_half, load_some_words, load_words, sums_of
from ..toolkit.simd import LANES
from ..toolkit.threads import SMALL
from ..toolkit.tiles import flat
from ._attention_operands import RowView, rows_from, thirds
from .attention import ATTENTION, BLOCK, Attention, attend_floats

TILED = 16  # queries from which on packing them into tiles pays
CHUNK = 32  # keys or values: 8 KB of the usual heads
NO_STARTS = np.empty(0, np.int32)


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
def dot_pairs(x, i, y, j, n):
    """Sum the products of n bfloat16, word by word."""
    whole = n - n % (2 * LANES)
    total = spread(ZERO)
    for k in range(0, whole, 2 * LANES):
        total = add_pairs(load_words(x, i + k), load_words(y, j + k), total)
    if n > whole:
        x_end, y_end = load_some_words(x, i + whole, n - whole), load_some_words(y, j + whole, n - whole)
        total = add_pairs(x_end, y_end, total)
    return sum_lanes(total)


@helper()
def copy(to, i, x, j, n):
    """Copy n elements."""
    whole = n - n % LANES
    for k in range(0, whole, LANES):
        store(to, i + k, load(x, j + k))
    if n > whole:
        store_some(to, i + whole, load_some(x, j + whole, n - whole), n - whole)


@helper()
def scores(att, a, q, q0, keys, k, n, HS, cap):
    """Compute a query's scores for n rows of keys."""
    scale = ONE / np.sqrt(np.float32(HS))
    for t in range(n):
        if is_half(q) and is_half(keys):
            att[a + t] = scale * dot_pairs(q, q0, keys, k + t * HS, HS)
        else:
            att[a + t] = scale * dot(q, q0, keys, k + t * HS, HS)
    for t in range(0, n if cap > ZERO else 0, LANES):
        store_some(att, a + t, tanh(load_some(att, a + t, n - t) * (ONE / cap)) * cap, n - t)


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
def gather(out, o, att, a, values, v, n, HS, add):
    """Sum n rows of values, weighted, or add them to what is there; four vectors of each row at a time."""
    four, whole = HS - HS % (4 * LANES), HS - HS % LANES
    for i in range(0, four, 4 * LANES):
        s0, s1, s2, s3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
        if add:
            s0, s1 = load(out, o + i), load(out, o + i + LANES)
            s2, s3 = load(out, o + i + 2 * LANES), load(out, o + i + 3 * LANES)
        for t in range(n):
            p, row = att[a + t], v + t * HS + i
            s0, s1 = s0 + load(values, row) * p, s1 + load(values, row + LANES) * p
            s2, s3 = s2 + load(values, row + 2 * LANES) * p, s3 + load(values, row + 3 * LANES) * p
        store(out, o + i, s0)
        store(out, o + i + LANES, s1)
        store(out, o + i + 2 * LANES, s2)
        store(out, o + i + 3 * LANES, s3)
    for i in range(four, whole, LANES):
        s = load(out, o + i) if add else spread(ZERO)
        for t in range(n):
            s = s + load(values, v + t * HS + i) * att[a + t]
        store(out, o + i, s)
    if HS > whole:
        s = load_some(out, o + whole, HS - whole) if add else spread(ZERO)
        for t in range(n):
            s = s + load_some(values, v + t * HS + whole, HS - whole) * att[a + t]
        store_some(out, o + whole, s, HS - whole)


@helper()
def put_away(keys, values, k, v, position, T, bg):
    """Copy the new keys and values of one key head, in one row of the batch, behind those that are there."""
    NKV, S, HS = keys.shape[1:]
    for t in range(T):
        to, token, channel = (bg * S + position + t) * HS, bg // NKV * T + t, bg % NKV * HS
        copy(keys, to, k.array, rows_from(k, token, channel).first, HS)
        copy(values, to, v.array, rows_from(v, token, channel).first, HS)


@helper()
def query(out, o, keys, values, cache, q, group, n, cap, att, a):
    """Compute one query's result for all heads of a group: scores, their softmax, the weighted sum of the values.

    It reads the n keys and values from `cache` on.
    """
    S, HS = keys.shape[2:]
    chunk = CHUNK if group > 1 else n
    for start in range(0, n, chunk):
        for h in range(group):
            row, some = cache + start * HS, min(chunk, n - start)
            scores(att, a + h * S + start, q.array, q.first + h * HS, keys, row, some, HS, cap)
    for h in range(group):
        att[a + group * S + h] = ONE / softmax(att, a + h * S, n)
    for start in range(0, n, chunk):
        for h in range(group):
            row, some = cache + start * HS, min(chunk, n - start)
            gather(out, o + h * HS, att, a + h * S + start, values, row, some, HS, start > 0)
    for h in range(group):
        for i in range(0, HS, LANES):
            x = load_some(out, o + h * HS + i, HS - i) * att[a + group * S + h]
            store_some(out, o + h * HS + i, x, HS - i)


@helper()
def few(out, made, keys, values, q, k, v, position, limits, att, bg):
    """Do the heads of one group in one row of the batch, query by query; `made` has the sums of `out`."""
    T, C = out.shape[1:]
    NKV, S, HS = keys.shape[1:]
    _, window, cap = limits
    group = C // (NKV * HS)
    channel = bg % NKV * group * HS
    put_away(keys, values, k, v, position, T, bg)
    for t in range(T):
        token = bg // NKV * T + t
        low = max(position + t - window + 1, 0) if window > 0 else 0
        n, read, o = position + t + 1 - low, (bg * S + low) * HS, token * C + channel
        query(made, o, keys, values, read, rows_from(q, token, channel), group, n, cap, att, bg * group * (S + 1))
        if is_half(out):
            copy(out, o, made, o, group * HS)


@helper()
def is_small(out, keys, position, window):
    """Return whether there is too little to read for several threads."""
    B, NKV, _, HS = keys.shape
    T = out.shape[1]
    read = min(position, window) if window > 0 else position
    return T < TILED and 8 * B * T * NKV * HS * (read + T) < SMALL


@helper()
def start(out, made, keys, values, q, k, v, position, limits, att, bg):
    """Do a group, if it has few queries; put its keys and values away, if it has many."""
    if out.shape[1] < TILED:
        few(out, made, keys, values, q, k, v, position, limits, att, bg)
    else:
        put_away(keys, values, k, v, position, out.shape[1], bg)


def decode_by(x: Attention) -> tuple[Any, list[tuple[Any, ...]]]:
    """Make the function of new tokens for a storage type, and list its scratch."""
    attend, micro = x.attend, x.operands.micro
    unit, lines, rounds = micro.group, micro.lines, micro.rounds

    @helper()
    def many(out, keys, values, q, position, limits, work, bh):
        """Do one head of one row of the batch, a block of queries at a time, when its keys and values are put away."""
        T, C = out.shape[1:]
        NKV, S, HS = keys.shape[1:]
        NH = C // HS
        b, h, w = bh // NH, bh % NH, bh * attend_floats(HS, unit, lines)
        cache = bh // (NH // NKV) * S * HS
        k, v = RowView(flat(keys), cache, HS), RowView(flat(values), cache, HS)
        for t in range(0, T, BLOCK):
            to, queries = rows_from(RowView(out, 0, C), b * T + t, h * HS), rows_from(q, b * T + t, h * HS)
            attend(to, queries, k, v, position + t, min(BLOCK, T - t), HS, limits, 0, work, w)

    @helper(parallel=True)
    def decode(out, made, keys, values, q, k, v, position, window, cap, att, work):
        """Attend to the cache and to the new keys; `made` has room for the sums of `out`."""
        B, T, C = out.shape
        groups, heads, limits = B * keys.shape[1], B * (C // keys.shape[3]), (NO_STARTS, window, np.float32(cap))
        if is_small(out, keys, position, window):
            for bg in range(groups):
                few(out, made, keys, values, q, k, v, position, limits, att, bg)
        else:
            for task in prange(groups):
                start(out, made, keys, values, q, k, v, position, limits, att, np.int64(task))
            if T >= TILED:
                for task in prange(heads):
                    many(out, keys, values, q, position, limits, work, np.int64(task))

    def work_floats(sizes):
        """Size the tiles of each head, if there are enough queries; else the sums of a result that is rounded."""
        many = sizes["T"] >= TILED
        floats = attend_floats.py_func(sizes["HS"], unit, lines) if many else sizes["T"] * sizes["HS"] * rounds
        return sizes["B"] * sizes["NH"] * floats

    return decode, [("att", B * NH * S + B * NH), ("work", work_floats)]


DECODE = {x.operands.micro.storage: decode_by(x) for x in ATTENTION}
"""The function of new tokens and its scratch, by storage type."""


def register(of: str) -> None:
    """Register the kernel of a storage type."""
    decode, scratch = DECODE[of]

    @kernel(ops.attention_decode, "optimized", of=of, scratch=scratch, parallel=False)
    def attention_decode(out, keys, values, qkv, position, window, cap, att, work):
        """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of values.

        Parallel: batch and head; each owns its channels of `out`, its part of the cache, and a slice of `att` and
        `work`. If there is little to read, one thread does them all.
        Memory: one row of attention weights a head, and out in float32; tiles for each head if there are many queries.
        Bound: memory for one query; compute for many.
        Source: for many, Dao 2023 (arXiv 2307.08691), algorithm 1.
        """
        q, k, v = thirds(qkv)
        decode(out, sums_of(flat(out), work), keys, values, q, k, v, position, window, cap, att, work)


for _storage in DECODE:
    register(_storage)
