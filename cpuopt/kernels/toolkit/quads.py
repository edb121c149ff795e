"""Words of four int8, and the product of rows of them with a panel, in integers.

A word holds four neighbours along the summed axis. The rows that are read in place hold signed bytes, and a panel holds
unsigned ones, each 128 more than the int8 that it stands for: so the instruction wants it. What is too much of a sum is
128 times the sum of the row, which `row_offset` computes. Sums wrap at 2^32, so the difference is exact.

Vectors and panels are typed as float32, and their bits are those of words or of int32.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..compile.jit import helper
from ..compile.storage import full, like
from .constants import ZERO
from .lanes import FLOATS, INT, INTS, Lanes, spread, vector
from .rounding import Rounded
from .simd import BYTE, F32, HOST, I16, I32, I64, LANES, MR, Emit, product_of
from .simd import FLOATS as POINTER

WORD = 4
FLIP = 0x80808080
"""What turns signed bytes into unsigned ones that are 128 larger, by an exclusive or."""
BYTES, WIDE = ir.VectorType(BYTE, LANES), ir.VectorType(I16, 2 * LANES)
SUM = 3 << 22
"""1.5 * 2^23: adding it to a float32 leaves the nearest integer in the lowest bits."""
MIDDLE, LEAST, LARGEST = 128.0, 1.0, 255.5


def add_quads(emit, x, y, z):
    """Emit z plus the products of the unsigned bytes of x and the signed bytes of y, four in each word."""
    if emit.tile.quads:
        return emit.tile.quads(emit, x, y, z)
    bld, total = emit.builder, emit.builder.bitcast(z, INTS)
    x, y = (bld.bitcast(v, WIDE) for v in (x, y))
    eight, products = full(WIDE, 8), ir.VectorType(I32, 2 * LANES)
    odd = bld.lshr(x, eight), bld.ashr(y, eight)
    even = bld.and_(x, full(WIDE, 0xFF)), bld.ashr(bld.shl(y, eight), eight)
    halves = [ir.Constant(ir.VectorType(I32, LANES), list(range(n, 2 * LANES, 2))) for n in (0, 1)]
    for pair in even, odd:
        both = bld.mul(*(bld.sext(part, products) for part in pair))
        total = bld.add(total, bld.add(*(bld.shuffle_vector(both, both, half) for half in halves)))
    return bld.bitcast(total, emit.vector)


class QuadEmit(Emit):
    """Emitter of the product whose words are four bytes: signed of the rows, unsigned of the panel."""

    def multiply_add(self, x, y, z):
        """Compute z plus the products of words."""
        return add_quads(self, y, x, z)

    def total(self, x, y):
        """Add two vectors of sums, which are integers."""
        bld = self.builder
        return bld.bitcast(bld.add(bld.bitcast(x, INTS), bld.bitcast(y, INTS)), self.vector)


class Quads(NamedTuple):
    """What multiplies words of four int8.

    Attributes
    ----------
    instruction : its name.
    unit, rows : the rows of a whole product, and the most of a call of `wide` or `narrow`.
    wide, narrow : ``(rows, a, row, b, line, c, c_row, depth, add, fetch)``, as `blocks.multiply_by` makes them: all
        columns of a panel, and one vector of them.
    chain, flops : as those of a `MicroKernel`.
    """

    instruction: str
    unit: int
    rows: int
    wide: Any
    narrow: Any
    chain: Any = None
    flops: int = 0


def rows_by(vectors: int):
    """Make the product of up to MR rows with some vectors of a panel's columns."""
    product = product_of(vectors, emit=QuadEmit)

    @helper(forceinline=True)
    def multiply(rows, a, row, b, line, c, c_row, depth, add, fetch):
        ahead, _, step, shift = fetch
        product(rows, a, row, 1, b, line, c, c_row, depth, add, (ahead, step, shift))

    return multiply


VECTORS = Quads("vpdpbusd" if HOST.quads else "products of 16 bits", MR, MR, rows_by(HOST.vectors), rows_by(1))


