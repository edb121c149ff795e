"""Matrix products on the micro-kernel of ``simd``: one side broadcast as it lies, the other packed into panels.

A panel is NR neighbouring columns for each k, so the micro-kernel reads it in order. What is packed:

- **forward** ``out = inp . weight^T``: `inp`, the small operand, transposed into panels of NR tokens. `weight` is the
  broadcast side, rows walked along k, read from memory once. Tiles come out transposed: they are gathered in a strip of
  scratch and written to `out` with the bias.
- **dinp** ``dout . weight``: `weight` is the vector side, columns copied into a panel where enough tokens share it; for
  few tokens it is used as it lies and `dout` is packed.
- **dweight** ``dout^T . inp``: `inp` is packed into panels once; columns of `dout` are packed a strip at a time.

Work is cut into chunks that threads take by ticket, so none waits for the last. An element's sum runs over k in blocks
whose length depends on the shape alone: chunks and threads change no bit.
"""

import numba
import numpy as np
from numba import prange

from ... import ops
from ..jit import helper, kernel
from ..simd import LANES, MR, NR, at, copy, move, prefetch, product, ticket, transpose

ZERO = np.float32(0)
LINE = 16  # floats in a cache line
PACKED = 0  # as a row stride: the rows of a group lie interleaved
DEPTH = 1024  # most k of a forward block: a panel of 64 KB stays in L2 beside the rows of weight
WIDE = 256  # tokens of a forward chunk: with TALL, a strip of sums of 48 KB
TALL = 48  # rows of weight in a chunk, a multiple of the usual MR
SLICE = 128  # k of a packing task
FEW = 24  # tokens up to which weight is used as it lies: packing a panel would cost more than it saves
INPUT_ROWS = 256  # tokens of a dinp chunk
INPUT_DEPTH = 768  # most rows of weight in a dinp block: the panel is 48 KB
COLUMNS = 8 * NR  # columns of dinp in a chunk
WEIGHT_DEPTH = 512  # most tokens of a dweight block: NR columns of inp are 32 KB, the strip of dout 96 KB
FORWARD_SCRATCH = WIDE * TALL + TALL
INPUT_SPARE = INPUT_ROWS * NR
INPUT_SCRATCH = INPUT_SPARE + INPUT_DEPTH * NR + INPUT_DEPTH * FEW
WEIGHT_BLOCK = WEIGHT_DEPTH * TALL
WEIGHT_SCRATCH = WEIGHT_BLOCK + NR * TALL


def up(n, step):
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step


def each(floats):
    """Scratch for each thread that numba can start; a kernel finds their number from the length."""
    return lambda sizes: numba.config.NUMBA_NUM_THREADS * floats


@helper()
def ceil(n, step):
    """Count the steps of `step` that cover `n`."""
    return (n + step - 1) // step


