"""Products with a weight in int8: rows are quantized, and multiplied with panels of the weight in integers.

A panel has NR outputs, or NR columns of the gradient, and a block of the sum: it is packed when its turn comes, and
serves a piece of the rows. A forward of few rows reads the weight where it lies, as ``rows/matmul.py`` does.

A sum of integers is exact, so chunks may depend on the number of threads. All float32 are rounded as in the naive
kernels, one operation after the other (``fastmath=False``): the results have the same bits.
"""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.blocks import ceil, piece
from ..toolkit.constants import ONE, ZERO
from ..toolkit.fastmath import as_float
from ..toolkit.lanes import load, load_some, spread, store, store_some
from ..toolkit.micro.blocking import ALIASED, INPUT_ROWS, INT8_DEPTH, INT8_ROWS, QUANTIZED, READ_IN_PLACE
from ..toolkit.micro.records import QUADS
from ..toolkit.quads import (
    WORD,
    larger_size,
    largest,
    load_end,
    load_quads,
    multiply_add,
    number,
    pack_columns,
    pack_square,
    put_drawn,
    put_nearest,
    row_offset,
    total,
    unsigned,
)
from ..toolkit.queue import QUEUE, deal, for_each_thread, take
from ..toolkit.simd import LANES, LINE, NR, at, prefetch
from ..toolkit.threads import SMALL
from ..vanilla.dequantize import LEAST, LIMIT, MOST
from ..vanilla.dropout import GAMMA, mix
from ..vanilla.matmul_int8 import NAN, U1, units

STREAMS, CHUNK, AHEAD = 4, 8, 1024
"""Rows of the weight that are read at a time, rows of each stream that a thread takes, bytes that are fetched ahead."""
STEP = WORD * LANES
"""Bytes of a vector."""
TILE = QUADS.rows * NR


