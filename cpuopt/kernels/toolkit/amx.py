"""Products of bfloat16 on Intel's AMX: registers of 16 rows of 64 bytes, and an instruction that multiplies them.

A tile of a has 16 words of 16 rows, one of b 16 lines of 16 words, as panels have them. ``tdpbf16ps`` adds the products
of 32 neighbours along k to a sum c in an order of its own, which is the order ``amx`` of ``micro``::

    e, o = +0, +0
    for each word:  e = fma(a_even, b_even, e);  o = fma(a_odd, b_odd, o)
    c = c + (e + o)

each rounded to nearest even, with subnormal numbers taken and given as zero. The last tile of a row may have fewer
words. So a sum may be cut into blocks of whole tiles, and has the same bits. `model` computes it on any machine.

Tiles are numbered by hand: 0 to 3 are sums, 4 and 5 rows of a, 6 and 7 columns of b. So LLVM has none to spill.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and LDTILECFG.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import BYTE, F32, FLOATS, HOST, I16, I64, INT, LANES, Emit

SIDE = 16  # rows of a tile, and words or floats of a row
ROWS = 2 * SIDE  # of a product: two tiles of rows and two of columns need four loads for four products
WIDTH = 4 * SIDE  # bytes of a row


class Tiles:
    """Emitter of one product on AMX; the arguments are those of the intrinsic `product` of ``simd``."""

    def __init__(self, builder, vectors, rows, a, row, step, b, line, c, c_row, depth, add, ahead, ahead_step, shift):
        self.emit, self.builder = Emit(builder, HOST), builder
        self.vectors, self.rows, self.a, self.b, self.c, self.add = vectors, rows, a, b, c, add
        self.row, self.line, self.c_row = (self.emit.times(x, 4) for x in (row, line, c_row))
        self.ahead, self.ahead_step, self.shift = ahead, ahead_step, shift
        self.depth = depth
        self.config = cgutils.alloca_once(builder, ir.ArrayType(BYTE, WIDTH))

    def call(self, name, *args):
        """Call an intrinsic that returns nothing; an int is the number of a tile."""
        args = [ir.Constant(BYTE, x) if isinstance(x, int) else x for x in args]
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), [x.type for x in args]), f"llvm.x86.{name}"
        )
        self.builder.call(function, args)

    def place(self, base, stride, rows, floats=0):
        """Point some rows and floats further, as bytes."""
        place = self.emit.at(base, self.builder.mul(stride, I64(rows) if isinstance(rows, int) else rows), BYTE)
        return self.builder.bitcast(self.emit.at(place, floats), ir.PointerType(BYTE))

    def configure(self, tall, words):
        """Set the tiles for some words of k, and for the rows beyond the first 16 if there are any."""
        bld, base = self.builder, self.builder.bitcast(self.config, ir.PointerType(BYTE))
        bld.store(ir.Constant(ir.ArrayType(BYTE, WIDTH), None), self.config)
        bld.store(BYTE(1), base)  # the palette
        below = bld.sub(self.rows, I64(SIDE)) if tall else self.rows
        above = I64(SIDE) if tall else self.rows
        wide = bld.mul(words, I64(4))
        shapes = [(above, I64(WIDTH))] * 2 + [(below, I64(WIDTH))] * 2
        shapes += [(above, wide), (below, wide)] + [(words, I64(WIDTH))] * 2
        for n, (rows, size) in enumerate(shapes):
            bld.store(bld.trunc(size, I16), bld.bitcast(self.emit.at(base, 16 + 2 * n, BYTE), I16.as_pointer()))
            bld.store(bld.trunc(rows, BYTE), self.emit.at(base, 48 + n, BYTE))
        self.call("ldtilecfg", base)

    def sums(self, tall, act):
        """Call ``act(tile, place)`` for each tile of sums."""
        for i in range(1 + tall):
            for j in range(self.vectors):
                act(2 * i + j, self.place(self.c, self.c_row, SIDE * i, SIDE * j))

    def begin(self, add, tall):
        """Load the sums, or begin with zeros."""
        with self.builder.if_else(add) as (adding, writing):
            with adding:
                self.sums(tall, lambda tile, place: self.call("tileloadd64", tile, place, self.c_row))
            with writing:
                self.sums(tall, lambda tile, place: self.call("tilezero", tile))

    def end(self, tall):
        """Store the sums."""
        self.sums(tall, lambda tile, place: self.call("tilestored64", tile, place, self.c_row))

    def step(self, tall, number):
        """Add the products of one tile of k."""
        word = self.emit.times(number, SIDE)
        for j in range(self.vectors):
            self.call("tileloadd64", 6 + j, self.place(self.b, self.line, word, SIDE * j), self.line)
        for i in range(1 + tall):
            a = self.emit.at(self.place(self.a, self.row, SIDE * i), self.emit.times(word, 4), BYTE)
            self.call("tileloadd64", 4 + i, a, self.row)
            for j in range(self.vectors):
                self.call("tdpbf16ps", 2 * i + j, 4 + i, 6 + j)

    def fetch(self, number):
        """Fetch what comes next: for every second k two lines, in rows that will be packed as words."""
        bld, half = self.builder, self.builder.lshr(self.ahead_step, I64(1))
        for n in range(SIDE // 2):
            rounds = bld.lshr(bld.add(self.emit.times(number, SIDE // 2), I64(n)), self.shift)
            place = self.emit.at(self.ahead, bld.mul(rounds, self.ahead_step))
            self.emit.prefetch(place)
            self.emit.prefetch(self.emit.at(place, half))

    def product(self, tall):
        """Emit the product: whole tiles of k, then what is left."""
        bld = self.builder
        whole, left = bld.udiv(self.depth, I64(SIDE)), bld.urem(self.depth, I64(SIDE))
        some, rest = (bld.icmp_unsigned("!=", x, I64(0)) for x in (whole, left))
        with bld.if_then(bld.or_(some, bld.not_(rest))):
            self.configure(tall, I64(SIDE))
            self.begin(self.add, tall)
            with cgutils.for_range(bld, whole) as rounds:
                self.fetch(rounds.index)
                self.step(tall, rounds.index)
            self.end(tall)
        with bld.if_then(rest):
            self.configure(tall, left)
            self.begin(bld.or_(self.add, some), tall)
            self.step(tall, whole)
            self.end(tall)
        self.call("tilerelease")


def model(builder, vectors, rows, a, row, step, b, line, c, c_row, depth, add, ahead, ahead_step, shift):
    """Emit the same sums by multiply-adds, but for subnormal numbers: for machines without AMX, and for tests."""
    emit, zero = Emit(builder, HOST), ir.Constant(ir.VectorType(F32, LANES), None)
    tiles = builder.udiv(builder.add(depth, I64(SIDE - 1)), I64(SIDE))
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
                return [builder.fadd(total, builder.fadd(even, odd))]

            (total,) = emit.loop(tiles, [builder.select(add, emit.load(sums), zero)], tile)
            emit.store(total, sums)


def product_of(vectors: int, tiles: bool = HOST.amx):
    """Make the micro-kernel of `vectors` vectors of columns: on AMX, or by its `model`."""

    @intrinsic
    def product(typingctx, rows, a, row, step, b, line, c, c_row, depth, add, ahead, ahead_step, shift):
        """Multiply `rows` <= ROWS rows of a with a panel of b, and write the tile to c or add to it.

        As that of ``simd``, for rows of words that lie one behind the other: `step` is 1.
        """

        def codegen(context, builder, signature, args):
            if not tiles:
                model(builder, vectors, *args)
                return context.get_dummy_value()
            with builder.if_else(builder.icmp_unsigned(">", args[0], I64(SIDE))) as branches:
                for branch, tall in zip(branches, (True, False), strict=True):
                    with branch:
                        Tiles(builder, vectors, *args).product(tall)
            return context.get_dummy_value()

        where = FLOATS, INT, INT, FLOATS, INT, FLOATS, INT
        return types.void(INT, *where, INT, types.boolean, FLOATS, INT, INT), codegen

    return product
