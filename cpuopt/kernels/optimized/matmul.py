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

So a large `weight` streams from memory once; its next block is prefetched during the current tile.

Work is cut into chunks that threads take by ticket, each first of its own share. An element is summed by one thread,
over k in order, in blocks whose length depends on the shape alone. For few tokens an element of dinp is the sum of
parts, whose number depends on the shape alone too. So chunks and threads change no bit.

The forward is in ``_forward.py``, dinp in ``_backward_input.py``.

Source: Goto and van de Geijn 2008 and BLIS for blocks and packing; what is packed for which shape is our own.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.blocks import PACKED, add_columns, ceil, even, largest, multiply_by, padded, piece, pieces, up
from ..toolkit.constants import ZERO
from ..toolkit.lanes import load, load_some, spread, store, store_some
from ..toolkit.micro import MicroKernel
from ..toolkit.micro.blocking import COLUMNS, LINE, PACKED_ROWS, SHARED, THIN, THIN_DEPTH
from ..toolkit.micro.records import MICRO_KERNELS
from ..toolkit.queue import QUEUE, deal, for_each_thread, take
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import LANES, MR, NR, at, prefetch, put_place, transpose
from ._backward_input import input_by, packed_floats, share_floats
from ._forward import FORWARD_SCRATCH, forward_by, prefers_by

LISTED = SHARED // 2  # to fetch while a group is multiplied: one for every second of at most SHARED tokens


