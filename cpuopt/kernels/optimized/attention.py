"""Causal attention in tiles of 64 queries by 64 keys: of the square of scores, only the causal half is computed.

A tile of scores is kept transposed, a row for each key and a lane for each query: a query's maximum and sum then run
down the rows, a vector of queries at a time. A tile that no query reads is left out. One that is read in part, as on
the diagonal, has a range of keys for each query and of queries for each key, and is computed within them.

`attention_by` makes the functions of a storage type from its `Operands`. They take any layout and any number of query
heads to a key head: q, k and v are views of rows (`RowView`), of one array for GPT-2 and of three for ``gqa``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import config, prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.constants import LOWEST, NAN, ONE, ZERO
from ..toolkit.lanes import exp2, larger, load, load_some, log, select_some, spread, store, store_some, sum_lanes, tanh
from ..toolkit.queue import ORDERED, deal, for_each_thread, take
from ..toolkit.simd import LANES, at
from ..toolkit.tiles import BLOCK, COLUMNS, DEPTH, WHOLE, flat, tell, unpack, up, wait_for
from ._attention_operands import BFLOAT16, FLOAT32, Operands, RowView, rows_from, thirds

RANGES = 4 * BLOCK  # the two ends of each query's and of each key's range in a tile
NOTHING = np.finfo(np.float32).min  # the maximum of a query that has read no key; less it, a hidden score is still -inf
LOG2E, LN2 = np.float32(1 / np.log(2)), np.float32(np.log(2))


@helper()
def limits_of(starts, window, cap):
    """Return what limits attention as its functions take it."""
    return flat(starts), window, np.float32(cap)


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


def softmax_by(x: Operands) -> Any:
    """Make the softmax of a tile of a storage type."""
    put_weights, part_of = x.put_weights, x.part

    @helper()
    def softmax(w, score, top, n_q, n_k, part, scale, cap):
        """Raise the maxima, turn scores into 2^(scale * score - maximum), and add these to the sums.

        From `top` on are the maxima of the queries, the factors by which their sums shrink, the sums, and the ranges.
        """
        alpha, total, ranges, none = top + BLOCK, top + 2 * BLOCK, top + 3 * BLOCK, spread(ZERO)
        for t in range(0, n_q, LANES):
            start, inner, outer, end = span(w, ranges, t, n_q, n_k, part)
            start = start // 2 * 2
            for t2 in range(start, end if cap > ZERO else start):
                i = score + t2 * BLOCK + t
                store(w, i, tanh(load(w, i) * (scale / cap)) * (cap / scale))
            hide(w, score, ranges, t, start, inner, outer, end)
            m = spread(LOWEST)
            m1, m2, m3 = m, m, m  # four chains of maxima: one would wait for each comparison
            for t2 in range(start, end - 3, 4):
                i = score + t2 * BLOCK + t
                m, m1 = larger(load(w, i), m), larger(load(w, i + BLOCK), m1)
                m2, m3 = larger(load(w, i + 2 * BLOCK), m2), larger(load(w, i + 3 * BLOCK), m3)
            m = larger(larger(m1, m), larger(m2, m3))
            for t2 in range(end - (end - start) % 4, end):
                m = larger(load(w, score + t2 * BLOCK + t), m)
            old = load(w, top + t)
            m = larger(m * scale, old)
            shrink = exp2(old - m)
            s = load(w, total + t) * shrink
            for t2 in range(start, end - 1, 2):
                i = score + t2 * BLOCK + t
                e, e1 = exp2(load(w, i) * scale - m), exp2(load(w, i + BLOCK) * scale - m)
                put_weights(w, score, t2, t, e, e1)
                s = s + e + e1
            if end > start and end % 2 > 0:
                e = exp2(load(w, score + (end - 1) * BLOCK + t) * scale - m)
                put_weights(w, score, end - 1, t, e, none)
                s = s + e
            for t2 in range(start // part_of * part_of, start, 2):  # zeros for DEPTH
                put_weights(w, score, t2, t, none, none)
            for t2 in range(end + end % 2, min(n_k, up(end, part_of)), 2):
                put_weights(w, score, t2, t, none, none)
            store(w, top + t, m)
            store(w, alpha + t, shrink)
            store(w, total + t, s)

    return softmax


@helper(forceinline=True)
def weigh(w, score, datt, log_sum, dot, factors):
    """Return the weights of a vector of scores, and the adjoints of the scores."""
    scale, slope, cap = factors
    x, d = load(w, score), load(w, datt) * slope - dot
    if cap > ZERO:
        share = tanh(x * (scale / cap))
        x, d = share * (cap / scale), d * (spread(ONE) - share * share)
    p = exp2(x * scale - log_sum)
    return p, p * d


def softmax_backward_by(x: Operands) -> Any:
    """Make the backward of a tile's softmax for a storage type."""
    put_adjoints, part_of = x.put_adjoints, x.part

    @helper()
    def softmax_backward(w, score, datt, paired, lse, lse0, delta, n_q, n_k, part, factors):
        """Turn scores into weights, and the weights' adjoints into those of the scores.

        `factors` are those that scores and weights' adjoints still lack, and the cap. The ranges are behind `delta`.
        """
        ranges, none = delta + BLOCK, spread(ZERO)
        for t in range(0, n_q, LANES):
            start, inner, outer, end = span(w, ranges, t, n_q, n_k, part)
            log_sum, dot = load_some(lse, lse0 + t, n_q - t) * LOG2E, load(w, delta + t)
            for t2 in range(start // part_of * part_of, min(n_k, up(end, part_of)), 2):  # beyond the range zeros
                i, p, p1, ds, ds1 = t2 * BLOCK + t, none, none, none, none
                if start // 2 * 2 <= t2 < end:
                    p, ds = weigh(w, score + i, datt + i, log_sum, dot, factors)
                    p1, ds1 = weigh(w, score + i + BLOCK, datt + i + BLOCK, log_sum, dot, factors)
                    if t2 < inner or t2 + 1 >= outer:
                        p, ds = select_read(w, ranges, t2, t, p, none), select_read(w, ranges, t2, t, ds, none)
                        p1 = select_read(w, ranges, t2 + 1, t, p1, none)
                        ds1 = select_read(w, ranges, t2 + 1, t, ds1, none)
                    if t2 + 1 == end:
                        p1, ds1 = none, none
                put_adjoints(w, score, datt, paired, t2, t, p, p1, ds, ds1)

    return softmax_backward


@helper()
def blocks_of(T):
    """Count the blocks of queries of a head."""
    return (T + BLOCK - 1) // BLOCK


@helper()
def operand_floats(HS, unit, lines):
    """Size a block of rows as a first operand, unless that is read in place; as a second one; and transposed."""
    words, width = up((HS + unit - 1) // unit, LANES), up(HS, LANES)
    return BLOCK * words * (unit - 1), BLOCK * width * lines // unit, BLOCK * words * lines


@helper()
def attend_floats(HS, unit, lines):
    """Size a thread's memory: k and v as operands, q transposed, sums of out, a tile, its ranges; 3 numbers a query."""
    rows, columns, turned = operand_floats(HS, unit, lines)
    return rows + columns + turned + BLOCK * (up(HS, LANES) + BLOCK + 3) + RANGES


def attend_by(x: Operands) -> Any:
    """Make the function of a block of queries."""
    unit, lines, folds = x.micro.group, x.micro.lines, x.folds
    product, rows, columns, turn, by_query, softmax = x.product, x.rows, x.columns, x.turn, x.by_query, softmax_by(x)

    @helper()
    def attend(out, q, k, v, before, n_q, HS, limits, row, w, room):
        """Attend from up to BLOCK queries to `before` keys and then, causally, to as many as there are queries.

        `out`, q, k and v are views from their first row and channel on. `limits` are starts, window and cap; the starts
        of the queries' row begin at `row`. It returns where the queries' maxima stay; their sums are 2 * BLOCK behind.
        """
        starts, window, cap = limits
        width, scale, limited = up(HS, LANES), LOG2E / np.sqrt(np.float32(HS)), starts.size > 0 or window > 0
        row_floats, column_floats, turned_floats = operand_floats(HS, unit, lines)
        panel, qt = room + row_floats, room + row_floats + column_floats
        o = qt + turned_floats
        score = o + BLOCK * width
        top = score + BLOCK * BLOCK
        alpha, total, ranges = top + BLOCK, top + 2 * BLOCK, top + 3 * BLOCK
        tiles, first = blocks_of(before), first_key(starts, row, window, before) // BLOCK
        lowest = NOTHING if limited else LOWEST
        for t in range(BLOCK):
            w[top + t], w[total + t] = lowest, ZERO
        for i in range(o, o + BLOCK * width if limited else o, LANES):
            store(w, i, spread(ZERO))
        turn(w, qt, room, q, n_q, HS, scale)
        for tile in range(first, tiles + 1):
            diagonal, again = tile == tiles, tile > 0 or limited
            t2 = before if diagonal else tile * BLOCK
            n_k = n_q if diagonal else min(BLOCK, before - t2)
            partly = diagonal or first_key(starts, row, window, before + n_q - 1) > t2
            if partly:
                set_ranges(w, ranges, starts, row, window, before, t2, n_q, n_k, diagonal)
            # pass 1: the scores, transposed
            a, step = rows(w, room, rows_from(k, t2, 0), n_k, HS)
            limit, depth = (COLUMNS if partly else WHOLE, w, ranges + 2 * BLOCK), (HS + unit - 1) // unit
            product(at(w, score), BLOCK, a, step, 1, at(w, qt), BLOCK, n_k, n_q, depth, limit, False)
            # pass 2: their powers, and the sums
            softmax(w, score, top, n_q, n_k, limit[0], ONE if folds else scale, cap * LOG2E)
            # pass 3: gather the values
            for t in range(n_q if tile > first else 0):
                for i in range(0, width, LANES):
                    store(w, o + t * width + i, load(w, o + t * width + i) * w[alpha + t])
            b, step = columns(w, panel, rows_from(v, t2, 0), n_k, HS, False)
            limit, depth = (DEPTH if partly else WHOLE, w, ranges), (n_k + unit - 1) // unit
            a, step_q, apart = by_query(w, score, score + BLOCK * BLOCK // 2, BLOCK // 2, n_q, n_k)
            product(at(w, o), width, a, step_q, apart, b, step, n_q, width, depth, limit, again)
        # pass 4: normalize
        for t in range(n_q):
            if w[total + t] == ZERO:  # all scores that it reads are minus infinity
                w[top + t] = NAN
            to, factor = out.first + t * out.step, ONE / w[total + t]
            unpack(out.array, to, out.step, w, o + t * width, width, 1, HS, factor, False)
        return top

    return attend


def forward_by(attend, x: Operands) -> Any:
    """Make the forward from the function of a block of queries."""
    unit, lines = x.micro.group, x.micro.lines

    @helper()
    def block(out, lse, q, k, v, limits, group, w, room, task):
        """Do one block of queries; the longest of a head come first."""
        NH, T = lse.shape[1:]
        blocks, HS = blocks_of(T), out.shape[2] // NH
        head, t0 = task // blocks, (blocks - 1 - task % blocks) * BLOCK
        row, h, n_q = head // NH * T, head % NH, min(BLOCK, T - t0)
        to, queries = rows_from(RowView(out, 0, NH * HS), row + t0, h * HS), rows_from(q, row + t0, h * HS)
        keys, values = rows_from(k, row, h // group * HS), rows_from(v, row, h // group * HS)
        top = attend(to, queries, keys, values, t0, n_q, HS, limits, row, w, room)
        for t in range(0, n_q, LANES):
            total = log(load(w, top + 2 * BLOCK + t)) + load(w, top + t) * LN2
            store_some(lse, head * T + t0 + t, total, n_q - t)

    @helper(parallel=True)
    def forward(out, lse, q, k, v, limits, group, work, queue):
        """Attend from all tokens; `group` query heads read one key head."""
        B, NH, T = lse.shape
        floats = attend_floats(out.shape[2] // NH, unit, lines)
        deal(queue, B * NH * blocks_of(T))
        for worker in prange(work.shape[0] // floats):
            task = take(queue, 0)
            while task >= 0:
                block(out, lse, q, k, v, limits, group, work, np.int64(worker) * floats, task)
                task = take(queue, 0)

    return forward


@helper()
def backward_floats(HS, unit, lines):
    """Size a thread's memory: k, v, q and dout as operands, dq, two tiles, their ranges; a number a query."""
    rows, columns, turned = operand_floats(HS, unit, lines)
    tiles = 2 * BLOCK + (unit - 1) * BLOCK // 2
    return rows + 3 * columns + 2 * turned + BLOCK * (up(HS, LANES) + tiles + 1) + RANGES


def backward_by(x: Operands) -> Any:
    """Make the backward of a storage type."""
    unit, lines, folds, rows, columns, turn = x.micro.group, x.micro.lines, x.folds, x.rows, x.columns, x.turn
    product, by_query, softmax_backward = x.product, x.by_query, softmax_backward_by(x)

    @helper()
    def row_of_tiles(grads, q, k, v, saved, limits, group, memory, worker, task):
        """Do the tiles of a block of queries, from the diagonal back to the first block of keys that it reads.

        A tile waits until the row before has been through its block of keys: `steps` counts the rows. The last row
        that reads a block adds what its head has gathered to dk and dv, after the head before it in the group.
        """
        dq, dk, dv, dq_add, dk_add, dv_add = grads
        dout, out, lse = saved
        starts, window, cap = limits
        kept, w, _, steps = memory
        NH, T = lse.shape[1:]
        blocks, HS = blocks_of(T), out.shape[2] // NH
        b, i, h = task // (blocks * NH), task // NH % blocks, task % NH
        row, t0, head, width, size = b * T, i * BLOCK, b * NH + h, up(HS, LANES), BLOCK * up(HS, LANES)
        n_q, done, first = min(BLOCK, T - t0), head * blocks, head * blocks if blocks > 1 else worker
        row_floats, column_floats, turned_floats = operand_floats(HS, unit, lines)
        room = worker * backward_floats(HS, unit, lines)
        panel = room + row_floats
        qt = panel + 3 * column_floats
        dot, dqs = qt + turned_floats, qt + 2 * turned_floats
        score = dqs + size
        datt, paired = score + BLOCK * BLOCK, score + unit * BLOCK * BLOCK  # dq and dk read the same float32
        delta = score + 2 * BLOCK * BLOCK + (unit - 1) * BLOCK * BLOCK // 2
        ranges = delta + BLOCK
        # pass 1: the queries, and delta[t] = s * dout[t] . out[t], which stands for the sum over att * datt
        queries, adjoints = rows_from(q, row + t0, h * HS), rows_from(RowView(dout, 0, NH * HS), row + t0, h * HS)
        slope, results = ONE / np.sqrt(np.float32(HS)), rows_from(RowView(out, 0, NH * HS), row + t0, h * HS)
        turn(w, qt, room, queries, n_q, HS, LOG2E * slope)
        turn(w, dot, room, adjoints, n_q, HS, slope)
        qs, q_step = columns(w, panel + column_floats, queries, n_q, HS, True)
        do, do_step = columns(w, panel + 2 * column_floats, adjoints, n_q, HS, True)
        for t in range(up(n_q, LANES)):
            d = spread(ZERO)
            for c in range(0, HS if t < n_q else 0, LANES):
                y = load_some(adjoints.array, adjoints.first + t * adjoints.step + c, HS - c)
                d = d + y * load_some(results.array, results.first + t * results.step + c, HS - c)
            w[delta + t] = sum_lanes(d) * slope
        factors = (ONE, ONE, cap * LOG2E) if folds else (LOG2E * slope, slope, cap * LOG2E)
        later_low = first_key(starts, row, window, min(t0 + BLOCK, T - 1)) // BLOCK  # of the row behind
        for j in range(i, first_key(starts, row, window, t0) // BLOCK - 1, -1):
            diagonal, t2, dks = j == i, j * BLOCK, (first + j) * 2 * size
            n_k, dvs = min(BLOCK, T - t2), dks + size
            keys, values = rows_from(k, row + t2, h // group * HS), rows_from(v, row + t2, h // group * HS)
            ks, k_step = columns(w, panel, keys, n_k, HS, False)
            if not diagonal:
                wait_for(steps, done + j, i - j)
            partly = diagonal or first_key(starts, row, window, t0 + n_q - 1) > t2
            if partly:
                set_ranges(w, ranges, starts, row, window, t0, t2, n_q, n_k, diagonal)
            # pass 2: score[t, t2] = q[t] . k[t2] and datt[t, t2] = dout[t] . v[t2], both transposed
            limit, depth = (COLUMNS if partly else WHOLE, w, ranges + 2 * BLOCK), (HS + unit - 1) // unit
            a, step = rows(w, room, keys, n_k, HS)
            product(at(w, score), BLOCK, a, step, 1, at(w, qt), BLOCK, n_k, n_q, depth, limit, False)
            a, step = rows(w, room, values, n_k, HS)
            product(at(w, datt), BLOCK, a, step, 1, at(w, dot), BLOCK, n_k, n_q, depth, limit, False)
            # pass 3: att = 2^(s / ln 2 * score - lse / ln 2), dscore = att * (s * datt - delta)
            softmax_backward(w, score, datt, paired, lse, head * T + t0, delta, n_q, n_k, limit[0], factors)
            # pass 4: dv[t2] += att[t, t2] * dout[t], dk[t2] += dscore[t, t2] * q[t], dq[t] += dscore[t, t2] * k[t2]
            adds, part_of_depth = not diagonal, DEPTH if partly else WHOLE
            limit, depth = (part_of_depth, w, ranges + 2 * BLOCK), (n_q + unit - 1) // unit
            product(at(kept, dvs), width, at(w, score), BLOCK, 1, do, do_step, n_k, width, depth, limit, adds)
            product(at(kept, dks), width, at(w, datt), BLOCK, 1, qs, q_step, n_k, width, depth, limit, adds)
            limit, depth = (part_of_depth, w, ranges), (n_k + unit - 1) // unit
            a, step_q, apart = by_query(w, paired, datt + BLOCK // 2, BLOCK, n_q, n_k)
            product(at(w, dqs), width, a, step_q, apart, ks, k_step, n_q, width, depth, limit, adds)
            if i == blocks - 1 or later_low > j:
                later = h % group > 0
                if later:
                    wait_for(steps, done - blocks + j, i - j + 1)
                unpack(dk, keys.first, keys.step, kept, dks, width, n_k, HS, ONE, later or dk_add)
                unpack(dv, values.first, values.step, kept, dvs, width, n_k, HS, ONE, later or dv_add)
            tell(steps, done + j, i - j + 1)
        unpack(dq, queries.first, queries.step, w, dqs, width, n_q, HS, ONE, dq_add)

    @helper(parallel=True)
    def backward(grads, q, k, v, saved, limits, group, memory):
        """Compute the gradients; `group` query heads read one key head.

        `grads` are the flat arrays of dq, dk and dv, laid out as q, k and v, and whether to add to each; `saved` are
        dout, out and lse; `memory` the scratch.
        """
        _, work, queue, steps = memory
        B, NH, T = saved[2].shape
        deal(queue, B * NH * blocks_of(T))
        for i in range(steps.shape[0]):
            steps[i] = 0
        for worker in prange(work.shape[0] // backward_floats(saved[1].shape[2] // NH, unit, lines)):
            task = take(queue, 0)
            while task >= 0:
                row_of_tiles(grads, q, k, v, saved, limits, group, memory, np.int64(worker), task)
                task = take(queue, 0)

    return backward


def head_size(sizes):
    """Channels of a head, of which the ops over a fused qkv have no symbol."""
    return sizes["HS"] if "HS" in sizes else sizes["C"] // sizes["NH"]


def kept_floats(sizes):
    """Size dk and dv of blocks of keys: of all blocks or, if a head has only one, of one block for each thread."""
    blocks = blocks_of.py_func(sizes["T"])
    held = sizes["B"] * sizes["NH"] * blocks if blocks > 1 else config.NUMBA_NUM_THREADS
    return held * 2 * BLOCK * up.py_func(head_size(sizes), LANES)


@dataclass(frozen=True)
class Attention:
    """The functions of attention for a storage type, and the scratch of its kernels."""

    operands: Operands
    attend: Any
    forward: Any
    backward: Any
    forward_scratch: list[tuple[Any, ...]]
    backward_scratch: list[tuple[Any, ...]]


def attention_by(x: Operands) -> Attention:
    """Make the functions of attention for a storage type."""

    def work(floats):
        return "work", for_each_thread(lambda sizes: floats.py_func(head_size(sizes), x.micro.group, x.micro.lines))

    attend = attend_by(x)
    steps = "steps", lambda sizes: sizes["B"] * sizes["NH"] * blocks_of.py_func(sizes["T"]), "int32"
    scratch = [work(attend_floats), ORDERED], [("kept", kept_floats), work(backward_floats), ORDERED, steps]
    return Attention(x, attend, forward_by(attend, x), backward_by(x), *scratch)


ATTENTION = [attention_by(x) for x in (FLOAT32, BFLOAT16)]


def register(x: Attention) -> None:
    """Register the kernels of a storage type."""
    forward, backward, of = x.forward, x.backward, x.operands.micro.storage

    @kernel(ops.attention_forward, "optimized", of=of, scratch=x.forward_scratch, parallel=False)
    def attention_forward(out, lse, qkv, starts, window, cap, work, queue):
        """Block by block of keys, with a running maximum and sum for each query.

        Parallel: blocks of queries of each head, handed out by ticket, the longest of a head first.
        Memory: tiles for each thread.
        Bound: compute.
        Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
        """
        q, k, v = thirds(qkv)
        forward(out, lse, q, k, v, limits_of(starts, window, cap), 1, work, queue)

    @kernel(ops.attention_backward, "optimized", of=of, scratch=x.backward_scratch, parallel=False)
    def attention_backward(dqkv, dqkv_add, dout, qkv, out, lse, starts, window, cap, kept, work, queue, steps):
        """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

        Parallel: rows of all heads, handed out by ticket. A row follows the one before it of the same head, whose
        ticket is earlier, at a distance of one tile; so each gradient gathers its tiles in one order, whatever the
        threads.
        Memory: two copies of C numbers a token, of all tokens if T > BLOCK; tiles for each thread.
        Bound: compute.
        Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
        """
        (q, k, v), d, limits = thirds(qkv), flat(dqkv), limits_of(starts, window, cap)
        grads, saved = (d, d, d, dqkv_add, dqkv_add, dqkv_add), (flat(dout), out, lse)
        backward(grads, q, k, v, saved, limits, 1, (kept, work, queue, steps))


for _storage in ATTENTION:
    register(_storage)