@helper()
def row_words(K):
    """Count the words of a quantized row, with zeros at its end: whole lines, and rows share no places in L1."""
    words = ceil(K, WORD * LINE) * LINE
    return words + LINE if words % (ALIASED // 2) == 0 else words


# Rows to int8 ---------------------------------------------------------------------------------------------------------


def quantizer(at_random):
    """Make the function that quantizes rows; at random, of their products with `scales`."""

    @helper(fastmath=False, forceinline=True)
    def value(x, scales, i, k, n):
        v = load(x, i + k) if n >= LANES else load_some(x, i + k, n)
        if at_random:
            v = v * (load(scales, k) if n >= LANES else load_some(scales, k, n))
        return v

    @helper(fastmath=False)
    def some_rows(q, steps, offsets, x, scales, draw, lo, hi):
        K = x.shape[1]
        width = WORD * row_words(K)
        for t in range(lo, hi):
            most = spread(ZERO)
            for k in range(0, K, LANES):
                most = larger_size(most, value(x, scales, t * K, k, K - k))
            step, factor = units(largest(most), K)
            for k in range(0, width, LANES):
                v = value(x, scales, t * K, k, K - k) if k < K and factor > ZERO else spread(ZERO)
                if at_random:
                    put_drawn(q, t * width + k, v, factor, draw, t * K + k)
                else:
                    put_nearest(q, t * width + k, v, factor)
            steps[t] = step
            offsets[t] = row_offset(q, t * width, width)

    @helper(parallel=True)
    def rows(q, steps, offsets, x, scales, draw):
        """Write the int8 of rows to `q`, their steps, and 128 times the sums of their int8."""
        M = x.shape[0]
        if M <= READ_IN_PLACE:
            some_rows(q, steps, offsets, x, scales, draw, 0, M)
        else:
            for i in prange(ceil(M, QUANTIZED)):
                some_rows(q, steps, offsets, x, scales, draw, i * QUANTIZED, min(M, i * QUANTIZED + QUANTIZED))

    return rows


to_nearest, drawn = quantizer(False), quantizer(True)


@helper(fastmath=False)
def row_to_int8(q, scales, weight, o):
    """Write a row of a weight as int8, and its scale."""
    C = weight.shape[1]
    whole, most = C // LANES * LANES, spread(ZERO)
    for k in range(0, C, LANES):
        most = larger_size(most, load(weight, o * C + k) if k < whole else load_some(weight, o * C + k, C - k))
    top = largest(most)
    scale = (top / MOST if top >= LEAST else ZERO) if top < LIMIT else NAN
    scales[o] = scale
    for k in range(0, whole, LANES):
        put_nearest(q, o * C + k, load(weight, o * C + k) / scale if scale > ZERO else spread(ZERO), ONE)
    for k in range(whole, C):
        q[o, k] = np.int8(np.rint(np.float32(weight[o, k]) / scale)) if scale > ZERO else np.int8(0)


@kernel(ops.quantize_rows, "optimized", fastmath=False)
def quantize_rows(q, scales, weight):
    """Read each row twice, in vectors: for its largest magnitude, and from the cache.

    Parallel: the rows.
    Bound: memory.
    """
    OC = weight.shape[0]
    for i in prange(ceil(OC, QUANTIZED)):
        for o in range(i * QUANTIZED, min(OC, i * QUANTIZED + QUANTIZED)):
            row_to_int8(q, scales, weight, o)


# Panels of the weight -------------------------------------------------------------------------------------------------


@helper()
def word(weight, i, row, n):
    """Return a word of n bytes of the weight, flat, from the i-th on, `row` bytes apart; unsigned."""
    bits = 0
    for k in range(n):
        bits |= ((np.int64(weight[i + k * row]) + 128) & 0xFF) << 8 * k
    return as_float(np.int32(bits))


@helper()
def pack_outputs(panel, weight, n, lo, hi):
    """panel[k - lo, j] = word k of the row n + j of the weight; lo is a multiple of LANES."""
    N, K = weight.shape
    flat, columns = weight.reshape(N * K), min(NR, N - n)
    whole, full = columns // LANES * LANES, min(hi, K // STEP * LANES)
    for j in range(0, whole, LANES):
        for k in range(lo, full, LANES):
            pack_square(at(panel, (k - lo) * NR + j), NR, weight, (n + j) * K + WORD * k, K)
    for j in range(columns):
        for k in range(full if j < whole else lo, hi):
            panel[(k - lo) * NR + j] = word(flat, (n + j) * K + WORD * k, 1, min(WORD, K - WORD * k))


@helper()
def pack_inputs(panel, weight, n, lo, hi):
    """panel[k - lo, j] = word of the rows 4k to 4k + 3 of the weight's column n + j."""
    K, N = weight.shape
    flat, columns = weight.reshape(K * N), min(NR, N - n)
    whole, full = columns // LANES * LANES, min(hi, K // WORD)
    for k in range(lo, full):
        for j in range(0, whole, LANES):
            pack_columns(at(panel, (k - lo) * NR + j), weight, WORD * k * N + n + j, N)
    for k in range(lo, hi):
        for j in range(whole if k < full else 0, columns):
            panel[(k - lo) * NR + j] = word(flat, WORD * k * N + n + j, N, min(WORD, K - WORD * k))


# Products -------------------------------------------------------------------------------------------------------------


@helper(fastmath=False)
def finish(out, add, row, n, tile, rows, steps, offsets, scales, bias):
    """Write a tile of sums to `out`, as numbers: times steps and scales, with the bias; or add it."""
    N = out.shape[1]
    for j in range(0, min(NR, N - n), LANES):
        left = N - n - j
        scale = load_some(scales, n + j, left) if scales.shape[0] > 0 else spread(ONE)
        more = load_some(bias, n + j, left) if bias.shape[0] > 0 else spread(ZERO)
        for i in range(rows):
            v, to = load(tile, i * NR + j), (row + i) * N + n + j
            v = number(v, offsets[row + i], scale * steps[row + i], more)
            if left >= LANES:
                store(out, to, load(out, to) + v if add else v)
            else:
                store_some(out, to, load_some(out, to, left) + v if add else v, left)


def thread_words(depth):
    """Count the words of a thread's scratch: a panel, and the sums of a tile, or of all rows if panels follow."""
    return min(depth, INT8_DEPTH) * NR + (INT8_ROWS * NR if depth > INT8_DEPTH else TILE)


def multiply_by(pack):
    """Make the product of quantized rows with the weight, whose panels `pack` packs."""
    wide, narrow, unit, most_rows = QUADS.wide, QUADS.narrow, QUADS.unit, QUADS.rows
    even = 1 if most_rows == unit else unit  # what the rows of a call are multiples of

    @helper(parallel=True)
    def multiply(out, add, q, steps, offsets, K, weight, scales, bias, panels, queue):
        M, N = out.shape
        depth, apart = ceil(K, WORD), row_words(K)
        most, long = min(depth, INT8_DEPTH), depth > INT8_DEPTH
        size = most * NR + (INT8_ROWS * NR if long else TILE)
        threads = panels.shape[0] // size
        count = ceil(N, NR)
        parts = max(1, min(ceil(M, INPUT_ROWS), ceil(4 * threads, count)))
        if long:
            parts = max(parts, ceil(M, INT8_ROWS - unit))  # since a piece has whole tiles
        deal(queue, count * parts)
        for t in prange(threads):
            panel, sums = panels[t * size :], panels[t * size + most * NR :]
            chunk = take(queue, t)
            while chunk >= 0:
                n, part = chunk // parts * NR, chunk % parts
                lo, hi = piece(part, parts, M, unit), piece(part + 1, parts, M, unit)
                groups = ceil(hi - lo, most_rows)
                for k in range(0, depth, INT8_DEPTH):
                    end = min(depth, k + INT8_DEPTH)
                    pack(panel, weight, n, k, end)
                    for g in range(groups):
                        row = lo + piece(g, groups, hi - lo, even)
                        rows = lo + piece(g + 1, groups, hi - lo, even) - row
                        tile = sums[(row - lo) * NR if long else 0 :]
                        x, b, c = at(q, row * apart + k), at(panel, 0), at(tile, 0)
                        fetch = at(q, (row + rows) * apart + k), LANES * (end - k), NR, 0
                        if N - n > LANES:
                            wide(rows, x, apart, b, NR, c, NR, end - k, k > 0, fetch)
                        else:
                            narrow(rows, x, apart, b, NR, c, NR, end - k, k > 0, fetch)
                        if end == depth:
                            finish(out, add, row, n, tile, rows, steps, offsets, scales, bias)
                chunk = take(queue, t)

    return multiply


multiply_outputs, multiply_inputs = multiply_by(pack_outputs), multiply_by(pack_inputs)


@helper(fastmath=False, forceinline=True)
def put(out, add, t, o, sums, offset, step, scale, more):
    """Write or add one sum, in all lanes of `sums`."""
    v = number(total(sums), offset, step * scale, more)
    out[t, o] = out[t, o] + v if add else v


@helper(fastmath=False)
def stream(out, add, q, steps, offsets, weight, scales, bias, lo, hi):
    """Compute columns lo to hi of out, and those one, two and three quarters of all further."""
    M, N = out.shape
    K = weight.shape[1]
    width, quarter, full = WORD * row_words(K), ceil(N, STREAMS), K // STEP * STEP
    flat = weight.reshape(N * K)
    for o in range(lo, hi):
        o1, o2, o3 = min(N - 1, o + quarter), min(N - 1, o + 2 * quarter), min(N - 1, o + 3 * quarter)
        for t in range(M):
            a0, a1, a2, a3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
            for k in range(0, full, STEP):
                x = load_quads(q, t * width + k)
                if t == 0:
                    for at_row in (o, o1, o2, o3):
                        prefetch(at(flat, (at_row * K + k + AHEAD) // WORD))
                a0 = multiply_add(unsigned(load_quads(flat, o * K + k)), x, a0)
                a1 = multiply_add(unsigned(load_quads(flat, o1 * K + k)), x, a1)
                a2 = multiply_add(unsigned(load_quads(flat, o2 * K + k)), x, a2)
                a3 = multiply_add(unsigned(load_quads(flat, o3 * K + k)), x, a3)
            if full < K:
                x = load_quads(q, t * width + full)
                a0 = multiply_add(unsigned(load_end(flat, o * K + full, K - full)), x, a0)
                a1 = multiply_add(unsigned(load_end(flat, o1 * K + full, K - full)), x, a1)
                a2 = multiply_add(unsigned(load_end(flat, o2 * K + full, K - full)), x, a2)
                a3 = multiply_add(unsigned(load_end(flat, o3 * K + full, K - full)), x, a3)
            some, step, offset = bias.shape[0] > 0, steps[t], offsets[t]
            put(out, add, t, o, a0, offset, step, scales[o], bias[o] if some else ZERO)
            if o + quarter < N:
                put(out, add, t, o1, a1, offset, step, scales[o1], bias[o1] if some else ZERO)
            if o + 2 * quarter < N:
                put(out, add, t, o2, a2, offset, step, scales[o2], bias[o2] if some else ZERO)
            if o + 3 * quarter < N:
                put(out, add, t, o3, a3, offset, step, scales[o3], bias[o3] if some else ZERO)


@helper(parallel=True)
def multiply_few(out, add, q, steps, offsets, weight, scales, bias):
    """Multiply few quantized rows with the weight, each row of which is read once."""
    quarter = ceil(out.shape[1], STREAMS)
    if weight.size < SMALL:
        stream(out, add, q, steps, offsets, weight, scales, bias, 0, quarter)
    else:
        for i in prange(ceil(quarter, CHUNK)):
            stream(out, add, q, steps, offsets, weight, scales, bias, i * CHUNK, min(quarter, i * CHUNK + CHUNK))


def scratch_of(summed):
    """List the scratch of a product that sums over a size, by its symbol."""
    return [
        ("q", lambda s: s["BT"] * row_words.py_func(s[summed]), "int32"),
        ("steps", lambda s: s["BT"]),
        ("offsets", lambda s: s["BT"], "int32"),
        ("panels", for_each_thread(lambda s: thread_words(-(-s[summed] // WORD)))),
        QUEUE,
    ]


@kernel(ops.matmul_int8_forward, "optimized", scratch=scratch_of("C"), parallel=False)
def matmul_int8_forward(out, out_add, inp, weight, scales, bias, q, steps, offsets, panels, queue):
    """Quantize the rows; then panels of the weight's rows times all of them, or for few rows its rows in place.

    Parallel: rows; then chunks by ticket, a panel and a piece of the rows, or chunks of columns of `out`.
    Memory: the quantized rows; a panel for each thread.
    Bound: compute; for few rows, the memory that weight streams through.
    """
    to_nearest(q, steps, offsets, inp, scales, 0)
    if inp.shape[0] <= READ_IN_PLACE:
        multiply_few(out, out_add, q, steps, offsets, weight, scales, bias)
    else:
        multiply_outputs(out, out_add, q, steps, offsets, inp.shape[1], weight, scales, bias, panels, queue)


@kernel(ops.matmul_int8_backward_input, "optimized", scratch=scratch_of("OC"), parallel=False)
def matmul_int8_backward_input(
    dinp, dinp_add, dout, weight, scales, stream, seed, counter, q, steps, offsets, panels, queue
):
    """Quantize the rows times the scales at random; then panels of the weight's columns times all of them.

    Parallel: rows; then chunks by ticket, a panel and a piece of the rows.
    Memory: the quantized rows; a panel for each thread.
    Bound: compute.
    """
    draw = mix(mix(mix(np.uint64(seed) + GAMMA) + np.uint64(counter) + GAMMA) + np.uint64(stream) + GAMMA) >> U1
    drawn(q, steps, offsets, dout, scales, np.int64(draw))
    none = scales[:0]
    multiply_inputs(dinp, dinp_add, q, steps, offsets, dout.shape[1], weight, none, none, panels, queue)
