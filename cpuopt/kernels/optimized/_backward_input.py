"""The gradient of a linear layer's input, as ``matmul`` describes it."""

from numba import prange

from ..compile.jit import helper
from ..toolkit.blocks import (
    PACKED,
    add_columns,
    ceil,
    count_groups_by,
    even,
    multiply_columns_by,
    piece,
    pieces,
    place,
    token_pieces,
    up,
)
from ..toolkit.constants import ZERO
from ..toolkit.elementwise import CHUNK
from ..toolkit.lanes import load_some, spread, store_some
from ..toolkit.micro.blocking import (
    ALIASED,
    COLUMNS,
    INPUT_DEPTH,
    INPUT_ROWS,
    LINE,
    PACKED_ROWS,
    SHARE_ROWS,
    SHARED,
    SHARES,
    SHORT,
)
from ..toolkit.pairs import floats, is_half, narrow
from ..toolkit.queue import deal, take
from ..toolkit.simd import LANES, NR, at

INPUT_SPARE = INPUT_ROWS * NR
CHUNK_SUMS = INPUT_ROWS * -(-COLUMNS // NR) * NR  # of a chunk of dinp that is rounded when it is done


@helper()
def prefers_tokens(M, K, N):
    """Return whether M tokens and their sums have more than twice the floats of the weight.

    A forward then packs the weight in place of the tokens; in forward and dinp, threads share out the tokens.
    """
    return 2 * N * K < M * (K + N)


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


def packed_floats(micro, M, C, N):
    """Count the floats of the panels of N rows of weight, if M tokens are so many that they are packed but once."""
    return up(N, micro.group) // micro.group * up(C, NR) * micro.lines if micro.tiled and M > INPUT_ROWS else 0


def input_by(micro):
    """Make the gradient of a linear layer's input, of the words of dout; and count the scratch of a thread."""
    multiply, pack, group, few, few_depth = (
        multiply_columns_by(micro), micro.pack, micro.group, micro.few, micro.few_depth,
    )  # fmt: skip
    count_groups, share_unit, block_unit = count_groups_by(micro), micro.unit, max(2, micro.unit)
    lines, tiled = micro.lines, micro.tiled
    chunk_sums = CHUNK_SUMS if micro.rounds else 0
    behind_panel = INPUT_SPARE + INPUT_DEPTH * NR * micro.lines
    size = behind_panel + few_depth * few + chunk_sums

    @helper()
    def input_chunk(to, row, column, add, dout, weight, packed, mine, tokens, columns, words, most):
        """Compute tokens and columns of dinp, of some words of dout, at [row, column] of `to`.

        Each of them goes from the first up to the end. `packed` are all panels of the weight, or nothing.
        """
        (R, C), dout_row, W = weight.shape, dout.shape[1], to.shape[1]
        N = ceil(R, group)
        (m0, m1), (c0, c1), (n0, n1) = tokens, columns, words
        rows = m1 - m0
        copied = dout.shape[0] <= few and C % ALIASED > 0
        groups = count_groups(rows, PACKED if copied else dout_row)
        tile, panel, block = mine, mine[INPUT_SPARE:], mine[behind_panel:]
        shift = 0  # so that the groups together fetch one panel
        while groups >> (shift + 2):
            shift += 1
        block_depth = even(n1 - n0, most, block_unit)
        for n in range(n0, n1, block_depth):
            depth = min(block_depth, n1 - n)
            adding = add or n > n0
            a, a_row = at(dout, m0 * dout_row + n), dout_row
            if copied:
                pack_lines(block, dout, m0, n, rows, depth)
                a, a_row = at(block, 0), depth
            for c in range(c0, c1, NR):
                b, line = at(weight, n * C + c), C
                if tiled and packed.shape[0] > 0:
                    b, line = at(packed, (c * N + n * NR) * lines), NR
                elif not (copied and c + NR <= C):
                    pack(panel, weight, group * n, c, depth)
                    b, line = at(panel, 0), NR
                edge = column + c - c0
                inside = edge + NR <= W
                target, target_row = (at(to, row * W + edge), W) if inside else (at(tile, 0), NR)
                if c + NR < c1:
                    ahead = at(weight, group * n * C + c + NR)
                else:  # rows of this share alone: if two caches held those of another, their update would be slow
                    ahead = at(weight, group * (n + depth) * C + c0 if n + depth < n1 else group * n0 * C + c1)
                fetch = ahead, depth // groups * C, C, shift
                if tiled and packed.shape[0] > 0:
                    next_c, next_n = (c + NR, n) if c + NR < c1 else (c0, n + depth)
                    ahead, part = at(packed, (next_c * N + next_n * NR) * lines), depth // groups * NR * lines
                    fetch = ahead, part, 2 * LINE, shift
                adds = adding and inside
                multiply(C - c, rows, a, a_row, b, line, target, target_row, depth, adds, fetch)
                if not inside:
                    add_columns(to, row, edge, tile, rows, adding)

    @helper(parallel=True)
    def backward_input(dinp, add, dout, weight, panels, parts, queue):
        """Compute dinp of the words of dout, a whole one for each `group` rows of weight; rows may have more.

        `parts` has room for the sums of shares or, for more than `SHARED` tokens, for panels of the whole weight.
        """
        M, C = dinp.shape
        N = ceil(weight.shape[0], group)
        threads = panels.shape[0] // size
        shares = count_shares(M, group * N) if parts.shape[0] > 0 else 1
        floats_packed = N * ceil(C, NR) * NR * lines
        packed = parts[: floats_packed if tiled and M > INPUT_ROWS and parts.shape[0] >= floats_packed else 0]
        for i in prange(ceil(N, PACKED_ROWS) if packed.shape[0] > 0 else 0):
            n = i * PACKED_ROWS
            for c in range(0, C, NR):
                pack(packed[(c * N + n * NR) * lines :], weight, group * n, c, min(PACKED_ROWS, N - n))
        depth = few_depth if M <= SHORT else INPUT_DEPTH
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
                m0, m1 = tokens = piece(m, m_chunks, M, LINE), piece(m + 1, m_chunks, M, LINE)
                c0, c1 = columns = piece(c, c_chunks, C, NR), piece(c + 1, c_chunks, C, NR)
                words = piece(part, shares, N, share_unit), piece(part + 1, shares, N, share_unit)
                if shares > 1:
                    to = parts[part * M * C : (part + 1) * M * C].reshape(M, C)
                    input_chunk(to, m0, c0, False, dout, weight, packed, mine, tokens, columns, words, depth)
                elif is_half(dinp):
                    wide = ceil(c1 - c0, NR) * NR
                    to = sums[: (m1 - m0) * wide].reshape(m1 - m0, wide)
                    input_chunk(to, 0, 0, False, dout, weight, packed, mine, tokens, columns, words, depth)
                    for i in range(m1 - m0):
                        narrow(dinp, (m0 + i) * C + c0, sums, i * wide, c1 - c0, add)
                else:
                    input_chunk(floats(dinp), m0, c0, add, dout, weight, packed, mine, tokens, columns, words, depth)
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
