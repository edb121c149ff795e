"""The forward of a linear layer, as ``matmul`` describes it."""

from numba import prange

from ..compile.jit import helper
from ..toolkit.blocks import (
    add_columns,
    ceil,
    count_groups_by,
    even,
    multiply_columns_by,
    piece,
    pieces,
    place,
    token_pieces,
)
from ..toolkit.constants import ZERO
from ..toolkit.lanes import add_transposed, load, load_some, store, store_some
from ..toolkit.micro.blocking import ALIASED, COLUMNS, DEPTH, INPUT_ROWS, LINE, SLICE, WIDE
from ..toolkit.micro.records import MICRO_KERNELS
from ..toolkit.pairs import is_half, narrow
from ..toolkit.queue import deal, take
from ..toolkit.simd import LANES, NR, at

FORWARD_SCRATCH = max((WIDE + 1) * micro.tall for micro in MICRO_KERNELS.values())


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
def forward_store(out, bias, sums, tall, m0, m1, n0, n1):
    """Compute out[m0:m1, n0:n1], with the bias."""
    N = out.shape[1]
    rows, extra = n1 - n0, WIDE * tall
    for i in range(rows):
        sums[extra + i] = bias[n0 + i] if bias.shape[0] > 0 else ZERO
    for m in range(m0, m1, NR):
        base = (m - m0) * tall
        tokens, full = min(NR, m1 - m), rows // LANES * LANES
        whole = tokens // LANES * LANES
        for n in range(0, full, LANES):
            for j in range(0, whole, LANES):
                add_transposed(out, (m + j) * N + n0 + n, N, sums, base + n * NR + j, NR, sums, extra + n)
        for j in range(tokens):
            for n in range(full if j < whole else 0, rows):
                out[m + j, n0 + n] = sums[base + n * NR + j] + sums[extra + n]


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
    multiply, pack_tokens, lines, tall = multiply_columns_by(micro), pack_tokens_by(micro), micro.lines, micro.tall
    count_groups = count_groups_by(micro)

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
                    ahead, apart, step = at(a, size * K), size * K, 2 * size
                else:  # fetch the next panel, each group a part of it
                    ahead, apart = at(b, K * NR * lines), depth * NR // groups * lines
                    step = 2 * ceil(NR, groups) * lines
                to = at(sums, (m - m0) * tall)
                adding = add or k > 0
                columns = m1 - m
                multiply(columns, n1 - n0, a, K, b, NR, to, NR, depth, adding, (ahead, apart, step, 0))

    @helper()
    def forward_tokens(out, inp, panels, low, more, bias, tile, tokens, outputs, most, add):
        """Compute some tokens and outputs, from the first up to the end, of panels of rows of weight, with the bias.

        Or add to what is there.

        A bfloat16 gets the whole sum, of one block of k, and of the product of `low` with the panels `more` if there
        is one.
        """
        K, N, direct = inp.shape[1], out.shape[1], not is_half(out)
        (m0, m1), (n0, n1) = tokens, outputs
        rows = m1 - m0
        groups = count_groups(rows, K)
        for k in range(0, K, most):
            depth = min(most, K - k)
            for n in range(n0, n1, NR):
                inside = direct and n + NR <= N
                b = at(panels, (n * K + k * NR) * lines)
                to, to_row = (at(out, m0 * N + n), N) if inside else (at(tile, 0), NR)
                ahead, apart = at(b, K * NR * lines), depth * NR // groups * lines
                step = 2 * ceil(NR, groups) * lines
                x, adding, columns = at(inp, m0 * K + k), add or k > 0, N - n
                adds = adding and inside
                multiply(columns, rows, x, K, b, NR, to, to_row, depth, adds, (ahead, apart, step, 0))
                if low.shape[0] > 0:
                    R = low.shape[1]
                    x, b = at(low, m0 * R), at(more, n * R * lines)
                    multiply(columns, rows, x, R, b, NR, to, to_row, R, True, (b, 0, 0, 0))
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
        most, unit = (COLUMNS, NR) if many else (tall, LANES)
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
                    forward_tokens(out, inp, panels, at_once, more, bias, mine, (m0, m1), (n0, n1), depth, False)
                    if two and not is_half(out):
                        none, tokens, outputs = low[:0], (m0, m1), (n0, n1)
                        forward_tokens(out, low, more, none, more, bias[:0], mine, tokens, outputs, depth_two, True)
                else:
                    forward_sums(mine, weight, panels, m0, m1, n0, n1, depth, False)
                    if two:
                        forward_sums(mine, up, more, m0, m1, n0, n1, depth_two, True)
                    forward_store(out, bias, mine, tall, m0, m1, n0, n1)
                chunk = take(queue, t)

    return forward, forward_two
