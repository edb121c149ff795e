"""Products of bfloat16 and int8 on Intel's AMX: registers of 16 rows of 64 bytes, and instructions that multiply them.

A tile of a has 16 words of 16 rows, one of b 16 lines of 16 words, as panels have them. ``tdpbf16ps`` adds the products
of 32 neighbours along k to a sum c in an order of its own, which is the order ``amx``::

    e, o = +0, +0
    for each word:  e = fma(a_even, b_even, e);  o = fma(a_odd, b_odd, o)
    c = c + (e + o)

each rounded to nearest even, with subnormal numbers taken and given as zero. The last tile of a row may have fewer
words. So this module may cut a sum into blocks of whole tiles, and it has the same bits. `model` computes it on any
machine.

Tiles are numbered by hand: 0 to 3 are sums, 4 and 5 rows of a, 6 and 7 columns of b. So LLVM has none to spill. Their
shapes are set for many products at once, since that takes longer than a product of tiles.

``tdpbsud`` adds the products of signed bytes of a and unsigned ones of b: those of ``quads``, with the same bits.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: TDPBF16PS, TDPBSUD, LDTILECFG. A Xeon of
family 6, model 207, gave the bits of this order in a million products of tiles, with special numbers among them.
"""

from dataclasses import replace

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ....compile.jit import helper
from ...blocks import PACKED, padded
from ...pairs import interleave_words, put_words
from ...quads import Quads
from ...simd import BYTE, F32, FETCH, FLOATS, HOST, I16, I64, INT, LANES, NR, Emit, at, transpose
from .. import host, targets
from ..blocking import TILED_DEPTH, TILED_OUTPUTS, TILED_STRIP, TILED_TALL
from ..generic import PAIRS, pack_pairs_by
from . import proof

SIDE = 16  # rows of a tile, and words or floats of a row
ROWS = 2 * SIDE  # of a product: two tiles of rows and two of columns need four loads for four products
WIDTH = 4 * SIDE  # bytes of a row
DEPTH = 128  # words of k at a time: their part of a panel and that of 32 rows are 16 KB of L1 each
FLOPS = 8 * 4 * SIDE**3  # of bfloat16, of eight products of tiles; of int8 there are twice as many
FLOATS_BY, QUADS_BY = "tdpbf16ps", "tdpbsud"
FEATURES = targets.AVX512 | targets.AMX


def proved() -> proof.Proof | None:
    """Return whether AMX may be used and why; None where numba does not compile for it, or for another's vectors."""
    return proof.found() if targets.chosen() is None and FEATURES <= host.there() else None


HERE = proved() is not None and proof.found().use
"""Whether products are computed by the tiles, and not by their model."""
INTEGERS = "amx-int8" in host.there()
EMULATED = not HERE and host.order() == "amx"


