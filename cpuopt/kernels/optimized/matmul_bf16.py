"""Matrix products of bfloat16: the loops of ``matmul`` on words of two neighbours along the summed axis.

========  ===================================  =====================================================================
          broadcast side                       vector side, in panels
========  ===================================  =====================================================================
forward   rows of `weight`, in place           words of NR tokens of `inp`, transposed once
dinp      tokens of `dout`, in place           rows n and n + 1 of `weight`, interleaved when their turn comes
dweight   columns of `dout`, tokens t and      tokens t and t + 1 of `inp`, interleaved once
          t + 1 interleaved, a strip at a time
========  ===================================  =====================================================================

Rows of an odd number of elements are packed first. Sums are float32; one that becomes a bfloat16 is rounded once, when
all of it is there.
"""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import CHUNK
from ..toolkit.lanes import store_some
from ..toolkit.pairs import floats, is_half, load_pair, narrow, pack_pairs, pack_rows, pair, put, words
from ..toolkit.queue import QUEUE, deal, for_each_thread, take
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import (
    LANES,
    LINE,
    MR,
    NR,
    PER_WORD,
    at,
    listed_pair_product,
    narrow_pair_product,
    pair_product,
    transpose_words,
)
from .matmul import (
    ALIASED,
    COLUMNS,
    FORWARD,
    INPUT_DEPTH,
    INPUT_ROWS,
    PACKED_ROWS,
    WEIGHT_DEPTH,
    add_columns,
    add_parts,
    ceil,
    count_groups,
    count_shares,
    even,
    forward_by,
    multiply_by,
    pack_tokens_by,
    piece,
    pieces,
    place,
    prefers_tokens,
    share_floats,
    thin_by,
    token_pieces,
    up,
    weight_by,
    weight_chunk_by,
    weight_panels,
    weight_scratch,
)

HALF = "bfloat16"
multiply, multiply_narrow = multiply_by(pair_product), multiply_by(narrow_pair_product)
pack_tokens = pack_tokens_by(put, transpose_words, PER_WORD)