@helper()
def chunk_size(total, most, unit, others, threads):
    """Largest size of chunk, halved while there are fewer than four for each thread."""
    size = most
    while size > unit and ceil(total, size) * others < 4 * threads:
        size = ceil(size // 2, unit) * unit
    return size


@helper()
def blocks_of(total, most):
    """Cut `total` into blocks of equal length, whole cache lines, of about `most`."""
    return ceil(ceil(total, ceil(total, most)), LINE) * LINE


@helper()
def multiply(rows, a, row, b, line, c, c_row, depth, add, ahead, ahead_group, ahead_step, shift):
    """Multiply rows of a, in even groups of at most MR, with one panel; what comes next is fetched ahead."""
    groups = ceil(rows, MR)
    size, longer = rows // groups, rows % groups
    lo = 0
    for g in range(groups):
        n = size + 1 if g < longer else size
        start, r, s = (lo * depth, 1, n) if row == PACKED else (lo * row, row, 1)
        product(
            n,
            at(a, start),
            r,
            s,
            b,
            line,
            at(c, lo * c_row),
            c_row,
            depth,
            add,
            at(ahead, g * ahead_group),
            ahead_step,
            shift,
        )
        lo += n


@helper()
def pack_tokens(panels, x, row, lo, hi):
    """panels[row * C + k * NR + j] = x[row + j, k]."""
    n = min(NR, x.shape[0] - row)
    C = x.shape[1]
    base = row * C
    full = lo
    zero = panels.shape[0] - NR
    if n == NR:
        full = lo + (hi - lo) // LANES * LANES
        for j in range(0, NR, LANES):
            for k in range(lo, full, LANES):
                transpose(at(panels, base + k * NR + j), NR, at(x, (row + j) * C + k), C, at(panels, zero))
    for k in range(full, hi):
        for j in range(NR):
            panels[base + k * NR + j] = x[row + j, k] if j < n else ZERO


@helper()
def forward_chunk(out, weight, bias, panels, sums, m0, m1, n0, n1, depth_most):
    """Give out[m0:m1, n0:n1]: tiles into the strip `sums`, then transposed to `out` with the bias."""
    N, K = weight.shape
    rows = n1 - n0
    groups = ceil(rows, MR)
    for k in range(0, K, depth_most):
        depth = min(depth_most, K - k)
        for m in range(m0, m1, NR):
            a = at(weight, n0 * K + k)
            b = m * K + k * NR
            if m == m0:
                ahead, ahead_group, ahead_step = at(a, MR * K), MR * K, 2 * MR
            else:
                ahead, ahead_group, ahead_step = at(panels, b + NR * K), depth * NR // groups, 2 * ceil(NR, groups)
            multiply(
                rows,
                a,
                K,
                at(panels, b),
                NR,
                at(sums, (m - m0) * TALL),
                NR,
                depth,
                k > 0,
                ahead,
                ahead_group,
                ahead_step,
                0,
            )
    extra = WIDE * TALL
    for i in range(TALL):
        sums[extra + i] = bias[n0 + i] if i < rows and bias.shape[0] > 0 else ZERO
    for m in range(m0, m1, NR):
        base = (m - m0) * TALL
        full = rows // LANES * LANES if m + NR <= m1 else 0
        for n in range(0, full, LANES):
            for j in range(0, NR, LANES):
                transpose(at(out, (m + j) * N + n0 + n), N, at(sums, base + n * NR + j), NR, at(sums, extra + n))
        for j in range(min(NR, m1 - m)):
            for n in range(full, rows):
                out[m + j, n0 + n] = sums[base + n * NR + j] + sums[extra + n]


@kernel(
    ops.matmul_forward,
    "optimized",
    scratch=[("panels", lambda s: up(s["BT"], NR) * s["C"] + NR), ("sums", each(FORWARD_SCRATCH)), ("queue", LINE)],
)
def matmul_forward(out, inp, weight, bias, panels, sums, queue):
    """Pack the tokens, then strips of rows of weight times all panels.

    Parallel: packing by panel and slice; then chunks by ticket, each owns a block of `out`.
    Memory: the packed tokens; a strip of sums for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    M, K = inp.shape
    N = weight.shape[0]
    threads = sums.shape[0] // FORWARD_SCRATCH
    for i in range(NR):
        panels[panels.shape[0] - NR + i] = ZERO
    queue[0] = ZERO
    slices = ceil(K, SLICE)
    for i in prange(ceil(M, NR) * slices):
        p, s = i // slices, i % slices
        pack_tokens(panels, inp, p * NR, s * SLICE, min(K, (s + 1) * SLICE))
    depth = min(K, 4096) if M <= NR else blocks_of(K, DEPTH)
    m_blocks = ceil(M, WIDE)
    tall = chunk_size(N, TALL, MR, m_blocks, threads)
    chunks = ceil(N, tall) * m_blocks
    for t in prange(threads):
        mine = sums[t * FORWARD_SCRATCH : (t + 1) * FORWARD_SCRATCH]
        chunk = ticket(queue)
        while chunk < chunks:
            m0, n0 = chunk % m_blocks * WIDE, chunk // m_blocks * tall
            forward_chunk(out, weight, bias, panels, mine, m0, min(M, m0 + WIDE), n0, min(N, n0 + tall), depth)
            chunk = ticket(queue)


@helper()
def add_columns(dst, row, column, src, rows, width, add):
    """Write or add the first `width` columns of a tile in scratch: the edge that a whole tile would pass."""
    for i in range(rows):
        for j in range(width):
            x = src[i * NR + j]
            dst[row + i, column + j] = dst[row + i, column + j] + x if add else x


@helper()
def pack_columns(panel, x, row, column, depth):
    """panel[k, j] = x[row + k, column + j]."""
    C = x.shape[1]
    if column + NR <= C:
        copy(at(panel, 0), NR, at(x, row * C + column), C, depth)
    else:
        for k in range(depth):
            for j in range(NR):
                panel[k * NR + j] = x[row + k, column + j] if column + j < C else ZERO


@helper()
def pack_lines(block, x, row, column, rows, depth):
    """block[i, k] = x[row + i, column + k]."""
    C = x.shape[1]
    full = depth // LANES * LANES
    for i in range(rows):
        for k in range(0, full, LANES):
            move(at(block, i * depth + k), at(x, (row + i) * C + column + k))
        for k in range(full, depth):
            block[i * depth + k] = x[row + i, column + k]


@helper()
def input_chunk(dinp, add, dout, weight, mine, m0, m1, c0, c1, depth_most):
    """Give dinp[m0:m1, c0:c1]."""
    N, C = weight.shape
    rows = m1 - m0
    groups = ceil(rows, MR)
    few = rows <= FEW
    spare = mine[:INPUT_SPARE]
    panel = mine[INPUT_SPARE:]
    block = mine[INPUT_SPARE + NR * INPUT_DEPTH :]
    shift = 0
    while groups >> (shift + 2):
        shift += 1
    for n in range(0, N, depth_most):
        depth = min(depth_most, N - n)
        adding = add or n > 0
        a, a_row = at(dout, m0 * N + n), N
        if few:
            pack_lines(block, dout, m0, n, rows, depth)
            a, a_row = at(block, 0), depth
        for c in range(c0, c1, NR):
            b, line = at(weight, n * C + c), C
            inside = c + NR <= C
            if not few or not inside:
                pack_columns(panel, weight, n, c, depth)
                b, line = at(panel, 0), NR
            d, d_row = at(dinp, m0 * C + c), C
            if not inside:
                d, d_row = at(spare, 0), NR
            ahead = at(weight, n * C + c + NR if c + NR < c1 else (n + depth) * C + c0)
            multiply(rows, a, a_row, b, line, d, d_row, depth, adding and inside, ahead, depth // groups * C, C, shift)
            if not inside:
                add_columns(dinp, m0, c, spare, rows, C - c, adding)


@kernel(ops.matmul_backward_input, "optimized", scratch=[("panels", each(INPUT_SCRATCH)), ("queue", LINE)])
def matmul_backward_input(dinp, dinp_add, dout, weight, panels, queue):
    """Blocks of tokens times panels of weight's columns; the rows of weight are summed a block at a time.

    Parallel: chunks by ticket, each owns a block of `dinp`.
    Memory: a panel, and a block of dout where there are few tokens, for each thread.
    Bound: compute; for few tokens, the memory that weight streams through.
    """
    M, C = dinp.shape
    queue[0] = ZERO
    threads = panels.shape[0] // INPUT_SCRATCH
    m_blocks = ceil(M, INPUT_ROWS)
    depth = 192 if M <= 128 else INPUT_DEPTH
    wide = chunk_size(C, 2 * COLUMNS if M <= FEW else COLUMNS, NR, m_blocks, threads)
    chunks = m_blocks * ceil(C, wide)
    for t in prange(threads):
        mine = panels[t * INPUT_SCRATCH : (t + 1) * INPUT_SCRATCH]
        chunk = ticket(queue)
        while chunk < chunks:
            m0, c0 = chunk % m_blocks * INPUT_ROWS, chunk // m_blocks * wide
            input_chunk(dinp, dinp_add, dout, weight, mine, m0, min(M, m0 + INPUT_ROWS), c0, min(C, c0 + wide), depth)
            chunk = ticket(queue)


@helper()
def pack_outputs(block, dout, m, depth, n0, rows):
    """Groups of w columns of dout: block[lo * depth + k * w + i] = dout[m + k, n0 + lo + i]."""
    N = dout.shape[1]
    groups = ceil(rows, MR)
    size, longer = rows // groups, rows % groups
    safe = depth - ceil(LANES, size)
    for k in range(depth):
        lo = 0
        x = (m + k) * N + n0
        if k < safe:
            for g in range(groups):
                n = size + 1 if g < longer else size
                for i in range(0, n, LANES):
                    move(at(block, lo * depth + k * n + i), at(dout, x + lo + i))
                lo += n
        else:
            for g in range(groups):
                n = size + 1 if g < longer else size
                for i in range(n):
                    block[lo * depth + k * n + i] = dout[m + k, n0 + lo + i]
                lo += n


@helper()
def weight_chunk(grad, row, add, dout, panels, block, spare, n0, n1, tall, depth_most):
    """Give rows n0..n1 of the weight's gradient in rows `row`.. of `grad`, and of the bias's in `spare`."""
    M, N = dout.shape
    C = grad.shape[1]
    P = ceil(C, NR) * NR
    rows = n1 - n0
    groups = ceil(rows, MR)
    for m in range(0, M, depth_most):
        depth = min(depth_most, M - m)
        pack_outputs(block, dout, m, depth, n0, rows)
        adding = add or m > 0
        lines = ceil(tall, LINE) * depth
        next_m, next_n = (m + depth, n0) if m + depth < M else (0, n1)
        done = 0
        for c in range(0, C, NR):
            todo = lines * (c + NR) // P  # of the next strip of dout, fetched ahead
            while done < todo:
                prefetch(at(dout, (next_m + done % depth) * N + next_n + done // depth * LINE))
                done += 1
            b = at(panels, m * P + c * depth)
            inside = c + NR <= C
            g, g_row = (at(grad, row * C + c), C) if inside else (at(spare, 0), NR)
            multiply(
                rows,
                at(block, 0),
                PACKED,
                b,
                NR,
                g,
                g_row,
                depth,
                adding and inside,
                at(b, depth * NR),
                depth * NR // groups,
                2 * ceil(NR, groups),
                0,
            )
            if not inside:
                add_columns(grad, row, c, spare, rows, C - c, adding)
    for i in range(rows):
        spare[i] = ZERO
    for m in range(M):
        for i in range(rows):
            spare[i] += dout[m, n0 + i]


@helper()
def pack_all_columns(i, panels, inp, depth):
    """Pack the i-th panel of NR columns and `depth` tokens."""
    M, C = inp.shape
    P = ceil(C, NR) * NR
    columns = P // NR
    m, c = i // columns * depth, i % columns * NR
    d = min(depth, M - m)
    pack_columns(panels[m * P + c * d : m * P + (c + NR) * d], inp, m, c, d)


@kernel(
    ops.matmul_backward_weight,
    "optimized",
    scratch=[("panels", lambda s: s["BT"] * up(s["C"], NR)), ("blocks", each(WEIGHT_SCRATCH)), ("queue", LINE)],
)
def matmul_backward_weight(dweight, dweight_add, dbias, dbias_add, dout, inp, panels, blocks, queue):
    """Pack the columns of the tokens, then strips of dout's columns times all panels.

    Parallel: packing by panel; then chunks by ticket, each owns rows of `dweight` and `dbias`.
    Memory: the packed tokens; a strip of dout for each thread.
    Bound: compute; for few tokens, the memory that dweight is written to.
    """
    M, C = inp.shape
    N = dout.shape[1]
    queue[0] = ZERO
    threads = blocks.shape[0] // WEIGHT_SCRATCH
    depth = min(M, WEIGHT_DEPTH)
    for i in prange(ceil(C, NR) * ceil(M, depth)):
        pack_all_columns(i, panels, inp, depth)
    tall = chunk_size(N, TALL, MR, 1, threads)
    chunks = ceil(N, tall)
    for t in prange(threads):
        mine = blocks[t * WEIGHT_SCRATCH : (t + 1) * WEIGHT_SCRATCH]
        block, spare = mine[:WEIGHT_BLOCK], mine[WEIGHT_BLOCK:]
        chunk = ticket(queue)
        while chunk < chunks:
            n0, n1 = chunk * tall, min(N, chunk * tall + tall)
            weight_chunk(dweight, n0, dweight_add, dout, panels, block, spare, n0, n1, tall, depth)
            if dbias.shape[0] > 0:
                for i in range(n1 - n0):
                    dbias[n0 + i] = dbias[n0 + i] + spare[i] if dbias_add else spare[i]
            chunk = ticket(queue)
