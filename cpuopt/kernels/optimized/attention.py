"""Causal attention in tiles of 64 queries by 64 keys: of the square of scores, only the causal half is computed.

A tile of scores is kept transposed, a row for each key and a lane for each query: a query's maximum and sum then run
down the rows, a vector of queries at a time. A tile that no query reads is left out. One that is read in part, as on
the diagonal, has a range of keys for each query and of queries for each key, and is computed within them.

The work is done by `forward` and `backward`, for as many query heads to a key head as there are, wherever q, k and v
lie: each is a flat array, the offset of its first head, and the distance of its rows. For GPT-2, these are thirds of
one array. Keys and values are read where they lie, unless their rows are no whole vectors.
"""

import numpy as np
from numba import config, prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.lanes import exp2, larger, load, load_some, log, select_some, spread, store, store_some, sum_lanes, tanh
from ..toolkit.queue import ORDERED, deal, for_each_thread, take
from ..toolkit.simd import LANES
from ..toolkit.tiles import (
    BLOCK,
    COLUMNS,
    DEPTH,
    PART,
    WHOLE,
    flat,
    pack,
    product,
    tell,
    turn,
    unpack,
    up,
    wait_for,
)

RANGES = 4 * BLOCK  # the two ends of each query's and of each key's range in a tile
ZERO, ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)
NAN = np.float32(np.nan)
NOTHING = np.finfo(np.float32).min  # the maximum of a query that has read no key; less it, a hidden score is still -inf
LOG2E, LN2 = np.float32(1 / np.log(2)), np.float32(np.log(2))


def head_size(sizes):
    """Channels of a head, of which the ops over a fused qkv have no symbol."""
    return sizes["HS"] if "HS" in sizes else sizes["C"] // sizes["NH"]


def for_each_head_size(floats):
    """Size scratch of ``floats(HS)``."""
    return lambda sizes: floats.py_func(head_size(sizes))


