"""Causal attention of bfloat16 in tiles: those of ``attention``, whose products are of words of two neighbours.

Scores, their softmax and all sums are float32. Queries, keys, values, adjoints and the weights of attention are
rounded operands. The pairs of a product lie along what it sums over: channels for scores, keys for what is gathered of
values, queries for the gradients of keys and values.
"""

import numpy as np

from ..compile.jit import helper
from ..toolkit.lanes import exp2, larger, load, load_some, spread, store, sum_lanes, tanh
from ..toolkit.pairs import (
    interleaved,
    load_pair,
    load_some_words,
    load_words,
    pair,
    put,
    rounded,
    store_first,
    store_second,
)
from ..toolkit.simd import LANES, PER_WORD, at, narrow_pair_product, pair_product, transpose_words
from ..toolkit.tiles import COLUMNS, DEPTH, PART, WHOLE, product_by, tell, unpack, up, wait_for
from .attention import (
    BLOCK,
    LOG2E,
    LOWEST,
    NAN,
    ONE,
    RANGES,
    ZERO,
    backward_by,
    first_tile,
    forward_by,
    hide,
    limited,
    part_of,
    reach,
    select_read,
    set_ranges,
    span,
)

product = product_by(pair_product, narrow_pair_product, 2, PER_WORD)