def flipped(builder, x):
    """Emit the unsigned bytes of signed ones."""
    return builder.xor(x, full(x.type, FLIP))


def place(emit, array, kind, i):
    """Point to the i-th byte of an array."""
    return emit.at(emit.context.make_array(kind)(emit.context, emit.builder, array).data, i, BYTE)


@intrinsic
def pack_square(typingctx, to, to_row, x, i, x_row):
    """Write a square of words of int8 x transposed and unsigned: LANES rows, `x_row` bytes apart, from byte i on."""

    def codegen(context, builder, signature, args):
        emit, (to, to_row, x, i, x_row) = Lanes(context, builder), args
        at = place(emit, x, signature.args[2], i)
        rows = [emit.load(emit.at(at, emit.times(x_row, n), BYTE), INTS, 1) for n in range(LANES)]
        square = emit.transpose([builder.bitcast(flipped(builder, row), FLOATS) for row in rows])
        for n, row in enumerate(square):
            emit.store(row, emit.at(to, emit.times(to_row, n)))
        return context.get_dummy_value()

    return types.void(POINTER, INT, x, INT, INT), codegen


@intrinsic
def pack_columns(typingctx, to, x, i, x_row):
    """Write a vector of words, unsigned, of four rows of int8 x, `x_row` bytes apart, from byte i on."""

    def codegen(context, builder, signature, args):
        emit, (to, x, i, x_row) = Lanes(context, builder), args
        at, words = place(emit, x, signature.args[1], i), full(INTS, 0)
        for n in range(WORD):
            row = builder.zext(emit.load(emit.at(at, emit.times(x_row, n), BYTE), BYTES, 1), INTS)
            words = builder.or_(words, builder.shl(row, full(INTS, 8 * n)))
        emit.store(flipped(builder, words), to)
        return context.get_dummy_value()

    return types.void(POINTER, x, INT, INT), codegen


@intrinsic
def load_quads(typingctx, x, i):
    """Load the words from byte i of x on."""

    def codegen(context, builder, signature, args):
        emit = Lanes(context, builder)
        return emit.load(place(emit, args[0], signature.args[0], args[1]), align=1)

    return vector(x, INT), codegen


@intrinsic
def load_end(typingctx, x, i, n):
    """Load the words of the n bytes from byte i of x on, of LANES words or fewer; what is beyond is zero."""

    def codegen(context, builder, signature, args):
        (x, i, n), emit = args, Lanes(context, builder)
        at, count = place(emit, x, signature.args[0], i), WORD * LANES
        kind = ir.VectorType(BYTE, count)
        none = ir.Constant(ir.VectorType(I16, count), ir.Undefined)
        every = builder.insert_element(none, builder.trunc(n, I16), I32(0))
        every = builder.shuffle_vector(every, none, ir.Constant(ir.VectorType(I32, count), None))
        mask = builder.icmp_signed("<", ir.Constant(every.type, list(range(count))), every)
        found = emit.call(f"llvm.masked.load.v{count}i8.p0", kind, at, I32(1), mask, ir.Constant(kind, None))
        return builder.bitcast(found, FLOATS)

    return vector(x, INT, INT), codegen