@helper()
def prefers_word_tokens(M, K, N):
    """Return whether a forward of words packs the weight: not if rows of the result share their places in L1.

    Writing a tile of sums to such rows takes as long as for floats, but its product takes half the time.
    """
    return prefers_tokens(M, K, N) and N % (ALIASED // 2) > 0


linear, add_linear = forward_by(multiply, multiply_narrow, pack_tokens, PER_WORD, prefers_word_tokens)
CHUNK_SUMS = INPUT_ROWS * up(COLUMNS, NR)  # of a chunk of dinp, which is rounded when it is done
INPUT_SPARE = INPUT_ROWS * NR
INPUT_SCRATCH = INPUT_SPARE + INPUT_DEPTH * NR * PER_WORD + CHUNK_SUMS


def odd_rows(*rows):
    """Size the words of rows along C, if these have to be packed."""
    return lambda s: sum(s[r] for r in rows) * (s["C"] // 2 + 1) if s["C"] % 2 else 0


@helper(parallel=True)
def as_words(x, room):
    """View rows as words, or pack them into `room` if they have an odd number of elements."""
    R, K = x.shape
    if K % 2 == 0:
        return words(x)
    packed = room[: R * (K // 2 + 1)].reshape(R, K // 2 + 1)
    for i in prange(R):
        pack_rows(packed, x, i, i + 1)
    return packed


@helper()
def linear_bf16(out, inp, weight, bias, panels, sums, queue, rows):
    """Compute a linear layer; `rows` is memory for packed rows."""
    x = as_words(inp, rows)
    w = as_words(weight, rows[x.size if inp.shape[1] % 2 > 0 else 0 :])
    linear(out, x, w, bias, panels, sums, queue)


def word_rows(M, K, N):
    """Count the rows in the panels of a forward of M tokens."""
    return up(N if prefers_word_tokens.py_func(M, -(-K // 2), N) else M, NR)


def word_panels(M, K, N):
    """Count the floats of the panels of a forward of M tokens."""
    return word_rows(M, K, N) * -(-K // 2) * PER_WORD


FORWARD_BF16 = [
    ("panels", lambda s: word_panels(s["BT"], s["C"], s["OC"])),
    *FORWARD[1:],
    ("rows", odd_rows("BT", "OC")),
]
"""Scratch of a linear layer."""


@kernel(ops.matmul_forward, "optimized", of=HALF, scratch=FORWARD_BF16, parallel=False)
def matmul_forward(out, inp, weight, bias, panels, sums, queue, rows):
    """Pack the tokens, then strips of rows of weight times all panels; for many tokens the other way round.

    Parallel: packing by panel and slice; then chunks by ticket, each owns a block of `out`.
    Memory: the packed tokens, or the packed weight; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear_bf16(out, inp, weight, bias, panels, sums, queue, rows)


@helper()
def input_chunk(to, row, column, add, dout, weight, mine, m0, m1, c0, c1, n0, n1, most):
    """Compute tokens m0..m1 and columns c0..c1 of dinp, of the words n0..n1 of dout, at [row, column] of `to`."""
    N, C, W = dout.shape[1], weight.shape[1], to.shape[1]
    rows = m1 - m0
    groups = count_groups(rows, N)
    tile, panel = mine, mine[INPUT_SPARE:]
    shift = 0  # so that the groups together fetch one panel
    while groups >> (shift + 2):
        shift += 1
    size = even(n1 - n0, most, 2)
    for n in range(n0, n1, size):
        depth = min(size, n1 - n)
        adding = add or n > n0
        a = at(dout, m0 * N + n)
        for c in range(c0, c1, NR):
            pack_pairs(panel, NR, weight, 2 * n, c, min(NR, C - c), depth)
            inside = column + c - c0 + NR <= W
            edge = (row * W) + column + c - c0
            target, target_row = (at(to, edge), W) if inside else (at(tile, 0), NR)
            ahead = at(weight, 2 * n * C + c + NR if c + NR < c1 else 2 * (n + depth) * C + c0)
            b, step = at(panel, 0), depth // groups * C
            if C - c > LANES:
                multiply(rows, a, N, b, NR, target, target_row, depth, adding and inside, ahead, step, C, shift)
            else:
                multiply_narrow(rows, a, N, b, NR, target, target_row, depth, adding and inside, ahead, step, C, shift)
            if not inside:
                add_columns(to, row, column + c - c0, tile, rows, adding)


@helper(parallel=True)
def linear_input(dinp, add, dout, weight, panels, parts, queue):
    """Compute dinp of the words of dout, a whole one for each two rows of weight."""
    M, C = dinp.shape
    N = dout.shape[1]
    threads = panels.shape[0] // INPUT_SCRATCH
    shares = count_shares(M, 2 * N) if parts.shape[0] > 0 else 1
    m_chunks = token_pieces(M, INPUT_ROWS, threads)
    c_chunks = pieces(C, COLUMNS, NR, shares * m_chunks, threads)
    chunks, by_tokens = m_chunks * c_chunks, prefers_tokens(M, C, N)
    rounded = is_half(dinp)
    deal(queue, shares * chunks)
    for t in prange(threads):
        mine = panels[t * INPUT_SCRATCH : (t + 1) * INPUT_SCRATCH]
        sums = mine[INPUT_SCRATCH - CHUNK_SUMS :]
        chunk = take(queue, t)
        while chunk >= 0:
            part, (m, c) = chunk // chunks, place(chunk % chunks, m_chunks, c_chunks, by_tokens)
            m0, m1 = piece(m, m_chunks, M, LINE), piece(m + 1, m_chunks, M, LINE)
            c0, c1 = piece(c, c_chunks, C, NR), piece(c + 1, c_chunks, C, NR)
            n0, n1 = piece(part, shares, N, 1), piece(part + 1, shares, N, 1)
            if shares > 1:
                to = parts[part * M * C : (part + 1) * M * C].reshape(M, C)
                input_chunk(to, m0, c0, False, dout, weight, mine, m0, m1, c0, c1, n0, n1, INPUT_DEPTH)
            elif rounded:
                wide = ceil(c1 - c0, NR) * NR
                to = sums[: (m1 - m0) * wide].reshape(m1 - m0, wide)
                input_chunk(to, 0, 0, False, dout, weight, mine, m0, m1, c0, c1, n0, n1, INPUT_DEPTH)
                for i in range(m1 - m0):
                    narrow(dinp, (m0 + i) * C + c0, sums, i * wide, c1 - c0, add)
            else:
                direct = floats(dinp)
                input_chunk(direct, m0, c0, add, dout, weight, mine, m0, m1, c0, c1, n0, n1, INPUT_DEPTH)
            chunk = take(queue, t)
    if shares > 1:
        for i in prange(ceil(M * C, CHUNK)):
            add_parts(dinp, add, parts, shares, i * CHUNK, min(M * C, i * CHUNK + CHUNK))


INPUT_BF16 = [
    ("panels", for_each_thread(INPUT_SCRATCH)),
    ("parts", lambda s: share_floats(s["BT"], s["C"], up(s["OC"], 2))),
    QUEUE,
    ("rows", lambda s: s["BT"] * (s["OC"] // 2 + 1) if s["OC"] % 2 else 0),
]
"""Scratch of a linear layer's gradient of its input."""


@kernel(ops.matmul_backward_input, "optimized", of=HALF, scratch=INPUT_BF16, parallel=False)
def matmul_backward_input(dinp, dinp_add, dout, weight, panels, parts, queue, rows):
    """Blocks of tokens times panels of weight's columns, two rows of weight interleaved; a block of rows at a time.

    For up to `SHARED` tokens, each share of rows has a sum of its own, and these are added in their order.

    Parallel: chunks by ticket, each owns a block of `dinp`, or of a share's sum; then chunks of `dinp`.
    Memory: a panel and a chunk of dinp for each thread; the sums of shares.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    linear_input(dinp, dinp_add, as_words(dout, rows), weight, panels, parts, queue)


@helper()
def pack_outputs(block, dout, m, depth, n0, rows):
    """Pack columns of two tokens by groups of up to MR: block[lo * depth + k * n + i] = dout[m + 2 k.., n0 + lo + i].

    Whole vectors are written; what is too much of one is overwritten by the next.
    """
    M, N = dout.shape
    groups = ceil(rows, MR)
    size, longer = rows // groups, rows % groups
    safe = depth - ceil(LANES, size) - 1  # from here on, a whole vector could end outside of the group or of dout
    for first in range(0, depth, PACKED_ROWS):
        last, lo = min(first + PACKED_ROWS, depth), 0
        for g in range(groups):
            n = size + 1 if g < longer else size
            x, to = m * N + n0 + lo, lo * depth
            for k in range(first, min(last, safe)):
                for i in range(0, n, LANES):
                    store_pair(block, to + k * n + i, dout, x + 2 * k * N + i, x + (2 * k + 1) * N + i)
            for k in range(max(first, safe), last):
                odd = m + 2 * k + 1 < M
                for i in range(n):
                    at_odd = x + (2 * k + 1) * N + i if odd else -1
                    block[to + k * n + i] = pair(dout, x + 2 * k * N + i, at_odd)
            lo += n


@helper()
def store_pair(block, to, x, i, j):
    """Store a vector of words."""
    store_some(block, to, load_pair(x, i, j), LANES)


@helper()
def pack_some(panel, x, row, column, depth):
    """Pack up to NR columns of two times `depth` tokens."""
    pack_pairs(panel, NR, x, row, column, min(NR, x.shape[1] - column), depth)


weight_chunk = weight_chunk_by(multiply, pack_outputs, 2, PER_WORD, multiply_by(listed_pair_product))
thin_chunk = thin_by(multiply, pack_outputs, pack_some, 2, PER_WORD)


@helper()
def pack_panel(i, panels, inp, depth):
    """Pack the i-th panel of NR columns and `depth` tokens."""
    M, C = inp.shape
    columns = ceil(C, NR)
    m, c = i // columns * depth, i % columns * NR
    n = ceil(min(depth, M - m), 2)
    pack_pairs(panels[(m // 2 * columns * NR + c * n) * PER_WORD :], NR, inp, m, c, min(NR, C - c), n)


def weight_bf16(steps):
    """List the scratch of the weight's gradient."""
    return [("panels", lambda s: weight_panels(s, up(s["BT"], 2) // 2 * PER_WORD)), *weight_scratch(steps)[1:]]


linear_weight = weight_by(pack_panel, weight_chunk, thin_chunk, 2 * WEIGHT_DEPTH, 2)


@by_epilogue(ops.matmul_backward_weight, "optimized", of=HALF, scratch=weight_bf16, skips=["dweight"])
def matmul_backward_weight(epilogue):
    """Pack the columns of the tokens, two tokens interleaved, then strips of dout's columns times all panels.

    Parallel: packing by panel; then chunks by ticket, each owns rows of the gradient, or of the weight and its states.
    Memory: the packed tokens; for each thread a strip of dout, and one of the gradient if a step is taken from it.
    Bound: compute; for few tokens, the memory of the gradient, or of weight and states.
    """
    return linear_weight(epilogue)