@helper()
def half_width(HS):
    """Words of a packed row of HS channels: whole vectors."""
    return up((HS + 1) // 2, LANES)


@helper()
def pack(to, to0, x, x0, x_row, rows, room, HS):
    """Copy the words of rows that lie `x_row` apart; zeros fill up their width and `room` rows."""
    width = half_width(HS)
    for t in range(rows):
        for i in range(0, width, LANES):
            left, place = HS - 2 * i, x0 + t * x_row + 2 * i
            words = load_words(x, place) if left >= 2 * LANES else load_some_words(x, place, left)
            store(to, to0 + t * width + i, words)
    for i in range(rows * width, room * width, LANES):
        store(to, to0 + i, spread(ZERO))


@helper()
def turn(to, to0, room, x, x0, x_row, rows, HS):
    """Write the words of rows transposed, lines for each two channels; `room` is memory for the packed rows."""
    width = half_width(HS)
    pack(to, room, x, x0, x_row, rows, up(rows, LANES), HS)
    for t in range(0, rows, LANES):
        for i in range(0, width, LANES):
            transpose_words(at(to, to0 + i * PER_WORD * BLOCK + t), BLOCK, at(to, room + t * width + i), width)


@helper()
def interleave(to, to0, x, x0, x_row, rows, HS):
    """Interleave rows t and t + 1; zeros stand for a row that is not there, and fill up the width."""
    width, whole = up(HS, LANES), HS - HS % LANES
    for t in range(0, rows, 2):
        panel, i = to0 + t // 2 * PER_WORD * width, x0 + t * x_row
        j = i + x_row if t + 1 < rows else -1
        for c in range(0, whole, LANES):
            put(to, panel + c, width, load_pair(x, i + c, j + c if j >= 0 else -1))
        for c in range(whole, HS):
            put(to, panel + c, width, pair(x, i + c, j + c if j >= 0 else -1))
        for c in range(HS, width):
            put(to, panel + c, width, ZERO)


@helper()
def softmax(w, score, top, alpha, total, ranges, n_q, n_k, part, scale, cap):
    """Raise `top`, turn scores into words of 2^(scale * score - top) and sum them; the sums before shrink by `alpha`.

    The words of keys t2 and t2 + 1 take the place of row t2 / 2.
    """
    for t in range(0, n_q, LANES):
        start, inner, outer, end = span(w, ranges, t, n_q, n_k, part)
        start = start // 2 * 2
        for t2 in range(start, end if cap > ZERO else start):
            i = score + t2 * BLOCK + t
            store(w, i, tanh(load(w, i) * (scale / cap)) * (cap / scale))
        hide(w, score, ranges, t, start, inner, outer, end)
        lowest = spread(LOWEST)
        m, m1, m2, m3 = lowest, lowest, lowest, lowest  # four chains of maxima: one would wait for each comparison
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
            store(w, score + t2 // 2 * BLOCK + t, interleaved(rounded(e, e1)))
            s = s + e + e1
        if end > start and end % 2 > 0:
            e = exp2(load(w, score + (end - 1) * BLOCK + t) * scale - m)
            store(w, score + end // 2 * BLOCK + t, interleaved(rounded(e, spread(ZERO))))
            s = s + e
        for t2 in range(start // PART * PART // 2, start // 2):  # zeros for DEPTH
            store(w, score + t2 * BLOCK + t, spread(ZERO))
        for t2 in range((end + 1) // 2, min((n_k + 1) // 2, up(end, PART) // 2)):
            store(w, score + t2 * BLOCK + t, spread(ZERO))
        store(w, top + t, m)
        store(w, alpha + t, shrink)
        store(w, total + t, s)


@helper()
def turned_width(HS):
    """Floats of a row that is transposed into a panel."""
    return half_width(HS) * PER_WORD


@helper()
def mixed_floats(HS):
    """Floats of a block of rows that are interleaved."""
    return BLOCK // 2 * PER_WORD * up(HS, LANES)


@helper()
def forward_floats(HS):
    """Working memory of one thread: words of rows, two panels, sums of out, a tile, its ranges; 3 numbers a query."""
    return mixed_floats(HS) + BLOCK * (half_width(HS) + turned_width(HS) + up(HS, LANES) + BLOCK + 3) + RANGES


@helper()
def attend(out, o0, o_row, q, q0, q_row, k, k0, v, v0, kv_row, before, n_q, HS, limits, row, w, packed):
    """Do what that of ``attention`` does."""
    starts, window, cap = limits
    half, width, words, scale = half_width(HS), up(HS, LANES), (HS + 1) // 2, LOG2E / np.sqrt(np.float32(HS))
    panel = packed + BLOCK * half
    qt = panel + mixed_floats(HS)
    o = qt + BLOCK * turned_width(HS)
    score = o + BLOCK * width
    top, alpha, total = score + BLOCK * BLOCK, score + BLOCK * BLOCK + BLOCK, score + BLOCK * BLOCK + 2 * BLOCK
    ranges = total + BLOCK
    tiles = (before + BLOCK - 1) // BLOCK
    first, lowest = first_tile(starts, row, window, before)
    for t in range(BLOCK):
        w[top + t], w[total + t] = lowest, ZERO
    for i in range(o, o + BLOCK * width if limited(starts, window) else o, LANES):
        store(w, i, spread(ZERO))
    turn(w, qt, packed, q, q0, q_row, n_q, HS)
    for tile in range(first, tiles + 1):
        diagonal, again = tile == tiles, tile > 0 or limited(starts, window)
        t2 = before if diagonal else tile * BLOCK
        n_k = n_q if diagonal else min(BLOCK, before - t2)
        partly = part_of(starts, row, window, before, t2, n_q, diagonal)
        if partly:
            set_ranges(w, ranges, starts, row, window, before, t2, n_q, n_k, diagonal)
        # pass 1: the scores, transposed
        key, distance = at(k, k0 + t2 * kv_row), kv_row // 2
        if HS % 2 > 0:
            pack(w, packed, k, k0 + t2 * kv_row, kv_row, n_k, n_k, HS)
            key, distance = at(w, packed), half
        part, keys = COLUMNS if partly else WHOLE, ranges + 2 * BLOCK
        product(w, score, BLOCK, key, 0, distance, 1, w, qt, BLOCK, n_k, n_q, words, part, w, keys, False)
        # pass 2: their powers, and the sums
        softmax(w, score, top, alpha, total, ranges, n_q, n_k, part, scale, cap * LOG2E)
        # pass 3: gather the values
        for t in range(n_q if tile > first else 0):
            for i in range(0, width, LANES):
                store(w, o + t * width + i, load(w, o + t * width + i) * w[alpha + t])
        interleave(w, panel, v, v0 + t2 * kv_row, kv_row, n_k, HS)
        part, depth = DEPTH if partly else WHOLE, (n_k + 1) // 2
        product(w, o, width, w, score, 1, BLOCK, w, panel, width, n_q, width, depth, part, w, ranges, again)
    # pass 4: normalize
    for t in range(n_q):
        if w[total + t] == ZERO:  # all scores that it reads are minus infinity
            w[top + t] = NAN
        unpack(out, o0 + t * o_row, o_row, w, o + t * width, width, 1, HS, ONE / w[total + t], False)
    return top


forward = forward_by(attend)


@helper()
def put_two(w, p_rows, d_rows, words, t2, t, p, p1, ds, ds1):
    """Store two keys' weights and adjoints of scores: pairs of queries in rows, and of the two keys in `words`."""
    both, d = rounded(p, p1), rounded(ds, ds1)
    i = t2 * BLOCK + t // 2
    store_first(w, p_rows + i, both)
    store_first(w, d_rows + i, d)
    store_second(w, p_rows + i + BLOCK, both)
    store_second(w, d_rows + i + BLOCK, d)
    store(w, words + t2 // 2 * BLOCK + t, interleaved(d))


@helper(forceinline=True)
def weigh(w, score, datt, log_sum, dot, scale, slope, cap):
    """Return the weights of a vector of scores, and the adjoints of the scores."""
    x, d = load(w, score), load(w, datt) * slope - dot
    if cap > ZERO:
        share = tanh(x * (scale / cap))
        x, d = share * (cap / scale), d * (spread(ONE) - share * share)
    p = exp2(x * scale - log_sum)
    return p, p * d


@helper()
def softmax_backward(w, score, datt, words, lse, lse0, delta, ranges, n_q, n_k, part, scale, slope, cap):
    """Turn scores into weights, and the weights' adjoints into those of the scores, as words.

    The pairs of a row lie in its first half, so that a row of queries overwrites none that is still to be read.
    """
    none = spread(ZERO)
    for t in range(0, n_q, LANES):
        start, inner, outer, end = span(w, ranges, t, n_q, n_k, part)
        log_sum, dot = load_some(lse, lse0 + t, n_q - t) * LOG2E, load(w, delta + t)
        for t2 in range(start // 2 * 2, end, 2):
            i = t2 * BLOCK + t
            p, ds = weigh(w, score + i, datt + i, log_sum, dot, scale, slope, cap)
            p1, ds1 = weigh(w, score + i + BLOCK, datt + i + BLOCK, log_sum, dot, scale, slope, cap)
            if t2 < inner or t2 + 1 >= outer:
                p, ds = select_read(w, ranges, t2, t, p, none), select_read(w, ranges, t2, t, ds, none)
                p1, ds1 = select_read(w, ranges, t2 + 1, t, p1, none), select_read(w, ranges, t2 + 1, t, ds1, none)
            if t2 + 1 == end:
                p1, ds1 = none, none
            put_two(w, score, datt, words, t2, t, p, p1, ds, ds1)
        for t2 in range(start // PART * PART, start // 2 * 2, 2):  # zeros for DEPTH
            put_two(w, score, datt, words, t2, t, none, none, none, none)
        for t2 in range(end + end % 2, min(n_k, up(end, PART)), 2):
            put_two(w, score, datt, words, t2, t, none, none, none, none)


@helper()
def block_floats(HS):
    """Working memory of a block of keys while its tiles are visited: dk and dv."""
    return 2 * BLOCK * up(HS, LANES)


@helper()
def row_floats(HS):
    """Working memory of one thread: rows and tiles as words and as sums, and a number for each query."""
    rows = 2 * half_width(HS) + 2 * turned_width(HS) + up(HS, LANES)
    return 3 * mixed_floats(HS) + BLOCK * (rows + 2 * BLOCK + BLOCK // 2 + 3) + RANGES


@helper()
def backward_row(
    dq, dk, dv, adds, dout, q, k, v, out, lse, limits, places, group, kept, first, w, base, steps, b, h, i
):
    """Do what that of ``attention`` does."""
    starts, window, cap = limits
    NH, T = lse.shape[1:]
    HS, o_row, head, blocks = out.shape[2] // NH, out.shape[2], b * NH + h, (T + BLOCK - 1) // BLOCK
    half, width, words, floats = half_width(HS), up(HS, LANES), (HS + 1) // 2, block_floats(HS)
    t0, done, size, turned, mixed = i * BLOCK, head * blocks, BLOCK * width, BLOCK * turned_width(HS), mixed_floats(HS)
    n_q = min(BLOCK, T - t0)
    qt, dot, ks, vs = base, base + turned, base + 2 * turned, base + 2 * turned + BLOCK * half
    qs = vs + BLOCK * half
    do, km, dqs = qs + mixed, qs + 2 * mixed, qs + 3 * mixed
    score = dqs + size
    datt, dwords = score + BLOCK * BLOCK, score + 2 * BLOCK * BLOCK
    delta = dwords + BLOCK * BLOCK // 2
    ranges = delta + 3 * BLOCK
    q0, q_row, k0, v0, kv_row = places
    slope = ONE / np.sqrt(np.float32(HS))
    x, o = q0 + (b * T + t0) * q_row + h * HS, (b * T + t0) * o_row + h * HS
    key_head, depth = b * T * kv_row + h // group * HS, (n_q + 1) // 2
    # pass 1: the queries, and delta[t] = s * dout[t] . out[t], which stands for the sum over att * datt
    turn(w, qt, ks, q, x, q_row, n_q, HS)
    turn(w, dot, ks, dout, o, o_row, n_q, HS)
    interleave(w, qs, q, x, q_row, n_q, HS)
    interleave(w, do, dout, o, o_row, n_q, HS)
    for t in range(n_q):
        d = spread(ZERO)
        for c in range(0, HS, LANES):
            d = d + load_some(dout, o + t * o_row + c, HS - c) * load_some(out, o + t * o_row + c, HS - c)
        w[delta + t] = sum_lanes(d) * slope
    for t in range(n_q, up(n_q, LANES)):
        w[delta + t] = ZERO
    low, later_low = reach(starts, b * T, window, T, i)
    for j in range(i, low - 1, -1):
        diagonal, t2, block = j == i, j * BLOCK, (first + j) * floats
        n_k, key, value = min(BLOCK, T - t2), k0 + key_head + t2 * kv_row, v0 + key_head + t2 * kv_row
        dks, dvs = block, block + size
        k_rows, v_rows, distance = at(k, key), at(v, value), kv_row // 2
        if HS % 2 > 0:
            pack(w, ks, k, key, kv_row, n_k, n_k, HS)
            pack(w, vs, v, value, kv_row, n_k, n_k, HS)
            k_rows, v_rows, distance = at(w, ks), at(w, vs), half
        interleave(w, km, k, key, kv_row, n_k, HS)
        if not diagonal:
            wait_for(steps, done + j, i - j)
        partly, keys = part_of(starts, b * T, window, t0, t2, n_q, diagonal), ranges + 2 * BLOCK
        if partly:
            set_ranges(w, ranges, starts, b * T, window, t0, t2, n_q, n_k, diagonal)
        # pass 2: score[t, t2] = q[t] . k[t2] and datt[t, t2] = dout[t] . v[t2], both transposed
        part = COLUMNS if partly else WHOLE
        product(w, score, BLOCK, k_rows, 0, distance, 1, w, qt, BLOCK, n_k, n_q, words, part, w, keys, False)
        product(w, datt, BLOCK, v_rows, 0, distance, 1, w, dot, BLOCK, n_k, n_q, words, part, w, keys, False)
        # pass 3: att = 2^(s / ln 2 * score - lse / ln 2), dscore = att * (s * datt - delta)
        scale, lse0 = LOG2E * slope, head * T + t0
        softmax_backward(w, score, datt, dwords, lse, lse0, delta, ranges, n_q, n_k, part, scale, slope, cap * LOG2E)
        # pass 4: dv[t2] += att[t, t2] * dout[t], dk[t2] += dscore[t, t2] * q[t], dq[t] += dscore[t, t2] * k[t2]
        part, adding, deep = DEPTH if partly else WHOLE, not diagonal, (n_k + 1) // 2
        product(kept, dvs, width, w, score, BLOCK, 1, w, do, width, n_k, width, depth, part, w, keys, adding)
        product(kept, dks, width, w, datt, BLOCK, 1, w, qs, width, n_k, width, depth, part, w, keys, adding)
        product(w, dqs, width, w, dwords, 1, BLOCK, w, km, width, n_q, width, deep, part, w, ranges, adding)
        if i == blocks - 1 or later_low > j:
            later = h % group > 0
            if later:
                wait_for(steps, done - blocks + j, i - j + 1)
            unpack(dk, key, kv_row, kept, dks, width, n_k, HS, ONE, later or adds[1])
            unpack(dv, value, kv_row, kept, dvs, width, n_k, HS, ONE, later or adds[2])
        tell(steps, done + j, i - j + 1)
    unpack(dq, x, q_row, w, dqs, width, n_q, HS, ONE, adds[0])


backward = backward_by(backward_row)