class Tiles:
    """Emitter of instructions of AMX."""

    def __init__(self, builder) -> None:
        self.emit, self.builder = Emit(builder, HOST), builder

    def call(self, name, *args):
        """Emit an instruction; an int is the number of a tile."""
        args = [ir.Constant(BYTE, x) if isinstance(x, int) else x for x in args]
        kind = ir.FunctionType(ir.VoidType(), [x.type for x in args])
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}"), args)

    def configure(self, rows, words):
        """Set the shapes of the tiles for products of some rows, each of some words of k."""
        bld, emit = self.builder, self.emit
        memory = cgutils.alloca_once(bld, ir.ArrayType(BYTE, WIDTH))
        base = bld.bitcast(memory, ir.PointerType(BYTE))
        bld.store(ir.Constant(memory.type.pointee, None), memory)
        bld.store(BYTE(1), base)  # the palette
        tall = bld.icmp_unsigned(">", rows, I64(SIDE))
        above = bld.select(tall, I64(SIDE), rows)
        below = bld.select(tall, bld.sub(rows, I64(SIDE)), rows)  # not used if there are none
        wide = emit.times(words, 4)
        shapes = [(above, I64(WIDTH))] * 2 + [(below, I64(WIDTH))] * 2
        shapes += [(above, wide), (below, wide)] + [(words, I64(WIDTH))] * 2
        for n, (some, size) in enumerate(shapes):
            bld.store(bld.trunc(size, I16), bld.bitcast(emit.at(base, 16 + 2 * n, BYTE), I16.as_pointer()))
            bld.store(bld.trunc(some, BYTE), emit.at(base, 48 + n, BYTE))
        self.call("ldtilecfg", base)

    def release(self):
        """Return the tiles to the processor."""
        self.call("tilerelease")

    def product(self, by, tall, vectors, a, row, b, line, c, c_row, depth, add, fetch):
        """Emit the product, by an instruction, of some rows, more than 16 if `tall`, with some vectors of columns."""
        bld, emit = self.builder, self.emit
        row, line, c_row = (emit.times(x, 4) for x in (row, line, c_row))

        def place(base, stride, rows, floats=0):
            rows = emit.at(base, bld.mul(stride, rows), BYTE)
            return bld.bitcast(emit.at(rows, floats), ir.PointerType(BYTE))

        sums = [(2 * i + j, place(c, c_row, I64(SIDE * i), SIDE * j)) for i in range(1 + tall) for j in range(vectors)]
        with bld.if_else(add) as (adding, writing):
            with adding:
                for tile, where in sums:
                    self.call("tileloadd64", tile, where, c_row)
            with writing:
                for tile, _ in sums:
                    self.call("tilezero", tile)
        with cgutils.for_range(bld, bld.udiv(bld.add(depth, I64(SIDE - 1)), I64(SIDE))) as loop:
            self.fetch(loop.index, *fetch)
            word = emit.times(loop.index, SIDE)
            rows = [emit.at(place(a, row, I64(SIDE * i)), emit.times(word, 4), BYTE) for i in range(1 + tall)]
            for j in range(vectors):  # each tile right before its first product
                for i in range(1 + tall):
                    if j == 0:
                        self.call("tileloadd64", 4 + i, rows[i], row)
                    if i == 0:
                        self.call("tileloadd64", 6 + j, place(b, line, word, SIDE * j), line)
                    self.call(by, 2 * i + j, 4 + i, 6 + j)
        for tile, where in sums:
            self.call("tilestored64", tile, where, c_row)

    def fetch(self, number, ahead, step, shift):
        """Fetch what comes next: for every second k two lines, in rows that will be packed as words."""
        bld, every = self.builder, I64(SIDE // 2)
        half, first = bld.lshr(step, I64(1)), bld.lshr(bld.mul(number, every), shift)
        with cgutils.for_range(bld, bld.lshr(every, shift)) as rounds:
            place = self.emit.at(ahead, bld.mul(bld.add(first, rounds.index), step))
            self.emit.prefetch(place)
            self.emit.prefetch(self.emit.at(place, half))


def model(builder, vectors, rows, a, row, b, line, c, c_row, depth, add):
    """Emit the same sums by multiply-adds, but for subnormal numbers: for machines without AMX, and for tests."""
    emit, zero = Emit(builder, HOST), ir.Constant(ir.VectorType(F32, LANES), None)
    tiles = builder.udiv(builder.add(depth, I64(SIDE - 1)), I64(SIDE))
    fence = f"llvm.arithmetic.fence.v{LANES}f32"  # LLVM would fuse these sums with the products before
    with cgutils.for_range(builder, rows) as i:
        for j in range(vectors):
            sums = emit.at(c, builder.add(builder.mul(i.index, c_row), I64(j * LANES)))
            x, y = emit.at(a, builder.mul(i.index, row)), emit.at(b, j * LANES)

            def tile(number, total, x=x, y=y):
                first = emit.times(number, SIDE)
                left = builder.sub(depth, first)
                words = builder.select(builder.icmp_unsigned("<", left, I64(SIDE)), left, I64(SIDE))

                def word(k, even, odd):
                    k = builder.add(first, k)
                    factors = emit.spread(emit.load(emit.at(x, k), F32)), emit.load(emit.at(y, builder.mul(k, line)))
                    return [emit.multiply_add(*(emit.half(f, o) for f in factors), s) for o, s in ((0, even), (1, odd))]

                even, odd = emit.loop(words, [zero, zero], word)
                both = builder.fadd(*(emit.call(fence, zero.type, x) for x in (even, odd)))
                return [builder.fadd(total, emit.call(fence, zero.type, both))]

            (total,) = emit.loop(tiles, [builder.select(add, emit.load(sums), zero)], tile)
            emit.store(total, sums)


def multiply_of(vectors: int, tiles: bool = HERE, by: str = FLOATS_BY):
    """Make the product of rows with one panel, of `vectors` vectors of columns: on AMX, or by its `model`.

    Its arguments are those of the function of `blocks.multiply_by`; packed rows lie `padded` words apart.
    """

    @intrinsic
    def configure(typingctx, rows, words):
        """Set the shapes of the tiles."""

        def codegen(context, builder, signature, args):
            if tiles:
                Tiles(builder).configure(*args)
            return context.get_dummy_value()

        return types.void(INT, INT), codegen

    @intrinsic
    def release(typingctx):
        """Return the tiles to the processor."""

        def codegen(context, builder, signature, args):
            if tiles:
                Tiles(builder).release()
            return context.get_dummy_value()

        return types.void(), codegen

    @intrinsic
    def product(typingctx, rows, a, row, b, line, c, c_row, depth, add, fetch):
        """Multiply `rows` <= ROWS rows of a with a panel of b; `depth` is whole tiles of k, or less than one."""

        def codegen(context, builder, signature, args):
            rows, *args, fetch = args
            if not tiles:
                model(builder, vectors, rows, *args)
                return context.get_dummy_value()
            with builder.if_else(builder.icmp_unsigned(">", rows, I64(SIDE))) as branches:
                for branch, tall in zip(branches, (True, False), strict=True):
                    with branch:
                        Tiles(builder).product(by, tall, vectors, *args, cgutils.unpack_tuple(builder, fetch))
            return context.get_dummy_value()

        where = FLOATS, INT, FLOATS, INT, FLOATS, INT
        return types.void(INT, *where, INT, types.boolean, FETCH), codegen

    @helper()
    def multiply(rows, a, row, b, line, c, c_row, depth, add, fetch):
        ahead, ahead_group, step, shift = fetch
        apart, whole = padded(depth) if row == PACKED else row, depth // SIDE * SIDE
        full = rows // ROWS * ROWS
        for first, last in ((0, full), (full, rows)):  # groups of one size, so that tiles are set once
            n = min(ROWS, last - first)
            if n == 0:
                continue
            for k in range(0, depth, DEPTH):
                words = min(DEPTH, whole - k)
                if k == 0 and whole > 0:
                    configure(n, SIDE)
                for i in range(first, last if words > 0 else first, ROWS):
                    x = at(ahead, i // ROWS * ahead_group + (k // 2 >> shift) * step)
                    rest, to = at(a, i * apart + k), at(c, i * c_row)
                    product(n, rest, apart, at(b, k * line), line, to, c_row, words, add or k > 0, (x, step, shift))
            if whole < depth:
                configure(n, depth - whole)
                for i in range(first, last, ROWS):
                    rest, to = at(a, i * apart + whole), at(c, i * c_row)
                    end, left = at(b, whole * line), depth - whole
                    product(n, rest, apart, end, line, to, c_row, left, add or whole > 0, (ahead, 0, 0))
        release()

    return multiply


def chain_of(by: str):
    """Make the function that multiplies tiles by an instruction, for its peak."""

    @intrinsic
    def chain(typingctx, x, rounds):
        """Multiply tiles of 1 KB at x, again and again: eight products a round, four of which are independent."""

        def codegen(context, builder, signature, args):
            tiles, base = Tiles(builder), builder.bitcast(args[0], ir.PointerType(BYTE))
            tiles.configure(I64(ROWS), I64(SIDE))
            for tile in range(8):
                tiles.call("tileloadd64", tile, base, I64(WIDTH))
            with cgutils.for_range(builder, args[1]):
                for tile in (0, 1, 2, 3) * 2:
                    tiles.call(by, tile, 4 + tile // 2, 6 + tile % 2)
            tiles.release()
            return context.get_dummy_value()

        return types.void(FLOATS, INT), codegen

    return chain


TILES = replace(
    PAIRS,
    name="amx",
    features=FEATURES,
    instruction="multiply-adds" if EMULATED else FLOATS_BY,
    order="amx",
    lines=1,
    rows=ROWS,
    columns=NR if EMULATED else 2 * SIDE,
    unit=SIDE,
    tall=TILED_TALL,
    weight_depth=TILED_DEPTH,
    outputs=TILED_OUTPUTS,
    strip=TILED_STRIP,
    wide=multiply_of(NR // LANES),
    narrow=multiply_of(1),
    listed=None,
    put=put_words,
    transpose=transpose,
    pack=pack_pairs_by(put_words, interleave_words, 1),
    allowed=HERE or targets.chosen() is not None or EMULATED,  # whose order they have
    emulated=EMULATED,
    chain=None if EMULATED else chain_of(FLOATS_BY),
    flops=0 if EMULATED else FLOPS,
)
RECORDS = (TILES,)


def quads() -> Quads:
    """Return the product of words of four int8 on AMX, whose sums are exact."""
    wide, narrow = (multiply_of(n, tiles=True, by=QUADS_BY) for n in (NR // LANES, 1))
    return Quads(QUADS_BY, ROWS, 4 * ROWS, wide, narrow, chain_of(QUADS_BY), 2 * FLOPS)


QUADS = quads() if HERE and INTEGERS else None
