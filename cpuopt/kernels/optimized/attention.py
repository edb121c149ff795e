"""Causal attention in tiles of 64 queries by 64 keys: of the square of scores, only the causal half is computed.

A tile of scores is kept transposed, a row for each key and a lane for each query: a query's maximum and sum then run
down the rows, a vector of queries at a time. A tile on the diagonal is triangular, and computed as such.
"""

import numpy as np
from numba import config, prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.lanes import exp, larger, load, load_some, select_some, spread, store, sum_lanes
from ..toolkit.simd import LANES, MR, ticket
from ..toolkit.tiles import A_LOWER, A_UPPER, C_UPPER, COLS, WHOLE, pack, product, tell, turn, unpack, up, wait_for

BLOCK = 64  # queries, and keys: a tile fills 16 KB, half of the usual first-level cache
ZERO, ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


def for_each_thread(floats):
    """Size scratch of ``floats(HS)`` for each thread that may run."""
    return lambda sizes: config.NUMBA_NUM_THREADS * floats.py_func(sizes["C"] // sizes["NH"])


@helper()
def softmax(w, score, top, alpha, total, n_q, n_k, diagonal):
    """Raise `top`, turn scores into exp(score - top) and sum them; what was summed before shrinks by `alpha`."""
    for t in range(0, n_q, LANES):
        old = load(w, top + t)
        m = old
        for t2 in range(min(n_k, t + LANES) if diagonal else n_k):
            x = load(w, score + t2 * BLOCK + t)
            m = larger(select_some(t2 - t, spread(LOWEST), x) if diagonal else x, m)
        shrink = exp(old - m)
        s = load(w, total + t) * shrink
        for t2 in range(min(n_k, t + LANES + MR) if diagonal else n_k):  # MR: zeros for A_LOWER
            e = exp(load(w, score + t2 * BLOCK + t) - m)
            if diagonal:
                e = select_some(t2 - t, spread(ZERO), e)
            store(w, score + t2 * BLOCK + t, e)
            s = s + e
        store(w, top + t, m)
        store(w, alpha + t, shrink)
        store(w, total + t, s)


@helper()
def forward_floats(HS):
    """Working memory of one thread: packed rows, q transposed, sums of out, a tile; three numbers for each query."""
    return BLOCK * ((HS + COLS - 1) // COLS * COLS * 3 + BLOCK + 3)


@helper()
def attend(out, o0, o_row, qkv, q, q_row, keys, k0, values, v0, kv_row, before, n_q, HS, w, packed):
    """Attend from up to BLOCK queries to `before` keys and then, causally, to as many as there are queries.

    The arguments are arrays, the offset of the first row in each, and the distance of rows. The queries' maxima stay
    at `packed` + BLOCK * (3 * width + BLOCK) of w, their sums 2 * BLOCK behind.
    """
    width = up(HS, COLS)
    qt, o, score = packed + BLOCK * width, packed + 2 * BLOCK * width, packed + 3 * BLOCK * width
    top, alpha, total = score + BLOCK * BLOCK, score + BLOCK * BLOCK + BLOCK, score + BLOCK * BLOCK + 2 * BLOCK
    for t in range(BLOCK):
        w[top + t], w[total + t] = LOWEST, ZERO
    pack(w, packed, width, up(n_q, COLS), qkv, q, q_row, n_q, HS, ONE / np.sqrt(np.float32(HS)))
    turn(w, qt, BLOCK, w, packed, width, up(n_q, COLS))
    tiles = (before + BLOCK - 1) // BLOCK
    for tile in range(tiles + 1):
        diagonal = tile == tiles
        t2 = before if diagonal else tile * BLOCK
        k, v, n_k = k0 + t2 * kv_row, v0 + t2 * kv_row, n_q if diagonal else min(BLOCK, before - t2)
        # pass 1: the scores, transposed
        part = C_UPPER if diagonal else WHOLE
        product(w, score, BLOCK, keys, k, kv_row, 1, w, qt, BLOCK, n_k, n_q, HS, part, False)
        # pass 2: their exp, and the sums
        softmax(w, score, top, alpha, total, n_q, n_k, diagonal)
        # pass 3: gather the values
        for t in range(n_q if tile > 0 else 0):
            for i in range(0, width, LANES):
                store(w, o + t * width + i, load(w, o + t * width + i) * w[alpha + t])
        pack(w, packed, width, n_k, values, v, kv_row, n_k, HS, ONE)
        part = A_LOWER if diagonal else WHOLE
        product(w, o, width, w, score, 1, BLOCK, w, packed, width, n_q, width, n_k, part, tile > 0)
    # pass 4: normalize
    for t in range(n_q):
        unpack(out, o0 + t * o_row, o_row, w, o + t * width, width, 1, HS, ONE / w[total + t], False)


@helper()
def forward_block(out, lse, qkv, w, packed, b, h, t0):
    """Attend from the queries of one block to all keys up to them."""
    T, C, HS = out.shape[1], out.shape[2], out.shape[2] // lse.shape[1]
    n_q, q, row = min(BLOCK, T - t0), b * T * 3 * C + h * HS, 3 * C
    o = (b * T + t0) * C + h * HS
    attend(out, o, C, qkv, q + t0 * row, row, qkv, q + C, qkv, q + 2 * C, row, t0, n_q, HS, w, packed)
    top = packed + BLOCK * (3 * up(HS, COLS) + BLOCK)
    for t in range(n_q):
        lse[b, h, t0 + t] = np.log(w[top + 2 * BLOCK + t]) + w[top + t]


@kernel(
    ops.attention_forward,
    "optimized",
    scratch=[("work", for_each_thread(forward_floats)), ("counter", 1, "int32")],
)
def attention_forward(out, lse, qkv, work, counter):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: blocks of queries of each head, handed out by ticket, the longest of a head first.
    Memory: four tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    B, T, C = out.shape
    NH = lse.shape[1]
    blocks, floats = (T + BLOCK - 1) // BLOCK, forward_floats(C // NH)
    counter[0] = 0
    for worker in prange(work.shape[0] // floats):
        task = ticket(counter)
        while task < B * NH * blocks:
            bh, t0 = task // blocks, (blocks - 1 - task % blocks) * BLOCK
            forward_block(out, lse, qkv, work, np.int64(worker) * floats, bh // NH, bh % NH, t0)
            task = ticket(counter)


@helper()
def softmax_backward(w, score, datt, lse, lse0, delta, n_q, n_k, diagonal):
    """Turn scores into weights, and the weights' adjoints into those of the scores."""
    for t in range(0, n_q, LANES):
        log_sum, dot = load_some(lse, lse0 + t, n_q - t), load(w, delta + t)
        for t2 in range(min(n_k, t + LANES + MR) if diagonal else n_k):  # MR: zeros for A_LOWER and A_UPPER
            i = t2 * BLOCK + t
            p = exp(load(w, score + i) - log_sum)
            ds = p * (load(w, datt + i) - dot)
            if diagonal:
                p, ds = select_some(t2 - t, spread(ZERO), p), select_some(t2 - t, spread(ZERO), ds)
            store(w, score + i, p)
            store(w, datt + i, ds)


K, V, DK, DV = range(4)
"""The packed arrays of a block of keys, each of BLOCK rows, kept while its tiles are visited."""


@helper()
def block_floats(HS):
    """Working memory of a block of keys."""
    return 4 * BLOCK * up(HS, COLS)


@helper()
def row_floats(HS):
    """Working memory of one thread: q, dout and dq, two of them transposed too, two tiles, a number for each query."""
    return BLOCK * (5 * up(HS, COLS) + 2 * BLOCK + 1)


@helper()
def backward_row(dqkv, dqkv_add, dout, qkv, out, lse, kept, first, w, base, steps, done, b, h, i):
    """Do the tiles of query block `i`, from the diagonal back to the first block of keys.

    A tile waits until the row before has been through its block of keys: `steps` counts the rows, from `done` on.
    """
    T, C, HS = out.shape[1], out.shape[2], out.shape[2] // lse.shape[1]
    width, floats, t0 = up(HS, COLS), block_floats(HS), i * BLOCK
    size, n_q = BLOCK * width, min(BLOCK, T - t0)
    q, dq, do = base, base + size, base + 2 * size
    qt, dot, score = base + 3 * size, base + 4 * size, base + 5 * size
    datt, delta = score + BLOCK * BLOCK, score + 2 * BLOCK * BLOCK
    row, o_row, scale = b * T * 3 * C + h * HS, (b * T + t0) * C + h * HS, ONE / np.sqrt(np.float32(HS))
    # pass 1: the queries, and delta[t] = dout[t] . out[t], which stands for the sum over att * datt
    pack(w, q, width, up(n_q, COLS), qkv, row + t0 * 3 * C, 3 * C, n_q, HS, scale)
    pack(w, do, width, up(n_q, COLS), dout, o_row, C, n_q, HS, ONE)
    turn(w, qt, BLOCK, w, q, width, up(n_q, COLS))
    turn(w, dot, BLOCK, w, do, width, up(n_q, COLS))
    for t in range(n_q):
        d = spread(ZERO)
        for x in range(0, HS, LANES):
            d = d + load(w, do + t * width + x) * load_some(out, o_row + t * C + x, HS - x)
        w[delta + t] = sum_lanes(d)
    for j in range(i, -1, -1):
        diagonal, t2, block = j == i, j * BLOCK, (first + j) * floats
        n_k = min(BLOCK, T - t2)
        k, v, dk, dv = block + K * size, block + V * size, block + DK * size, block + DV * size
        if diagonal:
            pack(kept, k, width, n_k, qkv, row + C + t2 * 3 * C, 3 * C, n_k, HS, ONE)
            pack(kept, v, width, n_k, qkv, row + 2 * C + t2 * 3 * C, 3 * C, n_k, HS, ONE)
        else:
            wait_for(steps, done + j, i - j)
        # pass 2: score[t, t2] = s * q[t] . k[t2] and datt[t, t2] = dout[t] . v[t2], both transposed
        part = C_UPPER if diagonal else WHOLE
        product(w, score, BLOCK, kept, k, width, 1, w, qt, BLOCK, n_k, n_q, HS, part, False)
        product(w, datt, BLOCK, kept, v, width, 1, w, dot, BLOCK, n_k, n_q, HS, part, False)
        # pass 3: att = exp(score - lse), dscore = att * (datt - delta)
        softmax_backward(w, score, datt, lse, (b * lse.shape[1] + h) * T + t0, delta, n_q, n_k, diagonal)
        # pass 4: dv[t2] += att[t, t2] * dout[t], dk[t2] += dscore[t, t2] * s * q[t], dq[t] += dscore[t, t2] * k[t2]
        part = A_UPPER if diagonal else WHOLE
        product(kept, dv, width, w, score, BLOCK, 1, w, do, width, n_k, width, n_q, part, not diagonal)
        product(kept, dk, width, w, datt, BLOCK, 1, w, q, width, n_k, width, n_q, part, not diagonal)
        part = A_LOWER if diagonal else WHOLE
        product(w, dq, width, w, datt, 1, BLOCK, kept, k, width, n_q, width, n_k, part, not diagonal)
        tell(steps, done + j, i - j + 1)
        if t0 + BLOCK >= T:
            unpack(dqkv, row + C + t2 * 3 * C, 3 * C, kept, dk, width, n_k, HS, ONE, dqkv_add)
            unpack(dqkv, row + 2 * C + t2 * 3 * C, 3 * C, kept, dv, width, n_k, HS, ONE, dqkv_add)
    unpack(dqkv, row + t0 * 3 * C, 3 * C, w, dq, width, n_q, HS, scale, dqkv_add)


def kept_floats(sizes):
    """Size the memory of blocks of keys: of all blocks or, where a head has only one, of one block for each thread."""
    heads, blocks = sizes["B"] * sizes["NH"], -(-sizes["T"] // BLOCK)
    held = heads * blocks if blocks > 1 else config.NUMBA_NUM_THREADS
    return held * block_floats.py_func(sizes["C"] // sizes["NH"])


@kernel(
    ops.attention_backward,
    "optimized",
    scratch=[
        ("kept", kept_floats),
        ("work", for_each_thread(row_floats)),
        ("counter", 1, "int32"),
        ("steps", lambda sizes: sizes["B"] * sizes["NH"] * -(-sizes["T"] // BLOCK), "int32"),
    ],
)
def attention_backward(dqkv, dqkv_add, dout, qkv, out, lse, kept, work, counter, steps):
    """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

    Parallel: rows of all heads, handed out by ticket. A row follows the one before it of the same head, whose ticket is
    earlier, at a distance of one tile; so each gradient gathers its tiles in one order, whatever the threads.
    Memory: four packed copies of C numbers a token, of all tokens if T > BLOCK; seven tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
    """
    B, T, C = dout.shape
    NH = lse.shape[1]
    blocks, floats = (T + BLOCK - 1) // BLOCK, row_floats(C // NH)
    counter[0] = 0
    for i in range(steps.shape[0]):
        steps[i] = 0
    for worker in prange(work.shape[0] // floats):
        w = np.int64(worker)
        task = ticket(counter)
        while task < B * blocks * NH:
            b, i, h = task // (blocks * NH), task // NH % blocks, task % NH
            head = (b * NH + h) * blocks
            first = head if blocks > 1 else w
            backward_row(dqkv, dqkv_add, dout, qkv, out, lse, kept, first, work, w * floats, steps, head, b, h, i)
            task = ticket(counter)
