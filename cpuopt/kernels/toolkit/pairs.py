"""Words of two bfloat16, typed as float32: the operands of `simd.pair_product`, and how they are packed.

A word holds two neighbours along the summed axis, the first in its lower half. A row of an even number of bfloat16 is a
row of words as it lies. If the summed axis runs down the columns, two rows are interleaved. Packing rounds float32 to
nearest even. A panel has `PER_WORD` lines for each line of words, which `put` writes.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from ..compile.jit import helper
from ..compile.numba_internals import populate_array
from ..compile.storage import bfloat16, full
from .lanes import INT, SIZE, Lanes, load, load_some, store, store_some, vector
from .simd import F32, HOST, I16, I32, I64, LANES, LINE, NR, Emit, unit_of


def view_of(dtype, shift):
    """Make the function that views rows as elements of another type, 2^-shift of them for each one."""

    @intrinsic
    def view(typingctx, x):
        """View an array with rows of half, twice or as many elements."""
        result = types.Array(dtype, x.ndim, "C")

        def codegen(context, builder, signature, args):
            old = context.make_array(x)(context, builder, args[0])
            new = context.make_array(result)(context, builder)
            shape, strides = (cgutils.unpack_tuple(builder, of, x.ndim) for of in (old.shape, old.strides))
            if shift:
                move = builder.lshr if shift > 0 else builder.shl
                shape[-1] = move(shape[-1], shape[-1].type(1))
            strides[-1] = strides[-1].type(SIZE[unit_of(result)])
            data = builder.bitcast(old.data, new.data.type)
            populate_array(new, data, shape, strides, strides[-1], old.meminfo, old.parent)
            return impl_ret_borrowed(context, builder, result, new._getvalue())

        return result(x), codegen

    return view


words = view_of(types.float32, 1)
"""View rows of an even number of bfloat16 as rows of words."""
halves = view_of(bfloat16, -1)
"""View rows of words as rows of bfloat16."""
floats = view_of(types.float32, 0)
"""View an array as float32, which it must hold: for code that another type never runs."""


@intrinsic
def is_half(typingctx, x):
    """Return whether an array holds bfloat16, which is known when a kernel is compiled."""
    known = x.dtype == bfloat16
    return types.boolean(x), lambda context, builder, signature, args: context.get_constant(types.boolean, known)


def first_if(half):
    """Make the function that returns the first of two arrays if it is bfloat16, or if it is not; else the second."""

    @intrinsic
    def choose(typingctx, x, y):
        of = int((x.dtype == bfloat16) != half)
        kind = (x, y)[of]
        return kind(x, y), lambda context, builder, sig, args: impl_ret_borrowed(context, builder, kind, args[of])

    return choose


read_of = first_if(half=True)
"""What products read of a weight and its copy."""
sums_of = first_if(half=False)
"""Where the sums of an array are kept: there, or in the room for them."""


def bits_at(emit, kind, place, lanes):
    """Load elements as bfloat16, and widen their bits to words."""
    unit = unit_of(kind)
    found = emit.load(place, ir.VectorType(unit, lanes), 2 if unit is I16 else 4)
    found = bfloat16.narrow(emit.builder, found) if unit is F32 else found
    return emit.builder.zext(found, ir.VectorType(I32, lanes))


def pair_of(lanes, result):
    """Make the function that interleaves two stretches of `lanes` elements."""

    @intrinsic
    def pair(typingctx, x, i, j):
        """Return words of x[i:] and x[j:], whose odd halves are zero where j < 0."""

        def codegen(context, builder, signature, args):
            emit, kind, (array, i, j) = Lanes(context, builder), signature.args[0], args
            there = builder.icmp_signed(">=", j, j.type(0))
            low = bits_at(emit, kind, emit.point(kind, array, i), lanes)
            high = bits_at(emit, kind, emit.point(kind, array, builder.select(there, j, i)), lanes)
            high = builder.select(there, builder.shl(high, full(high.type, 16)), full(high.type, 0))
            word = builder.bitcast(builder.or_(low, high), ir.VectorType(F32, lanes))
            return word if lanes > 1 else builder.extract_element(word, I32(0))

        return result(x, INT, INT), codegen

    return pair


def word_load(some):
    """Make the function that loads a vector of words from neighbours in a row: all of them, or the first n elements."""

    def codegen(context, builder, signature, args):
        emit, kind = Lanes(context, builder), signature.args[0]
        place, halves = emit.point(kind, *args[:2]), ir.VectorType(I16, 2 * LANES)
        if not some:
            return emit.load(place, align=2)
        n = args[2]
        n = builder.select(builder.icmp_signed("<", n, n.type(2 * LANES)), n, n.type(2 * LANES))
        none = ir.Constant(ir.VectorType(I16, 2 * LANES), ir.Undefined)
        n = builder.insert_element(none, builder.trunc(n, I16), I32(0))
        n = builder.shuffle_vector(n, none, ir.Constant(ir.VectorType(I32, 2 * LANES), None))
        mask = builder.icmp_signed("<", ir.Constant(halves, list(range(2 * LANES))), n)
        name = f"llvm.masked.load.v{2 * LANES}i16.p0"
        found = emit.call(name, halves, place, I32(2), mask, ir.Constant(halves, None))
        return builder.bitcast(found, ir.VectorType(F32, LANES))

    return codegen


@intrinsic
def load_words(typingctx, x, i):
    """Load the words of x[i : i + 2 * LANES], which is bfloat16."""
    return vector(x, INT), word_load(some=False)


@intrinsic
def load_some_words(typingctx, x, i, n):
    """Load the words of x[i : i + n], which is bfloat16; what is beyond is zero."""
    return vector(x, INT, INT), word_load(some=True)


def rounder_of(tile):
    """Make the function of a machine that rounds two vectors to bfloat16."""

    @intrinsic
    def rounded(typingctx, x, y):
        """Round x and y to bfloat16: the elements of x, then those of y, as one vector."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(Emit(builder, tile).rounded(*args), ir.VectorType(F32, LANES))

        return vector(vector, vector), codegen

    return rounded


