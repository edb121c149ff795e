"""Matrix products on the micro-kernels of ``micro``: the small operand is packed, the large one is read where it lies.

A panel is NR neighbouring columns for each k, so the micro-kernel reads it in order.

========  ================================  ====================================  ===================================
          broadcast side                    vector side, in panels                loops of a chunk, from the outermost
========  ================================  ====================================  ===================================
forward   rows of `weight`, in place        NR tokens of `inp`, transposed once   blocks of k, panels, rows; then the
                                                                                  sums, transposed, to `out`
for many  tokens of `inp`, in place         NR rows of `weight`, transposed once  blocks of k, panels, tokens
dinp      tokens of `dout`, in place        NR columns of `weight`, copied when   blocks of k, panels, tokens
                                            their turn comes
for few   tokens of `dout`, copied          NR columns of `weight`, in place      the same
dweight   columns of `dout`, packed by      NR columns of `inp`, copied once      blocks of tokens, panels, rows
          groups, a strip at a time
thin      columns of the one that has few,  NR columns of the other, copied when  blocks of tokens, panels, rows; then
          packed by groups                  their turn comes                      all of it, transposed if need be
========  ================================  ====================================  ===================================

k counts words: of bfloat16 each is two neighbours along the summed axis. A row of an even number of elements is read as
it lies, an odd one is packed first, and columns are interleaved as they are packed. Sums are float32; one that is
stored as bfloat16 is rounded once, when all of it is there. dinp of bfloat16 never reads the weight in place.

A gradient is thin if it has few rows or few columns, as those of an adapter of low rank have.

So `weight` streams from memory once if it is large, and what comes next of it is fetched while a tile is computed.

Work is cut into chunks that threads take by ticket, each first of its own share. An element is summed by one thread,
over k in order, in blocks whose length depends on the shape alone. For few tokens an element of dinp is the sum of
parts, whose number depends on the shape alone too. So chunks and threads change no bit.

Source: Goto and van de Geijn 2008 and BLIS for blocks and packing; what is packed for which shape is our own.
"""

from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import CHUNK
from ..toolkit.lanes import add_transposed, load, load_some, spread, store, store_some
from ..toolkit.micro import MICRO_KERNELS, MicroKernel
from ..toolkit.pairs import floats, is_half, narrow
from ..toolkit.queue import QUEUE, deal, for_each_thread, take
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import LANES, LINE, MR, NR, at, prefetch, put_place