@helper()
def count_blocks(lse):
    """Count the blocks of queries of all heads."""
    B, NH, T = lse.shape
    return B * NH * ((T + BLOCK - 1) // BLOCK)


@helper()
def limited(starts, window):
    """Return whether some query may read fewer keys than all up to its own."""
    return starts.size > 0 or window > 0


@helper()
def first_key(starts, row, window, t):
    """Return the first key that token t of a row reads; the row's starts begin at `row`."""
    low = max(t - window + 1, 0) if window > 0 else 0
    return max(low, np.int64(starts[row + t])) if starts.size > 0 else low


@helper()
def set_ranges(w, ranges, starts, row, window, t0, t2, n_q, n_k, diagonal):
    """Set the ranges of queries from t0 and keys from t2 on: the first key and the end of each query; then of each key.

    The queries that fill up the last vector read what the last query reads.
    """
    first, end = w[ranges : ranges + BLOCK], w[ranges + BLOCK : ranges + 2 * BLOCK]
    for t in range(n_q):
        end[t] = t + 1 if diagonal else n_k
    low, high = w[ranges + 2 * BLOCK : ranges + 3 * BLOCK], w[ranges + 3 * BLOCK : ranges + 4 * BLOCK]
    for i in range(n_k):
        low[i] = i if diagonal else 0
    if starts.size > 0:
        q = 0
        for t in range(n_q):
            first[t] = min(max(first_key(starts, row, window, t0 + t) - t2, 0), n_k)
        for i in range(n_k):
            while q < n_q and first[q] <= i:
                q += 1
            high[i] = q if q < n_q else BLOCK
    else:
        before = t2 + window - 1 - t0 if window > 0 else BLOCK  # queries that read no fewer keys than all
        for t in range(n_q):
            first[t] = min(max(t - before, 0), n_k)
        for i in range(n_k):
            high[i] = max(i + before + 1, 0) if i + before + 1 < n_q else BLOCK


@helper()
def span(w, ranges, t, n_q, n_k, part):
    """Return the keys that a vector of queries reads: the first, the first and the end of all queries, and the end."""
    if part == WHOLE:
        return 0, 0, n_k + 1, n_k
    last, ends = min(t + LANES, n_q) - 1, ranges + BLOCK
    start, end = np.int64(w[ranges + t]), np.int64(w[ends + last])
    return start, np.int64(w[ranges + last]), min(end, np.int64(w[ends + t])), end


@helper(forceinline=True)
def select_read(w, ranges, t2, t, x, other):
    """Take x for the queries from t on that read key t2, and `other` for those that do not."""
    i = ranges + 2 * BLOCK + t2
    return select_some(np.int64(w[i]) - t, other, select_some(np.int64(w[i + BLOCK]) - t, x, other))


@helper()
def hide(w, score, ranges, t, start, inner, outer, end):
    """Set scores of queries from t on to minus infinity for the keys that they do not read."""
    for t2 in range(start, min(inner, end)):
        i = score + t2 * BLOCK + t
        store(w, i, select_read(w, ranges, t2, t, load(w, i), spread(LOWEST)))
    for t2 in range(max(inner, outer), end):
        i = score + t2 * BLOCK + t
        store(w, i, select_read(w, ranges, t2, t, load(w, i), spread(LOWEST)))


@helper()
def softmax(w, score, top, alpha, total, ranges, n_q, n_k, part, cap):
    """Raise `top`, turn scores into 2^(score - top) and sum them; what was summed before shrinks by `alpha`."""
    for t in range(0, n_q, LANES):
        start, inner, outer, end = span(w, ranges, t, n_q, n_k, part)
        for t2 in range(start, end if cap > ZERO else start):
            i = score + t2 * BLOCK + t
            store(w, i, tanh(load(w, i) * (ONE / cap)) * cap)
        hide(w, score, ranges, t, start, inner, outer, end)
        old = load(w, top + t)
        m, m1, m2, m3 = old, old, old, old  # four chains of maxima: one would wait for each comparison
        for t2 in range(start, end - 3, 4):
            i = score + t2 * BLOCK + t
            m, m1 = larger(load(w, i), m), larger(load(w, i + BLOCK), m1)
            m2, m3 = larger(load(w, i + 2 * BLOCK), m2), larger(load(w, i + 3 * BLOCK), m3)
        m = larger(larger(m1, m), larger(m2, m3))
        for t2 in range(end - (end - start) % 4, end):
            m = larger(load(w, score + t2 * BLOCK + t), m)
        shrink = exp2(old - m)
        s = load(w, total + t) * shrink
        for t2 in range(start, end):
            i = score + t2 * BLOCK + t
            e = exp2(load(w, i) - m)
            store(w, i, e)
            s = s + e
        for t2 in range(start // PART * PART, start):  # zeros for DEPTH
            store(w, score + t2 * BLOCK + t, spread(ZERO))
        for t2 in range(end, min(n_k, up(end, PART))):
            store(w, score + t2 * BLOCK + t, spread(ZERO))
        store(w, top + t, m)
        store(w, alpha + t, shrink)
        store(w, total + t, s)


@helper()
def forward_floats(HS):
    """Working memory of one thread: packed rows, q transposed, sums of out, a tile, its ranges; 3 numbers a query."""
    return BLOCK * (up(HS, LANES) * 3 + BLOCK + 3) + RANGES


@helper()
def first_tile(starts, row, window, before):
    """Return the first tile of keys that the queries from `before` on read, and the maximum that they begin with."""
    if limited(starts, window):
        return first_key(starts, row, window, before) // BLOCK, NOTHING
    return 0, LOWEST


@helper()
def part_of(starts, row, window, t0, t2, n_q, diagonal):
    """Return whether queries from t0 on read a tile of keys from t2 on in part."""
    return diagonal or (limited(starts, window) and first_key(starts, row, window, t0 + n_q - 1) > t2)


@helper()
def attend(out, o0, o_row, q, q0, q_row, k, k0, v, v0, kv_row, before, n_q, HS, limits, row, w, packed):
    """Attend from up to BLOCK queries to `before` keys and then, causally, to as many as there are queries.

    The arguments are flat arrays, the offset of the first row in each, and the distance of rows. `limits` are starts,
    window and cap; the starts of the row of queries begin at `row`. It returns where in w the queries' maxima stay;
    their sums are 2 * BLOCK behind.
    """
    starts, window, cap = limits
    width = up(HS, LANES)
    qt, o, score = packed + BLOCK * width, packed + 2 * BLOCK * width, packed + 3 * BLOCK * width
    top, alpha, total = score + BLOCK * BLOCK, score + BLOCK * BLOCK + BLOCK, score + BLOCK * BLOCK + 2 * BLOCK
    ranges = total + BLOCK
    tiles = (before + BLOCK - 1) // BLOCK
    first, lowest = first_tile(starts, row, window, before)
    for t in range(BLOCK):
        w[top + t], w[total + t] = lowest, ZERO
    for i in range(o, o + BLOCK * width if limited(starts, window) else o, LANES):
        store(w, i, spread(ZERO))
    rows, row_at, distance = q, q0, q_row
    if width > HS or n_q % LANES > 0:
        pack(w, packed, width, up(n_q, LANES), q, q0, q_row, n_q, HS)
        rows, row_at, distance = w, packed, width
    turn(w, qt, BLOCK, rows, row_at, distance, n_q, HS, LOG2E / np.sqrt(np.float32(HS)))
    for tile in range(min(first, tiles), tiles + 1):
        diagonal, again = tile == tiles, tile > 0 or limited(starts, window)
        t2 = before if diagonal else tile * BLOCK
        n_k = n_q if diagonal else min(BLOCK, before - t2)
        partly = part_of(starts, row, window, before, t2, n_q, diagonal)
        if partly:
            set_ranges(w, ranges, starts, row, window, before, t2, n_q, n_k, diagonal)
        # pass 1: the scores, transposed
        part, keys = COLUMNS if partly else WHOLE, ranges + 2 * BLOCK
        product(w, score, BLOCK, k, k0 + t2 * kv_row, kv_row, 1, w, qt, BLOCK, n_k, n_q, HS, part, w, keys, False)
        # pass 2: their powers, and the sums
        softmax(w, score, top, alpha, total, ranges, n_q, n_k, part, cap * LOG2E)
        # pass 3: gather the values
        for t in range(n_q if tile > first else 0):
            for i in range(0, width, LANES):
                store(w, o + t * width + i, load(w, o + t * width + i) * w[alpha + t])
        rows, row_at, distance = v, v0 + t2 * kv_row, kv_row
        if width > HS:
            pack(w, packed, width, n_k, v, row_at, kv_row, n_k, HS)
            rows, row_at, distance = w, packed, width
        part = DEPTH if partly else WHOLE
        product(w, o, width, w, score, 1, BLOCK, rows, row_at, distance, n_q, width, n_k, part, w, ranges, again)
    # pass 4: normalize
    for t in range(n_q):
        if w[total + t] == ZERO:  # all scores that it reads are minus infinity
            w[top + t] = NAN
        unpack(out, o0 + t * o_row, o_row, w, o + t * width, width, 1, HS, ONE / w[total + t], False)
    return top


def forward_by(attend):
    """Make the function of a thread from that of a block of queries."""

    @helper()
    def forward(out, lse, q, k, v, limits, places, group, work, w, queue):
        """Take blocks of queries, the longest of a head first, until none is left.

        Each `group` of query heads reads one key head. `places` are the offsets of q, k and v in their arrays, with the
        distance of rows behind that of q and that of k and v: ``q0, q_row, k0, v0, kv_row``.
        """
        NH, T = lse.shape[1:]
        q0, q_row, k0, v0, kv_row = places
        HS, o_row, blocks = out.shape[2] // NH, out.shape[2], (T + BLOCK - 1) // BLOCK
        task = take(queue, 0)
        while task >= 0:
            bh, t0 = task // blocks, (blocks - 1 - task % blocks) * BLOCK
            b, h, n_q = bh // NH, bh % NH, min(BLOCK, T - t0)
            o, x = (b * T + t0) * o_row + h * HS, q0 + (b * T + t0) * q_row + h * HS
            head = b * T * kv_row + h // group * HS
            k1, v1, row = k0 + head, v0 + head, b * T
            top = attend(out, o, o_row, q, x, q_row, k, k1, v, v1, kv_row, t0, n_q, HS, limits, row, work, w)
            for t in range(0, n_q, LANES):
                total = log(load(work, top + 2 * BLOCK + t)) + load(work, top + t) * LN2
                store_some(lse, bh * T + t0 + t, total, n_q - t)
            task = take(queue, 0)

    return forward


forward = forward_by(attend)

FORWARD_SCRATCH = [("work", for_each_thread(for_each_head_size(forward_floats))), ORDERED]


@helper()
def limits_of(starts, window, cap):
    """Return what limits attention as its functions take it."""
    return flat(starts), window, np.float32(cap)


@kernel(ops.attention_forward, "optimized", scratch=FORWARD_SCRATCH)
def attention_forward(out, lse, qkv, starts, window, cap, work, queue):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: blocks of queries of each head, handed out by ticket, the longest of a head first.
    Memory: four tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    C, limits = out.shape[2], limits_of(starts, window, cap)
    floats, x, places = forward_floats(C // lse.shape[1]), flat(qkv), (0, 3 * C, C, 2 * C, 3 * C)
    deal(queue, count_blocks(lse))
    for worker in prange(work.shape[0] // floats):
        forward(out, lse, x, x, x, limits, places, 1, work, np.int64(worker) * floats, queue)


@helper(forceinline=True)
def weigh(w, score, datt, log_sum, dot, cap):
    """Return the weights of a vector of scores, and the adjoints of the scores."""
    x, d = load(w, score), load(w, datt) - dot
    if cap > ZERO:
        share = tanh(x * (ONE / cap))
        x, d = share * cap, d * (spread(ONE) - share * share)
    p = exp2(x - log_sum)
    return p, p * d


@helper()
def softmax_backward(w, score, datt, lse, lse0, delta, ranges, n_q, n_k, part, cap):
    """Turn scores into weights, and the weights' adjoints into those of the scores."""
    none = spread(ZERO)
    for t in range(0, n_q, LANES):
        start, inner, outer, end = span(w, ranges, t, n_q, n_k, part)
        log_sum, dot = load_some(lse, lse0 + t, n_q - t) * LOG2E, load(w, delta + t)
        for t2 in range(start, end):
            i = t2 * BLOCK + t
            p, ds = weigh(w, score + i, datt + i, log_sum, dot, cap)
            if t2 < inner or t2 >= outer:
                p, ds = select_read(w, ranges, t2, t, p, none), select_read(w, ranges, t2, t, ds, none)
            store(w, score + i, p)
            store(w, datt + i, ds)
        for t2 in range(start // PART * PART, start):  # zeros for DEPTH
            store(w, score + t2 * BLOCK + t, none)
            store(w, datt + t2 * BLOCK + t, none)
        for t2 in range(end, min(n_k, up(end, PART))):
            store(w, score + t2 * BLOCK + t, none)
            store(w, datt + t2 * BLOCK + t, none)


@helper()
def block_floats(HS):
    """Working memory of a block of keys while its tiles are visited: dk, dv, and k if that has to be packed."""
    return (2 if HS % LANES == 0 else 3) * BLOCK * up(HS, LANES)


@helper()
def row_floats(HS):
    """Working memory of one thread: q, dout, dq, two of them transposed, two tiles, their ranges, a number a query."""
    return BLOCK * (5 * up(HS, LANES) + 2 * BLOCK + 1) + RANGES


@helper()
def reach(starts, row, window, T, i):
    """Return the first blocks of keys that a block of queries and the one behind it read."""
    if not limited(starts, window):
        return 0, 0
    behind = min((i + 1) * BLOCK, T - 1)
    return first_key(starts, row, window, i * BLOCK) // BLOCK, first_key(starts, row, window, behind) // BLOCK


@helper()
def backward_row(
    dq, dk, dv, adds, dout, q, k, v, out, lse, limits, places, group, kept, first, w, base, steps, b, h, i
):
    """Do the tiles of query block `i`, from the diagonal back to the first block of keys that it reads.

    A tile waits until the row before has been through its block of keys: `steps` counts the rows. The last row that
    reads a block adds what its head has gathered to dk and dv, after the head before it in the group.
    """
    starts, window, cap = limits
    NH, T = lse.shape[1:]
    HS, o_row, head, blocks = out.shape[2] // NH, out.shape[2], b * NH + h, (T + BLOCK - 1) // BLOCK
    width, floats, t0, done = up(HS, LANES), block_floats(HS), i * BLOCK, head * blocks
    size, n_q = BLOCK * width, min(BLOCK, T - t0)
    qs, dqs, do = base, base + size, base + 2 * size
    qt, dot, score = base + 3 * size, base + 4 * size, base + 5 * size
    datt, delta, ranges = score + BLOCK * BLOCK, score + 2 * BLOCK * BLOCK, score + (2 * BLOCK + 1) * BLOCK
    q0, q_row, k0, v0, kv_row = places
    x, key_head, scale = (
        q0 + (b * T + t0) * q_row + h * HS,
        b * T * kv_row + h // group * HS,
        ONE / np.sqrt(np.float32(HS)),
    )
    o = (b * T + t0) * o_row + h * HS
    # pass 1: the queries, and delta[t] = s * dout[t] . out[t], which stands for the sum over att * datt
    pack(w, qs, width, up(n_q, LANES), q, x, q_row, n_q, HS)
    pack(w, do, width, up(n_q, LANES), dout, o, o_row, n_q, HS)
    turn(w, qt, BLOCK, w, qs, width, n_q, HS, LOG2E * scale)
    turn(w, dot, BLOCK, w, do, width, n_q, HS, scale)
    for t in range(n_q):
        d = spread(ZERO)
        for c in range(0, HS, LANES):
            d = d + load(w, do + t * width + c) * load_some(out, o + t * o_row + c, HS - c)
        w[delta + t] = sum_lanes(d) * scale
    low, later_low = reach(starts, b * T, window, T, i)
    for j in range(i, low - 1, -1):
        diagonal, t2, block = j == i, j * BLOCK, (first + j) * floats
        n_k, key, value = min(BLOCK, T - t2), k0 + key_head + t2 * kv_row, v0 + key_head + t2 * kv_row
        dks, dvs = block, block + size
        rows, row, distance = k, key, kv_row
        if width > HS:
            rows, row, distance = kept, block + 2 * size, width
            if diagonal:
                pack(rows, row, width, n_k, k, key, kv_row, n_k, HS)
        if not diagonal:
            wait_for(steps, done + j, i - j)
        partly, keys = part_of(starts, b * T, window, t0, t2, n_q, diagonal), ranges + 2 * BLOCK
        if partly:
            set_ranges(w, ranges, starts, b * T, window, t0, t2, n_q, n_k, diagonal)
        # pass 2: score[t, t2] = s / ln 2 * q[t] . k[t2] and datt[t, t2] = s * dout[t] . v[t2], both transposed
        part = COLUMNS if partly else WHOLE
        product(w, score, BLOCK, rows, row, distance, 1, w, qt, BLOCK, n_k, n_q, HS, part, w, keys, False)
        product(w, datt, BLOCK, v, value, kv_row, 1, w, dot, BLOCK, n_k, n_q, HS, part, w, keys, False)
        # pass 3: att = 2^(score - lse / ln 2), dscore = att * (datt - delta), which has the factor s
        softmax_backward(w, score, datt, lse, head * T + t0, delta, ranges, n_q, n_k, part, cap * LOG2E)
        # pass 4: dv[t2] += att[t, t2] * dout[t], dk[t2] += dscore[t, t2] * q[t], dq[t] += dscore[t, t2] * k[t2]
        part, adding = DEPTH if partly else WHOLE, not diagonal
        product(kept, dvs, width, w, score, BLOCK, 1, w, do, width, n_k, width, n_q, part, w, keys, adding)
        product(kept, dks, width, w, datt, BLOCK, 1, w, qs, width, n_k, width, n_q, part, w, keys, adding)
        product(w, dqs, width, w, datt, 1, BLOCK, rows, row, distance, n_q, width, n_k, part, w, ranges, adding)
        if i == blocks - 1 or later_low > j:
            later = h % group > 0
            if later:
                wait_for(steps, done - blocks + j, i - j + 1)
            unpack(dk, key, kv_row, kept, dks, width, n_k, HS, ONE, later or adds[1])
            unpack(dv, value, kv_row, kept, dvs, width, n_k, HS, ONE, later or adds[2])
        tell(steps, done + j, i - j + 1)
    unpack(dq, x, q_row, w, dqs, width, n_q, HS, ONE, adds[0])


def backward_by(backward_row):
    """Make the function of a thread from that of a row of tiles."""

    @helper()
    def backward(dq, dk, dv, adds, dout, q, k, v, out, lse, limits, places, group, kept, work, w, floats, queue, steps):
        """Take rows of tiles of all heads, the first of every head first, until none is left.

        `adds` tells of dq, dk and dv which to add to; they lie as q, k and v do. The rest is that of `forward`.
        """
        NH, T = lse.shape[1:]
        blocks = (T + BLOCK - 1) // BLOCK
        task = take(queue, 0)
        while task >= 0:
            b, i, h = task // (blocks * NH), task // NH % blocks, task % NH
            first = (b * NH + h) * blocks if blocks > 1 else w
            base = w * floats
            backward_row(
                dq,
                dk,
                dv,
                adds,
                dout,
                q,
                k,
                v,
                out,
                lse,
                limits,
                places,
                group,
                kept,
                first,
                work,
                base,
                steps,
                b,
                h,
                i,
            )
            task = take(queue, 0)

    return backward


backward = backward_by(backward_row)


def kept_floats(sizes):
    """Size the memory of blocks of keys: of all blocks or, if a head has only one, of one block for each thread."""
    heads, blocks = sizes["B"] * sizes["NH"], -(-sizes["T"] // BLOCK)
    held = heads * blocks if blocks > 1 else config.NUMBA_NUM_THREADS
    return held * block_floats.py_func(head_size(sizes))


BACKWARD_SCRATCH = [
    ("kept", kept_floats),
    ("work", for_each_thread(for_each_head_size(row_floats))),
    ORDERED,
    ("steps", lambda sizes: sizes["B"] * sizes["NH"] * -(-sizes["T"] // BLOCK), "int32"),
]


@kernel(ops.attention_backward, "optimized", scratch=BACKWARD_SCRATCH)
def attention_backward(dqkv, dqkv_add, dout, qkv, out, lse, starts, window, cap, kept, work, queue, steps):
    """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

    Parallel: rows of all heads, handed out by ticket. A row follows the one before it of the same head, whose ticket is
    earlier, at a distance of one tile; so each gradient gathers its tiles in one order, whatever the threads.
    Memory: two copies of C numbers a token, of all tokens if T > BLOCK; seven tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
    """
    C, limits = out.shape[2], limits_of(starts, window, cap)
    floats, places, adds = row_floats(C // lse.shape[1]), (0, 3 * C, C, 2 * C, 3 * C), (dqkv_add, dqkv_add, dqkv_add)
    d, x = flat(dqkv), flat(qkv)
    deal(queue, count_blocks(lse))
    for i in range(steps.shape[0]):
        steps[i] = 0
    for worker in prange(work.shape[0] // floats):
        w = np.int64(worker)
        backward(d, d, d, adds, dout, x, x, x, out, lse, limits, places, 1, kept, work, w, floats, queue, steps)