@intrinsic
def unsigned(typingctx, x):
    """Add 128 to each signed byte."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(flipped(builder, builder.bitcast(args[0], INTS)), FLOATS)

    return vector(vector), codegen


@intrinsic
def multiply_add(typingctx, x, y, z):
    """Add the products of the unsigned bytes of x and the signed ones of y to the int32 z."""

    def codegen(context, builder, signature, args):
        return add_quads(Lanes(context, builder), *args)

    return vector(vector, vector, vector), codegen


@intrinsic
def total(typingctx, x):
    """Add all lanes as int32."""

    def codegen(context, builder, signature, args):
        emit = Lanes(context, builder)
        return emit.call(f"llvm.vector.reduce.add.v{LANES}i32", I32, builder.bitcast(args[0], INTS))

    return types.int32(vector), codegen


@intrinsic
def number(typingctx, x, offset, scale, more):
    """Convert int32 less `offset` to float32, times `scale`, plus `more`, one or a vector; each is rounded by itself.

    The sum must not be allowed to be contracted: on aarch64, LLVM asks only the sum, and not the product in it.
    """
    kind = vector if x == vector else types.float32

    def codegen(context, builder, signature, args):
        x, offset, scale, more = args
        if kind == vector:
            emit = Lanes(context, builder)
            x, offset = builder.bitcast(x, INTS), builder.bitcast(emit.spread(builder.bitcast(offset, F32)), INTS)
        return builder.fadd(builder.fmul(builder.sitofp(builder.sub(x, offset), like(x, F32)), scale), more)

    return kind(x, types.int32, kind, kind), codegen


# Rows to int8 ---------------------------------------------------------------------------------------------------------


@intrinsic
def larger_size(typingctx, most, x):
    """Take the larger magnitude in each lane; NaN counts as larger than infinity."""

    def codegen(context, builder, signature, args):
        sizes = [builder.and_(builder.bitcast(v, INTS), full(INTS, 0x7FFFFFFF)) for v in args]
        return builder.bitcast(builder.select(builder.icmp_unsigned(">", *sizes), *sizes), FLOATS)

    return vector(vector, vector), codegen


@intrinsic
def largest(typingctx, x):
    """Take the largest of all lanes, which are magnitudes."""

    def codegen(context, builder, signature, args):
        name, x = f"llvm.vector.reduce.umax.v{LANES}i32", builder.bitcast(args[0], INTS)
        return builder.bitcast(Lanes(context, builder).call(name, I32, x), F32)

    return types.float32(vector), codegen


def put_bytes(context, builder, kind, array, i, x):
    """Store the lowest bytes of the lanes of x as the bytes from the i-th on."""
    emit = Lanes(context, builder)
    emit.store(builder.trunc(x, BYTES), place(emit, array, kind, i), 1)
    return context.get_dummy_value()


@intrinsic
def put_nearest(typingctx, q, i, x, factor):
    """Store ``x * factor`` as int8 from the i-th byte of q on, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        q, i, x, factor = args
        scaled = builder.fmul(x, Lanes(context, builder).spread(factor))
        x = builder.bitcast(builder.fadd(scaled, full(FLOATS, float(SUM))), INTS)
        return put_bytes(context, builder, signature.args[0], q, i, x)

    return types.void(q, INT, vector, types.float32), codegen


@intrinsic
def put_drawn(typingctx, q, i, x, factor, draw, index):
    """Store ``x * factor`` as int8 from the i-th byte of q on, rounded at random by the words of `index` and so on."""

    def codegen(context, builder, signature, args):
        (q, i, x, factor, draw, index), emit = args, Lanes(context, builder)

        def every(bits):
            return builder.bitcast(emit.spread(builder.bitcast(builder.trunc(bits, I32), F32)), INTS)

        lanes = builder.add(every(index), ir.Constant(INTS, list(range(LANES))))
        word = Rounded.random_word(builder, lanes, every(draw), every(builder.lshr(draw, I64(32))))
        u = builder.fmul(builder.uitofp(builder.and_(word, full(INTS, 0xFFFF)), FLOATS), full(FLOATS, 2.0**-16))
        x = builder.fmul(x, emit.spread(factor))
        x = builder.fadd(x, builder.fadd(u, full(FLOATS, MIDDLE)))
        for sign, end in (">", LEAST), ("<", LARGEST):
            x = builder.select(builder.fcmp_ordered(sign, x, full(FLOATS, end)), x, full(FLOATS, end))
        x = builder.sub(builder.fptosi(x, INTS), full(INTS, int(MIDDLE)))
        return put_bytes(context, builder, signature.args[0], q, i, x)

    return types.void(q, INT, vector, types.float32, INT, INT), codegen


@helper()
def row_offset(q, i, width):
    """Sum 128 times the bytes of a row of `width` bytes, from the i-th on."""
    ones, sums = unsigned(spread(ZERO)), spread(ZERO)
    for k in range(0, width, WORD * LANES):
        sums = multiply_add(ones, load_quads(q, i + k), sums)
    return total(sums)