ZERO = np.float32(0)
PACKED = 0  # as a row stride: the rows of a group lie interleaved
SLICE = 128  # k of a packing task
TALL = -(-48 // lcm(MR, LANES)) * lcm(MR, LANES)  # rows of weight in a chunk: whole tiles and vectors; AVX-512: 112
WIDE = 256  # tokens of a forward chunk: with TALL, a strip of sums of 48 KB; AVX-512: 112 KB
DEPTH = 1024  # most k of a forward block: TALL rows (192 KB) and a panel (64 KB) take half of 512 KB of L2; AVX-512:
# 448 and 128 KB of 1 MB or more
ALIASED = 1024  # floats: rows that a multiple of it apart start on 4 KB share their places in L1
PLACES = 8  # the fewest lines that usual first-level caches hold at one place
INPUT_ROWS = 256  # tokens of a dinp chunk: enough to pay for copying a panel
INPUT_DEPTH = 768  # most k of a dinp block: the panel is 48 KB of L2
SHORT = 128  # tokens up to which a block of dinp has `short_depth` k
COLUMNS = 384  # most columns of a dinp chunk
SHARED = 256  # tokens up to which dinp is summed by shares of weight's rows
SHARES = 16  # most of them: each needs the memory of a dinp
SHARE_ROWS = 64  # fewest rows of a share
PACKED_ROWS = 16  # rows of dout that are packed at a time: they stay in L1 from group to group
THIN = 32  # rows or columns of a thin gradient
THIN_DEPTH = 128  # k of a block of a thin gradient: the panel is 16 KB of L1
OUTPUTS = 48  # columns of dout in a dweight chunk: each row of dweight has pages of its own, and 56 was no faster
STRIP = 65536  # floats of gradient in a strip: half of a 512 KB L2
WEIGHT_DEPTH = 512  # most tokens of a dweight block: a panel is 32 KB, the strip of dout 96 KB, that of dweight more
# floats of scratch for a thread
FORWARD_SCRATCH = WIDE * TALL + TALL
INPUT_SPARE = INPUT_ROWS * NR
CHUNK_SUMS = INPUT_ROWS * -(-COLUMNS // NR) * NR  # of a chunk of dinp that is rounded when it is done
WEIGHT_BLOCK = WEIGHT_DEPTH * OUTPUTS
LISTED = SHARED // 2  # to fetch while a group is multiplied: one for every second of at most SHARED tokens
WEIGHT_SPARE = OUTPUTS + OUTPUTS * NR  # the bias's gradient, and a tile
WEIGHT_SCRATCH = WEIGHT_BLOCK + WEIGHT_SPARE + 2 * LISTED * -(-OUTPUTS // MR)


def up(n, step):
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step


@helper()
def ceil(n, step):
    """Count the steps of `step` that cover `n`."""
    return (n + step - 1) // step


@helper()
def even(total, most, unit):
    """Size of the fewest equal pieces of `most` or less, which `unit` divides; a last one may be shorter."""
    return ceil(ceil(total, ceil(total, most)), unit) * unit


@helper()
def pieces(total, most, unit, others, threads):
    """Count the pieces of `total`, of `most` or less, of which each stands for `others` chunks.

    `unit` divides `most`. Where chunks are few, there are as many for each thread as for the next, and two or more.
    """
    units, turn = ceil(total, unit), 2 * threads
    count = ceil(units, most // unit)
    if count * others < 4 * turn:
        count = ceil(ceil(count * others, turn) * turn, others)
    return min(count, units)


@helper()
def piece(i, count, total, unit):
    """Start of the i-th of `count` pieces of `total`: whole units, as many in each but for one.

    The larger ones are spread, so that half of the pieces are half of the work.
    """
    return min(total, unit * (i * ceil(total, unit) // count))


@helper()
def largest(count, total, unit):
    """Size of the largest piece."""
    return unit * ceil(ceil(total, unit), count)


@helper()
def token_pieces(M, most, threads):
    """Count the pieces of M tokens, of `most` or less: with at least as many as threads, each thread gets as many."""
    count = ceil(M, most)
    return ceil(count, threads) * threads if count >= threads else count


@helper()
def place(chunk, m_chunks, n_chunks, by_tokens):
    """Find the piece of tokens and the piece of the result's columns of a chunk.

    By tokens, neighbouring chunks have the same tokens: their rows stay in the caches of the threads that do them in
    other kernels too, and each thread reads the whole weight. Otherwise neighbouring chunks have the same columns.
    """
    return (chunk // n_chunks, chunk % n_chunks) if by_tokens else (chunk % m_chunks, chunk // m_chunks)


@helper()
def count_groups(rows, row):
    """Count the groups of rows, `row` floats apart: of at most MR, or fewer that would evict each other from L1."""
    aliased = row != PACKED and row % ALIASED == 0
    return ceil(rows, min(MR, PLACES - 1) if aliased else MR)


def multiply_by(product):
    """Make the product of rows of a, in the even groups of `count_groups`, with one panel, by a micro-kernel.

    Group g fetches from ahead[g * ahead_group].
    """

    @helper()
    def multiply(rows, a, row, b, line, c, c_row, depth, add, ahead, ahead_group, step, shift):
        groups = count_groups(rows, row)
        size, longer = rows // groups, rows % groups
        lo = 0
        for g in range(groups):
            n = size + 1 if g < longer else size
            start, r, s = (lo * depth, 1, n) if row == PACKED else (lo * row, row, 1)
            x = at(ahead, g * ahead_group)
            product(n, at(a, start), r, s, b, line, at(c, lo * c_row), c_row, depth, add, x, step, shift)
            lo += n

    return multiply


def multiply_columns_by(micro):
    """Make the same function of the number of columns first: of one vector of them or less, it computes no more."""
    multiply_wide, multiply_narrow = multiply_by(micro.wide), multiply_by(micro.narrow)

    @helper()
    def multiply(columns, rows, a, row, b, line, c, c_row, depth, add, ahead, ahead_group, step, shift):
        if columns > LANES:
            multiply_wide(rows, a, row, b, line, c, c_row, depth, add, ahead, ahead_group, step, shift)
        else:
            multiply_narrow(rows, a, row, b, line, c, c_row, depth, add, ahead, ahead_group, step, shift)

    return multiply


@helper()
def add_columns(x, row, column, tile, rows, add):
    """Write or add what lies inside of x of a tile in scratch: the edge that a whole tile would pass."""
    for i in range(rows):
        for j in range(x.shape[1] - column):
            new = tile[i * NR + j]
            x[row + i, column + j] = x[row + i, column + j] + new if add else new


@helper()
def put_columns(x, row, column, tile, rows, bias):
    """Write columns of x from the whole sums in a tile, with the bias."""
    columns = min(NR, x.shape[1] - column)
    if bias.shape[0] > 0:
        for i in range(rows):
            for j in range(columns):
                tile[i * NR + j] += bias[column + j]
    for i in range(rows):
        narrow(x, (row + i) * x.shape[1] + column, tile, i * NR, columns, False)


def pack_tokens_by(micro):
    """Make the function that packs rows of words into panels."""
    put, transpose, lines = micro.put, micro.transpose, micro.lines

    @helper()
    def pack_tokens(panels, x, row, lo, hi):
        """Put x[row + j, k] at column j of line k of a panel, for k in lo..hi, and zero beyond the last row.

        Of LANES rows or fewer, only the first LANES columns of the panel are written, as only they are read.
        """
        C = x.shape[1]
        n = min(NR, x.shape[0] - row)
        base = row * C * lines
        full, whole = lo + (hi - lo) // LANES * LANES, n // LANES * LANES
        for j in range(0, whole, LANES):
            for k in range(lo, full, LANES):
                transpose(at(panels, base + k * lines * NR + j), NR, at(x, (row + j) * C + k), C)
        for k in range(lo, hi):
            for j in range(whole if k < full else 0, LANES if n <= LANES else NR):
                put(panels, base + k * lines * NR + j, NR, x[row + j, k] if j < n else ZERO)

    return pack_tokens


@helper()
def forward_store(out, bias, sums, m0, m1, n0, n1):
    """Compute out[m0:m1, n0:n1], with the bias."""
    N = out.shape[1]
    rows, extra = n1 - n0, WIDE * TALL
    for i in range(rows):
        sums[extra + i] = bias[n0 + i] if bias.shape[0] > 0 else ZERO
    for m in range(m0, m1, NR):
        base = (m - m0) * TALL
        tokens, full = min(NR, m1 - m), rows // LANES * LANES
        whole = tokens // LANES * LANES
        for n in range(0, full, LANES):
            for j in range(0, whole, LANES):
                add_transposed(out, (m + j) * N + n0 + n, N, sums, base + n * NR + j, NR, sums, extra + n)
        for j in range(tokens):
            for n in range(full if j < whole else 0, rows):
                out[m + j, n0 + n] = sums[base + n * NR + j] + sums[extra + n]


@helper()
def prefers_tokens(M, K, N):
    """Return whether M tokens and their sums have more than twice the floats of the weight.

    A forward then packs the weight in place of the tokens; in forward and dinp, threads share out the tokens.
    """
    return 2 * N * K < M * (K + N)


@helper()
def add_bias(out, bias, m0, m1, n0, n1):
    """Add the bias to out[m0:m1, n0:n1]."""
    N = out.shape[1]
    for n in range(n0, n1, LANES):
        b = load_some(bias, n, n1 - n)
        for m in range(m0, m1):
            if n + LANES <= n1:
                store(out, m * N + n, load(out, m * N + n) + b)
            else:
                store_some(out, m * N + n, load_some(out, m * N + n, n1 - n) + b, n1 - n)


def prefers_by(micro):
    """Make the function that returns whether a forward of M rows of K words packs the weight.

    It does not if the rows of the result share places in the first-level cache, and the micro-kernel avoids that.
    """
    avoids_aliases = micro.avoids_aliases

    @helper()
    def prefers(M, K, N):
        return 2 * N * K < M * (K + N) and not (avoids_aliases and N % (ALIASED // 2) == 0)

    return prefers


def forward_by(micro, prefers):
    """Make the forwards of one product of words, and of the sum of two."""
    multiply, pack_tokens, lines = multiply_columns_by(micro), pack_tokens_by(micro), micro.lines

    @helper()
    def forward_sums(sums, weight, panels, m0, m1, n0, n1, most, add):
        """Compute or add rows n0..n1 of `weight` times tokens m0..m1, panel by panel: sums[m - m0, n - n0, j]."""
        K = weight.shape[1]
        groups = count_groups(n1 - n0, K)
        for k in range(0, K, most):
            depth = min(most, K - k)
            a = at(weight, n0 * K + k)
            for m in range(m0, m1, NR):
                b = at(panels, (m * K + k * NR) * lines)
                if m == m0:  # fetch the next group's rows: one stretch of memory where a block is all of K
                    size = ceil(n1 - n0, groups)
                    ahead, ahead_group, step = at(a, size * K), size * K, 2 * size
                else:  # fetch the next panel, each group a part of it
                    ahead, ahead_group = at(b, K * NR * lines), depth * NR // groups * lines
                    step = 2 * ceil(NR, groups) * lines
                to = at(sums, (m - m0) * TALL)
                adding = add or k > 0
                columns = m1 - m
                multiply(columns, n1 - n0, a, K, b, NR, to, NR, depth, adding, ahead, ahead_group, step, 0)

    @helper()
    def forward_tokens(out, inp, panels, low, more, bias, tile, m0, m1, n0, n1, most, add):
        """Compute out[m0:m1, n0:n1] from panels of rows of weight, with the bias, or add to it.

        A bfloat16 gets the whole sum, of one block of k, and of the product of `low` with the panels `more` if there
        is one.
        """
        K, N, direct = inp.shape[1], out.shape[1], not is_half(out)
        rows = m1 - m0
        groups = count_groups(rows, K)
        for k in range(0, K, most):
            depth = min(most, K - k)
            for n in range(n0, n1, NR):
                inside = direct and n + NR <= N
                b = at(panels, (n * K + k * NR) * lines)
                to, to_row = (at(out, m0 * N + n), N) if inside else (at(tile, 0), NR)
                ahead, ahead_group = at(b, K * NR * lines), depth * NR // groups * lines
                step = 2 * ceil(NR, groups) * lines
                x, adding, columns = at(inp, m0 * K + k), add or k > 0, N - n
                adds = adding and inside
                multiply(columns, rows, x, K, b, NR, to, to_row, depth, adds, ahead, ahead_group, step, 0)
                if low.shape[0] > 0:
                    R = low.shape[1]
                    x, b = at(low, m0 * R), at(more, n * R * lines)
                    multiply(columns, rows, x, R, b, NR, to, to_row, R, True, b, 0, 0, 0)
                if not direct:
                    put_columns(out, m0, n, tile, rows, bias)
                elif not inside:
                    add_columns(out, m0, n, tile, rows, adding)
                if direct and k + depth == K and bias.shape[0] > 0:
                    add_bias(out, bias, m0, m1, n, min(n + NR, N))

    @helper()
    def forward(out, inp, weight, bias, panels, sums, queue):
        """Compute a linear layer."""
        forward_two(out, inp, weight, bias, inp[:0], weight[:0], panels, panels[:0], sums, queue)

    @helper(parallel=True)
    def forward_two(out, inp, weight, bias, low, up, panels, more, sums, queue):
        """Compute a linear layer, and add low times `up`, if there are any; `more` are their panels."""
        M, K = inp.shape
        N, R, two = weight.shape[0], low.shape[1], low.shape[0] > 0
        threads = sums.shape[0] // FORWARD_SCRATCH
        slices = ceil(K, SLICE)
        many = prefers(M, K, N)
        packed, second = (weight, up) if many else (inp, low)
        tasks = ceil(packed.shape[0], NR) * slices
        for i in prange(tasks + ceil(second.shape[0], NR)):
            if i < tasks:
                lo = i % slices * SLICE
                pack_tokens(panels, packed, i // slices * NR, lo, min(K, lo + SLICE))
            else:
                pack_tokens(more, second, (i - tasks) * NR, 0, R)
        depth = K if M <= NR or (many and is_half(out)) else even(K, DEPTH, LINE)
        depth_two, at_once = even(R, DEPTH, LINE), low if many and is_half(out) else low[:0]
        m_chunks, step = (token_pieces(M, INPUT_ROWS, threads), LINE) if many else (ceil(M, WIDE), NR)
        most, unit = (COLUMNS, NR) if many else (TALL, LANES)
        n_chunks = pieces(N, most, unit, m_chunks, threads)
        deal(queue, n_chunks * m_chunks)
        for t in prange(threads):
            mine = sums[t * FORWARD_SCRATCH : (t + 1) * FORWARD_SCRATCH]
            chunk = take(queue, t)
            while chunk >= 0:
                m, n = place(chunk, m_chunks, n_chunks, many)
                m0, m1 = piece(m, m_chunks, M, step), piece(m + 1, m_chunks, M, step)
                n0, n1 = piece(n, n_chunks, N, unit), piece(n + 1, n_chunks, N, unit)
                if many:
                    forward_tokens(out, inp, panels, at_once, more, bias, mine, m0, m1, n0, n1, depth, False)
                    if two and not is_half(out):
                        none = low[:0]
                        forward_tokens(out, low, more, none, more, bias[:0], mine, m0, m1, n0, n1, depth_two, True)
                else:
                    forward_sums(mine, weight, panels, m0, m1, n0, n1, depth, False)
                    if two:
                        forward_sums(mine, up, more, m0, m1, n0, n1, depth_two, True)
                    forward_store(out, bias, mine, m0, m1, n0, n1)
                chunk = take(queue, t)

    return forward, forward_two


@helper()
def pack_lines(block, x, row, column, rows, depth):
    """block[i, k] = x[row + i, column + k]."""
    for i in range(rows):
        for k in range(depth):
            block[i * depth + k] = x[row + i, column + k]


@helper()
def count_shares(M, N):
    """Count the shares of weight's rows over which dinp is summed apart.

    An update that follows writes the rows, and finds them in the caches of the threads that read them here. The sums
    of n shares have at most an n-th of the weight's floats.
    """
    shares = 1
    while M <= SHARED and shares < SHARES and N >= 2 * shares * max(SHARE_ROWS, 2 * shares * M):
        shares *= 2
    return shares


def share_floats(M, C, N):
    """Count the floats of the sums of all shares."""
    shares = count_shares.py_func(M, N)
    return shares * M * C if shares > 1 else 0


def input_by(micro):
    """Make the gradient of a linear layer's input, of the words of dout; and count the scratch of a thread."""
    multiply, pack, group, few, short_depth = (
        multiply_columns_by(micro), micro.pack, micro.group, micro.few, micro.short_depth,
    )  # fmt: skip
    chunk_sums = CHUNK_SUMS if micro.rounds else 0
    behind_panel = INPUT_SPARE + INPUT_DEPTH * NR * micro.lines
    size = behind_panel + short_depth * few + chunk_sums

    @helper()
    def input_chunk(to, row, column, add, dout, weight, mine, m0, m1, c0, c1, n0, n1, most):
        """Compute tokens m0..m1 and columns c0..c1 of dinp, of the words n0..n1 of dout, at [row, column] of `to`."""
        N, C, W = dout.shape[1], weight.shape[1], to.shape[1]
        rows = m1 - m0
        copied = dout.shape[0] <= few and C % ALIASED > 0
        groups = count_groups(rows, PACKED if copied else N)
        tile, panel, block = mine, mine[INPUT_SPARE:], mine[behind_panel:]
        shift = 0  # so that the groups together fetch one panel
        while groups >> (shift + 2):
            shift += 1
        block_depth = even(n1 - n0, most, 2)
        for n in range(n0, n1, block_depth):
            depth = min(block_depth, n1 - n)
            adding = add or n > n0
            a, a_row = at(dout, m0 * N + n), N
            if copied:
                pack_lines(block, dout, m0, n, rows, depth)
                a, a_row = at(block, 0), depth
            for c in range(c0, c1, NR):
                b, line = at(weight, n * C + c), C
                if not (copied and c + NR <= C):
                    pack(panel, weight, group * n, c, depth)
                    b, line = at(panel, 0), NR
                edge = column + c - c0
                inside = edge + NR <= W
                target, target_row = (at(to, row * W + edge), W) if inside else (at(tile, 0), NR)
                ahead = at(weight, group * n * C + c + NR if c + NR < c1 else group * (n + depth) * C + c0)
                adds, step = adding and inside, depth // groups * C
                multiply(C - c, rows, a, a_row, b, line, target, target_row, depth, adds, ahead, step, C, shift)
                if not inside:
                    add_columns(to, row, edge, tile, rows, adding)

    @helper(parallel=True)
    def backward_input(dinp, add, dout, weight, panels, parts, queue):
        """Compute dinp of the words of dout, a whole one for each `group` rows of weight."""
        M, C = dinp.shape
        N = dout.shape[1]
        threads = panels.shape[0] // size
        shares = count_shares(M, group * N) if parts.shape[0] > 0 else 1
        depth = short_depth if M <= SHORT else INPUT_DEPTH
        m_chunks = token_pieces(M, INPUT_ROWS, threads)
        c_chunks = pieces(C, COLUMNS, NR, shares * m_chunks, threads)
        chunks, by_tokens = m_chunks * c_chunks, prefers_tokens(M, C, N)
        deal(queue, shares * chunks)
        for t in prange(threads):
            mine = panels[t * size : (t + 1) * size]
            sums = mine[size - chunk_sums :]
            chunk = take(queue, t)
            while chunk >= 0:
                part, (m, c) = chunk // chunks, place(chunk % chunks, m_chunks, c_chunks, by_tokens)
                m0, m1 = piece(m, m_chunks, M, LINE), piece(m + 1, m_chunks, M, LINE)
                c0, c1 = piece(c, c_chunks, C, NR), piece(c + 1, c_chunks, C, NR)
                n0, n1 = piece(part, shares, N, 1), piece(part + 1, shares, N, 1)
                if shares > 1:
                    to = parts[part * M * C : (part + 1) * M * C].reshape(M, C)
                    input_chunk(to, m0, c0, False, dout, weight, mine, m0, m1, c0, c1, n0, n1, depth)
                elif is_half(dinp):
                    wide = ceil(c1 - c0, NR) * NR
                    to = sums[: (m1 - m0) * wide].reshape(m1 - m0, wide)
                    input_chunk(to, 0, 0, False, dout, weight, mine, m0, m1, c0, c1, n0, n1, depth)
                    for i in range(m1 - m0):
                        narrow(dinp, (m0 + i) * C + c0, sums, i * wide, c1 - c0, add)
                else:
                    input_chunk(floats(dinp), m0, c0, add, dout, weight, mine, m0, m1, c0, c1, n0, n1, depth)
                chunk = take(queue, t)
        if shares > 1:
            for i in prange(ceil(M * C, CHUNK)):
                add_parts(dinp, add, parts, shares, i * CHUNK, min(M * C, i * CHUNK + CHUNK))

    return backward_input, size


@helper()
def add_parts(dinp, add, parts, shares, lo, hi):
    """Compute lo..hi of dinp, flat, from the sums of the shares."""
    for x in range(lo, hi, LANES):
        n = hi - x
        total = load_some(dinp, x, n) if add else spread(ZERO)
        for part in range(shares):
            total = total + load_some(parts, part * dinp.size + x, n)
        store_some(dinp, x, total, n)


def pack_outputs_by(micro):
    """Make the function that packs columns of dout for a strip of a weight's gradient."""
    load_words, one, group = micro.load, micro.one, micro.group

    @helper()
    def pack_outputs(block, dout, m, depth, n0, rows):
        """Pack columns by groups of up to MR: block[lo * depth + k * n + i] = word of dout[m + k * group, n0 + lo + i].

        Whole vectors are written; what is too much of one is overwritten by the next.
        """
        groups = ceil(rows, MR)
        size, longer = rows // groups, rows % groups
        safe = depth - ceil(LANES, size) - group + 1  # beyond, a whole vector could end outside of the group or of dout
        for first in range(0, depth, PACKED_ROWS):
            last, lo = min(first + PACKED_ROWS, depth), 0
            for g in range(groups):
                n = size + 1 if g < longer else size
                column, to = n0 + lo, lo * depth
                for k in range(first, min(last, safe)):
                    for i in range(0, n, LANES):
                        store(block, to + k * n + i, load_words(dout, m + k * group, column + i))
                for k in range(max(first, safe), last):
                    for i in range(n):
                        block[to + k * n + i] = one(dout, m + k * group, column + i)
                lo += n

    return pack_outputs


@helper()
def sum_columns(total, add, dout, m, depth, n0, rows):
    """Compute or add the sums of columns n0.. over `depth` tokens, in order; a vector more may be written."""
    N = dout.shape[1]
    for i in range(0, rows, 2 * LANES):  # two vectors, so that the sum of one does not wait for the other's
        j, left = i + LANES, rows - i - LANES
        s, t = spread(ZERO), spread(ZERO)
        if add:
            s, t = load(total, i), load_some(total, j, left)
        for k in range(m, m + depth):
            x = k * N + n0
            s, t = s + load_some(dout, x + i, rows - i), t + load_some(dout, x + j, left)
        store(total, i, s)
        store_some(total, j, t, left)


@helper(inline="always")
def no_places(to, places, n, row, rows, c):
    """List none."""
    return n


def places_of(reads):
    """Make the function that lists the places of column c of some rows, of the elements `reads` of a tuple of arrays.

    They become the places from the n-th on; the number of all is returned.
    """
    if not reads:
        return no_places
    *others, last = reads
    before = places_of(tuple(others))

    @helper(inline="always")
    def list_places(to, places, n, row, rows, c):
        n = before(to, places, n, row, rows, c)
        for i in range(rows):
            put_place(places, n + i, at(to[last], (row + i) * to[last].shape[1] + c))
        return n + rows

    return list_places


def weight_chunk_by(micro, pack_outputs):
    """Make the function that makes, for an epilogue, that of a strip of a weight's gradient.

    What the update of a strip reads is fetched while the strip is made, if the machine has time for it.
    """
    group, lines, multiply = micro.group, micro.lines, multiply_by(micro.wide)
    multiply_ahead = multiply_by(micro.listed) if micro.listed else multiply

    @cache
    def of(epilogue):
        reads = epilogue.reads if micro.listed and MR * len(epilogue.reads) <= LISTED else ()
        fetches, list_places, biased = len(reads) > 0, places_of(reads), epilogue.biased

        @helper(inline="always")
        def list_ahead(places, most, to, row, rows, c, panel, length):
            """List for each group what its update reads at column c, and then a part of the panel: `most` places."""
            groups = ceil(rows, MR)
            size, longer, part = rows // groups, rows % groups, length // groups
            for g in range(groups):
                n, first = size + 1 if g < longer else size, LISTED * g
                end = list_places(to, places, first, row, n, c)
                for i in range(end, first + most):
                    put_place(places, i, at(panel, part * g + (i - end) * 2 * LINE))
                row += n

        @helper()
        def weight_chunk(to, grad, row, add, dout, panels, block, spare, n0, n1, tall, most):
            """Compute rows n0..n1 of the weight's gradient in rows `row`.. of `grad`, and of the bias's in `spare`.

            `most` is the number of tokens of a block.
            """
            M, N = dout.shape
            C = grad.shape[1]
            P = ceil(C, NR) * NR
            rows = n1 - n0
            groups = ceil(rows, MR)
            tile, places = spare[OUTPUTS:], spare[WEIGHT_SPARE:]
            for m in range(0, M, most):
                tokens = min(most, M - m)
                depth = ceil(tokens, group)
                pack_outputs(block, dout, m, depth, n0, rows)
                if biased(to):
                    sum_columns(spare, m > 0, dout, m, tokens, n0, rows)
                adding = add or m > 0
                next_m, next_n = (m + tokens, n0) if m + tokens < M else (0, n1)
                for c in range(0, C, NR):
                    for k in range(tokens * c // P, tokens * (c + NR) // P):  # fetch its part of what is packed next
                        for i in range(0, tall, LINE):
                            prefetch(at(dout, (next_m + k) * N + next_n + i))
                    inside = c + NR <= C
                    b = at(panels, (m // group * P + c * depth) * lines)
                    out, line = (at(grad, row * C + c), C) if inside else (at(tile, 0), NR)
                    x, adds, length = at(block, 0), adding and inside, depth * NR * lines
                    if fetches and M <= SHARED:
                        list_ahead(places, depth // 2, to, n0, rows, c, at(b, length), length)
                        ahead, apart = at(places, 0), 2 * LISTED
                        multiply_ahead(rows, x, PACKED, b, NR, out, line, depth, adds, ahead, apart, 0, 0)
                    else:
                        ahead, apart, step = at(b, length), length // groups, 2 * ceil(NR, groups) * lines
                        multiply(rows, x, PACKED, b, NR, out, line, depth, adds, ahead, apart, step, 0)
                    if not inside:
                        add_columns(grad, row, c, tile, rows, adding)

        return weight_chunk

    return of


def thin_by(micro, pack_outputs):
    """Make the function of columns of a thin product."""
    multiply, pack, group, lines = multiply_by(micro.wide), micro.pack, micro.group, micro.lines

    @helper()
    def thin_chunk(to, few, many, mine, c0, c1):
        """Compute few' many[:, c0:c1] in these columns of `to`; a panel is packed when its turn comes."""
        M, R = few.shape
        C = many.shape[1]
        groups = ceil(R, MR)
        block, panel = mine, mine[THIN_DEPTH * THIN :]
        tile = panel[THIN_DEPTH * NR * lines :]
        shift = 0  # so that the groups together fetch one panel
        while groups >> (shift + 2):
            shift += 1
        for m in range(0, M, THIN_DEPTH * group):
            depth = ceil(min(THIN_DEPTH * group, M - m), group)
            pack_outputs(block, few, m, depth, 0, R)
            for c in range(c0, c1, NR):
                pack(panel, many, m, c, depth)
                inside = c + NR <= C
                target, row = (at(to, c), C) if inside else (at(tile, 0), NR)
                ahead = at(many, m * C + c + NR if c + NR < c1 else (m + depth * group) * C + c0)
                a, b, apart = at(block, 0), at(panel, 0), depth // groups * C
                multiply(R, a, PACKED, b, NR, target, row, depth, m > 0 and inside, ahead, apart, C, shift)
                if not inside:
                    add_columns(to, 0, c, tile, R, m > 0)

    return thin_chunk


@helper()
def is_thin(M, N, C):
    """Return whether a gradient of N rows and C columns has so few of either that its panels serve one tile."""
    few = min(N, C)
    return 0 < few <= THIN and 2 * few <= max(N, C) and 4 * few <= M


@helper()
def put_thin(grad, row, add, thin, n0, n1):
    """Put rows n0..n1 of a thin gradient, which is transposed if it has few columns, into `grad`, or add them."""
    C = grad.shape[1]
    for i in range(n1 - n0):
        for j in range(C):
            new = thin[j, n0 + i] if thin.shape[0] == C else thin[n0 + i, j]
            grad[row + i, j] = grad[row + i, j] + new if add else new


def strip_floats(C):
    """Count the floats of the strip of a gradient that a thread keeps until an optimizer's step is taken from it."""
    return max(STRIP, MR * C)


def weight_floats(sizes, steps):
    """Count the floats of a thread's scratch of a weight's gradient, with a strip of it if a step is taken from it."""
    return WEIGHT_SCRATCH + (strip_floats(sizes["C"]) if steps else 0)


def weight_by(micro):
    """Make the weight's gradient as a function of the epilogue.

    If that takes an optimizer's step, a strip of the gradient stays in the cache until its weights are updated.
    """
    pack_outputs, pack, group, lines = pack_outputs_by(micro), micro.pack, micro.group, micro.lines
    weight_chunk, thin_chunk = weight_chunk_by(micro, pack_outputs), thin_by(micro, pack_outputs)

    @helper()
    def pack_panel(i, panels, inp, most):
        """Pack the i-th panel of NR columns and at most `most` tokens."""
        M, C = inp.shape
        columns = ceil(C, NR)
        m, c = i // columns * most, i % columns * NR
        depth = ceil(min(most, M - m), group)
        pack(panels[(m // group * columns * NR + c * depth) * lines :], inp, m, c, depth)

    @cache
    def of(epilogue):
        begin, rows, place, finish = epilogue.begin, epilogue.rows, epilogue.place, epilogue.finish
        biased, end, steps, strip = epilogue.biased, epilogue.end, epilogue.steps, weight_chunk(epilogue)

        @helper(parallel=True)
        def linear_weight(to, dout, inp, panels, blocks, queue):
            M, N, C = inp.shape[0], rows(to), to[0].shape[1]  # of a frozen weight, C = 0
            depth, thin = even(M, WEIGHT_DEPTH * group, group), is_thin(M, N, C) and N * C <= panels.shape[0]
            most, unit, size = OUTPUTS, LANES, WEIGHT_SCRATCH
            if steps:
                most, unit, size = min(OUTPUTS, max(MR, STRIP // C)), 1, WEIGHT_SCRATCH + max(STRIP, MR * C)
            threads = blocks.shape[0] // size
            begin(to)
            whole = panels[: N * C if thin else 0].reshape(min(N, C) if thin else 0, max(N, C))
            if thin:
                few, many = (dout, inp) if N < C else (inp, dout)
                chunks = pieces(many.shape[1], COLUMNS, NR, 1, threads)
                deal(queue, chunks)
                for t in prange(threads):
                    chunk = take(queue, t)
                    while chunk >= 0:
                        c0, c1 = piece(chunk, chunks, max(N, C), NR), piece(chunk + 1, chunks, max(N, C), NR)
                        thin_chunk(whole, few, many, blocks[t * size :], c0, c1)
                        chunk = take(queue, t)
            else:
                for i in prange(ceil(C, NR) * ceil(M, depth)):
                    pack_panel(i, panels, inp, depth)
            chunks = pieces(N, most, unit, 1, threads)
            tall = largest(chunks, N, unit)
            deal(queue, chunks)
            for t in prange(threads):
                mine = blocks[t * size : (t + 1) * size]
                block, spare, own = mine[:WEIGHT_BLOCK], mine[WEIGHT_BLOCK:WEIGHT_SCRATCH], mine[WEIGHT_SCRATCH:]
                chunk = take(queue, t)
                while chunk >= 0:
                    n0, n1 = piece(chunk, chunks, N, unit), piece(chunk + 1, chunks, N, unit)
                    grad, row, add = place(to, own, n0, tall)
                    if thin:
                        if biased(to):
                            sum_columns(spare, False, dout, 0, M, n0, n1 - n0)
                        put_thin(grad, row, add, whole, n0, n1)
                    else:
                        strip(to, grad, row, add, dout, panels, block, spare, n0, n1, tall, depth)
                    finish(to, grad, spare, n0, n1 - n0)
                    chunk = take(queue, t)
            end(to, N)

        return linear_weight

    return of


@dataclass(frozen=True)
class Products:
    """The products of a linear layer by a micro-kernel, and the lengths of their scratch.

    Attributes
    ----------
    micro : the micro-kernel.
    prefers : ``prefers(M, K, N)`` returns whether a forward of M rows of K words packs the weight.
    forward : ``forward(out, inp, weight, bias, panels, sums, queue)``, of words.
    forward_two : ``forward_two(out, inp, weight, bias, low, up, panels, more, sums, queue)`` adds the product of `low`
        and `up`, whose panels are `more`.
    operands : ``operands(x, y, room)`` returns the words of two operands, packed at the end of `room` if need be.
    backward_input : ``backward_input(dinp, dinp_add, dout, weight, panels, parts, queue)``, of the words of dout.
    input_floats : the length of a thread's scratch of it.
    backward_weight : makes ``(to, dout, inp, panels, blocks, queue)`` for an epilogue.
    """

    micro: MicroKernel
    prefers: Any
    forward: Any
    forward_two: Any
    operands: Any
    backward_input: Any
    input_floats: int
    backward_weight: Any

    def forward_panels(self, M, K, N, of=None):
        """Count the floats of the panels of a forward of M tokens, or of its second product, of rows of `of`."""
        group = self.micro.group
        rows = up(N if self.prefers.py_func(M, -(-K // group), N) else M, NR)
        return rows * -(-(of or K) // group) * self.micro.lines

    def forward_scratch(self):
        """List the scratch of a forward."""

        def panels(s):
            BT, C, OC = s["BT"], s["C"], s["OC"]
            return self.forward_panels(BT, C, OC) + self.micro.room((BT, C), (OC, C))

        return [("panels", panels), ("sums", for_each_thread(FORWARD_SCRATCH)), QUEUE]

    def input_scratch(self):
        """List the scratch of a gradient of the input."""

        def parts(s):
            rows = up(s["OC"], self.micro.group)
            return share_floats(s["BT"], s["C"], rows) + self.micro.room((s["BT"], s["OC"]))

        return [("panels", for_each_thread(self.input_floats)), ("parts", parts), QUEUE]

    def weight_scratch(self, steps):
        """List the scratch of a weight's gradient; a thin one lies where the panels would."""
        group, lines = self.micro.group, self.micro.lines

        def panels(s):
            thin = is_thin.py_func(s["BT"], s["OC"], s["C"])
            return max(-(-s["BT"] // group) * lines * up(s["C"], NR), s["OC"] * s["C"] if thin else 0)

        return [("panels", panels), ("blocks", for_each_thread(lambda s: weight_floats(s, steps))), QUEUE]


def products_by(micro):
    """Make the products of a linear layer."""
    words, prefers = micro.words, prefers_by(micro)

    @helper()
    def operands(x, y, room):
        x_words, rest = words(x, room)
        y_words, _ = words(y, rest)
        return x_words, y_words

    return Products(micro, prefers, *forward_by(micro, prefers), operands, *input_by(micro), weight_by(micro))


PRODUCTS = tuple(map(products_by, MICRO_KERNELS))


def register(products):
    """Register the kernels of a storage type."""
    of, words, operands = products.micro.storage, products.micro.words, products.operands
    forward, backward_input = products.forward, products.backward_input

    @kernel(ops.matmul_forward, "optimized", of=of, scratch=products.forward_scratch(), parallel=False)
    def matmul_forward(out, inp, weight, bias, panels, sums, queue):
        """Pack the tokens, then strips of rows of weight times all panels; for many tokens the other way round.

        Parallel: packing by panel and slice; then chunks by ticket, each owns a block of `out`.
        Memory: the packed tokens, or the packed weight; a strip of sums for each thread.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, w = operands(inp, weight, panels)
        forward(out, x, w, bias, panels, sums, queue)

    @kernel(ops.matmul_backward_input, "optimized", of=of, scratch=products.input_scratch(), parallel=False)
    def matmul_backward_input(dinp, dinp_add, dout, weight, panels, parts, queue):
        """Blocks of tokens times panels of weight's columns; the rows of weight are summed a block at a time.

        For up to `SHARED` tokens, each share of rows has a sum of its own, and these are added in their order.

        Parallel: chunks by ticket, each owns a block of `dinp`, or of a share's sum; then chunks of `dinp`.
        Memory: a panel, and a block of dout if there are few tokens or a chunk of dinp, for each thread; the sums of
        shares.
        Bound: compute; for few tokens, the memory that weight streams through.
        """
        x, rest = words(dout, parts)
        backward_input(dinp, dinp_add, x, weight, panels, rest, queue)

    @by_epilogue(ops.matmul_backward_weight, "optimized", of=of, scratch=products.weight_scratch, skips=["dweight"])
    def matmul_backward_weight(epilogue):
        """Pack the columns of the tokens, then strips of dout's columns times all panels.

        Parallel: packing by panel; then chunks by ticket, each owns rows of the gradient, or of the weight and its
        states.
        Memory: the packed tokens; for each thread a strip of dout, and one of the gradient if a step is taken from it.
        Bound: compute; for few tokens, the memory of the gradient, or of weight and states.
        """
        return products.backward_weight(epilogue)


for products in PRODUCTS:
    register(products)