def weight_parts(micro):
    """List where the parts of a thread's scratch of a weight's gradient end, in floats.

    They are a block of dout, with a square in which tiles are transposed; the bias's gradient and a tile; lists of
    places.
    """
    block = micro.weight_depth * micro.outputs + LANES * LANES
    spare = block + micro.outputs * (1 + NR)
    return block, spare, spare + 2 * LISTED * -(-micro.outputs // MR)


def pack_outputs_by(micro):
    """Make the function that packs columns of dout for a strip of a weight's gradient."""
    lay, one, group, most = micro.lay, micro.one, micro.group, micro.rows

    @helper()
    def pack_outputs(block, dout, m, depth, n0, rows):
        """Pack columns by groups: block[lo * depth + k * n + i] = word of dout[m + k * group, n0 + lo + i].

        Whole vectors are written; what is too much of one is overwritten by the next.
        """
        groups = ceil(rows, most)
        size, longer = rows // groups, rows % groups
        safe = depth - ceil(LANES, size) - group + 1  # beyond, a whole vector could end outside of the group or of dout
        for first in range(0, depth, PACKED_ROWS):
            last, lo = min(first + PACKED_ROWS, depth), 0
            for g in range(groups):
                n = size + 1 if g < longer else size
                column, to = n0 + lo, lo * depth
                for k in range(first, min(last, safe)):
                    for i in range(0, n, LANES):
                        lay(block, to + k * n + i, dout, m + k * group, column + i)
                for k in range(max(first, safe), last):
                    for i in range(n):
                        block[to + k * n + i] = one(dout, m + k * group, column + i)
                lo += n

    @helper()
    def pack_tiles(block, dout, m, depth, n0, rows):
        """Pack columns as rows: block[i * padded(depth) + k] = word of dout[m + k * group, n0 + i].

        Whole squares are written, and the last ones end in words that no product reads. Behind the rows lies the square
        in which columns are gathered; in a thin product that is the panel, which is packed later.
        """
        apart = padded(depth)
        square, columns = block[apart * ceil(rows, LANES) * LANES :], dout.shape[1] - n0
        for i in range(0, rows, LANES):
            for first in range(0, depth, LANES):
                for k in range(first, min(first + LANES, depth)):
                    if i + LANES <= columns:
                        lay(square, (k - first) * LANES, dout, m + k * group, n0 + i)
                    else:
                        for j in range(columns - i):
                            square[(k - first) * LANES + j] = one(dout, m + k * group, n0 + i + j)
                transpose(at(block, i * apart + first), apart, at(square, 0), LANES)

    return pack_tiles if micro.tiled else pack_outputs


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
    group, lines, most_rows, multiply = micro.group, micro.lines, micro.rows, multiply_by(micro, micro.wide)
    before, (block_end, spare_end, _) = micro.outputs, weight_parts(micro)
    multiply_ahead = multiply_by(micro, micro.listed) if micro.listed else multiply

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
            groups = ceil(rows, most_rows)
            tile, places = spare[before:], spare[spare_end - block_end :]
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
                        fetch = at(places, 0), 2 * LISTED, 0, 0
                        multiply_ahead(rows, x, PACKED, b, NR, out, line, depth, adds, fetch)
                    else:
                        fetch = at(b, length), length // groups, 2 * ceil(NR, groups) * lines, 0
                        multiply(rows, x, PACKED, b, NR, out, line, depth, adds, fetch)
                    if not inside:
                        add_columns(grad, row, c, tile, rows, adding)

        return weight_chunk

    return of


def thin_by(micro, pack_outputs):
    """Make the function of columns of a thin product."""
    multiply, pack, group, lines = multiply_by(micro, micro.wide), micro.pack, micro.group, micro.lines
    most_rows = micro.rows

    @helper()
    def thin_chunk(to, few, many, mine, c0, c1):
        """Compute few' many[:, c0:c1] in these columns of `to`; a panel is packed when its turn comes."""
        M, (R, C), many_row = few.shape[0], to.shape, many.shape[1]
        groups = ceil(R, most_rows)
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
                ahead = at(many, m * many_row + c + NR if c + NR < c1 else (m + depth * group) * many_row + c0)
                a, b, fetch = at(block, 0), at(panel, 0), (ahead, depth // groups * many_row, many_row, shift)
                multiply(R, a, PACKED, b, NR, target, row, depth, m > 0 and inside, fetch)
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


def weight_floats_by(micro, steps):
    """Make the function that counts the floats of a thread's scratch of a weight's gradient of C columns.

    If an optimizer's step is taken, a strip of the gradient stays there until then.
    """
    scratch, strip, rows = weight_parts(micro)[-1], micro.strip if steps else 0, micro.rows if steps else 0
    most = micro.outputs if micro.tiled else strip  # a strip for tiles is no longer than its rows are

    @helper()
    def weight_floats(C):
        return scratch + max(min(strip, most * C), rows * C)

    return weight_floats


def weight_by(micro):
    """Make the weight's gradient as a function of the epilogue.

    If that takes an optimizer's step, a strip of the gradient stays in the cache until its weights are updated.
    """
    pack_outputs, pack, group, lines = pack_outputs_by(micro), micro.pack, micro.group, micro.lines
    weight_chunk, thin_chunk = weight_chunk_by(micro, pack_outputs), thin_by(micro, pack_outputs)
    least, unit_rows, most_rows, most_strip = micro.rows, micro.unit, micro.outputs, micro.strip
    most_depth, block_unit = micro.weight_depth * group, group * micro.unit
    block_end, _, scratch = weight_parts(micro)

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
        count_floats = weight_floats_by(micro, steps)

        @helper(parallel=True)
        def linear_weight(to, dout, inp, panels, blocks, queue):
            M, N, C = inp.shape[0], rows(to), to[0].shape[1]  # of a frozen weight, C = 0
            depth, thin = even(M, most_depth, block_unit), is_thin(M, N, C) and N * C <= panels.shape[0]
            most, unit, size = most_rows, LANES, count_floats(C)
            if steps:
                most, unit = min(most_rows, max(least, most_strip // C) // unit_rows * unit_rows), unit_rows
            threads = blocks.shape[0] // size
            begin(to)
            whole = panels[: N * C if thin else 0].reshape(min(N, C) if thin else 0, max(N, C))
            if thin:
                few, many = (dout, inp) if N < C else (inp, dout)
                chunks = pieces(max(N, C), COLUMNS, NR, 1, threads)
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
                block, spare, own = mine[:block_end], mine[block_end:scratch], mine[scratch:]
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
            M, C, N = s["BT"], s["C"], up(s["OC"], self.micro.group)
            return share_floats(M, C, N) + packed_floats(self.micro, M, C, N) + self.micro.room((M, s["OC"]))

        return [("panels", for_each_thread(self.input_floats)), ("parts", parts), QUEUE]

    def weight_scratch(self, steps):
        """List the scratch of a weight's gradient; a thin one lies where the panels would."""
        group, lines, floats = self.micro.group, self.micro.lines, weight_floats_by(self.micro, steps).py_func

        def panels(s):
            thin = is_thin.py_func(s["BT"], s["OC"], s["C"])
            return max(-(-s["BT"] // group) * lines * up(s["C"], NR), s["OC"] * s["C"] if thin else 0)

        return [("panels", panels), ("blocks", for_each_thread(lambda s: floats(s["C"]))), QUEUE]


def products_by(micro):
    """Make the products of a linear layer."""
    words, prefers = micro.words, prefers_by(micro)

    @helper()
    def operands(x, y, room):
        x_words, rest = words(x, room)
        y_words, _ = words(y, rest)
        return x_words, y_words

    return Products(micro, prefers, *forward_by(micro, prefers), operands, *input_by(micro), weight_by(micro))


PRODUCTS = tuple(map(products_by, MICRO_KERNELS.values()))


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