@intrinsic
def interleaved(typingctx, both):
    """Make words of what `rounded` returned: x in the lower halves, y in the upper ones."""

    def codegen(context, builder, signature, args):
        shorts = builder.bitcast(args[0], ir.VectorType(I16, 2 * LANES))
        order = [n for lane in range(LANES) for n in (lane, lane + LANES)]
        mixed = builder.shuffle_vector(shorts, shorts, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
        return builder.bitcast(mixed, ir.VectorType(F32, LANES))

    return vector(vector), codegen


def half_store(second):
    """Make the function that stores one of the vectors that `rounded` returned, at an offset in floats."""

    @intrinsic
    def store_half(typingctx, x, i, both):
        def codegen(context, builder, signature, args):
            emit = Lanes(context, builder)
            shorts = builder.bitcast(args[2], ir.VectorType(I16, 2 * LANES))
            part = ir.Constant(ir.VectorType(I32, LANES), [n + LANES * second for n in range(LANES)])
            half = builder.shuffle_vector(shorts, shorts, part)
            emit.store(half, emit.point(signature.args[0], *args[:2]))
            return context.get_dummy_value()

        return types.void(x, INT, vector), codegen

    return store_half


store_first, store_second = half_store(False), half_store(True)


@intrinsic
def stream(typingctx, to, i, x, y):
    """Round x and y to bfloat16 and store them behind each other, past the caches; element i begins a line of these."""

    def codegen(context, builder, signature, args):
        emit, (to, i, x, y) = Lanes(context, builder), args
        x, y = (bfloat16.narrow(builder, part) for part in (x, y))
        every = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
        place = emit.point(signature.args[0], to, i)
        stored = emit.store(builder.shuffle_vector(x, y, every), place, align=4 * LANES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(to, INT, vector, vector), codegen


@intrinsic
def begins_line(typingctx, x):
    """Return whether an array begins where a cache line does."""

    def codegen(context, builder, signature, args):
        place = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)
        return builder.icmp_unsigned("==", builder.and_(place, I64(4 * LINE - 1)), I64(0))

    return types.boolean(x), codegen


rounded = rounder_of(HOST)


def put_of(lines):
    """Make the function that writes what `lines` makes of words."""

    @intrinsic
    def put(typingctx, panel, i, line, words):
        """Write a word or a vector of them to a panel, whose lines are `line` floats apart, from offset i on."""

        def codegen(context, builder, signature, args):
            emit, (panel, i, line, words) = Lanes(context, builder), args
            place = emit.point(signature.args[0], panel, i)
            for n, part in enumerate(lines(emit, words)):
                emit.store(part, emit.at(place, emit.times(line, n)))
            return context.get_dummy_value()

        return types.void(panel, INT, INT, words), codegen

    return put


def interleave_of(lines):
    """Make the function that writes what `lines` makes of words of whole rows."""

    @intrinsic
    def interleave(typingctx, panel, i, line, x, first, step, depth):
        """Interleave NR columns of rows 2 k and 2 k + 1 of x for k < depth, from element `first` on, `step` apart.

        A line of a panel is `line` floats; the first begins at offset i.
        """

        def codegen(context, builder, signature, args):
            emit, (panel, i, line, x, first, step, depth) = Lanes(context, builder), args
            kind = signature.args[3]
            with cgutils.for_range(builder, depth) as loop:
                row = builder.add(first, builder.mul(emit.times(loop.index, 2), step))
                for n in range(0, NR, LANES):
                    low, high = (
                        bits_at(emit, kind, emit.at(emit.point(kind, x, at), n, unit_of(kind)), LANES)
                        for at in (row, builder.add(row, step))
                    )
                    word = builder.or_(low, builder.shl(high, full(high.type, 16)))
                    parts = lines(emit, builder.bitcast(word, ir.VectorType(F32, LANES)))
                    to = builder.add(i, builder.mul(emit.times(loop.index, len(parts)), line))
                    for m, part in enumerate(parts):
                        place = builder.add(to, emit.times(line, m))
                        emit.store(part, emit.at(emit.point(signature.args[0], panel, place), n))
            return context.get_dummy_value()

        return types.void(panel, INT, INT, x, INT, INT, INT), codegen

    return interleave


def one_line(emit, words):
    """List words as they are."""
    return [words]


put, put_words = put_of(Emit.lines), put_of(one_line)
interleave, interleave_words = interleave_of(Emit.lines), interleave_of(one_line)


def adder_of(tile):
    """Make the function of a machine that adds the products of words to sums."""

    @intrinsic
    def add_pairs(typingctx, x, y, total):
        """Compute total plus the products of both halves of the words of x and y."""

        def codegen(context, builder, signature, args):
            return Emit(builder, tile).add_pairs(*args)

        return vector(vector, vector, vector), codegen

    return add_pairs


add_pairs = adder_of(HOST)
load_pair, pair = pair_of(LANES, vector), pair_of(1, types.float32)


@helper()
def pack_rows(to, x, lo, hi):
    """to[i, k] = words of x[i, 2 k] and x[i, 2 k + 1] for rows lo to hi."""
    K = x.shape[1]
    for i in range(lo, hi):
        for k in range(0, K - 1, 2):
            to[i, k // 2] = pair(x, i * K + k, i * K + k + 1)
        if K % 2 > 0:
            to[i, K // 2] = pair(x, i * K + K - 1, -1)


@helper()
def narrow(to, i, x, j, n, add):
    """Round n floats from x[j] to elements from to[i], or add them."""
    for k in range(0, n, LANES):
        v = load_some(x, j + k, n - k)
        if n - k >= LANES:
            store(to, i + k, load(to, i + k) + v if add else v)
        else:
            store_some(to, i + k, load_some(to, i + k, n - k) + v if add else v, n - k)
