"""Vector code that LLVM would not generate by itself: the micro-kernel of the matrix products, and its packing.

`product` multiplies a few rows of one operand with a panel of the other, and keeps all sums in registers::

    c[i, 0:NR] = or += sum over k of a[i, k] * b[k, 0:NR]          NR = LANES * vectors

``a`` is the *broadcast* side: one float at a time is spread over a vector, so rows and k may lie at any strides.
``b`` is the *vector* side: NR neighbouring floats for each k.

The shape follows from the registers of a machine (``micro``). Nothing else knows a machine: `Emit` writes LLVM's vector
code, which suits them all; ``benchmarks/targets.py`` shows what any of them would run.
Other epilogues run on the stored tile while it is still in the first-level cache.

`pair_product` is the same for bfloat16. Two neighbours along k lie in one word of 32 bits, the one with the even k in
the lower half, and such words take the places of floats: half as many of them. A word adds two products to a sum::

    c[i, j] = fma(a_even, b_even, fma(a_odd, b_odd, c[i, j]))

each rounded to nearest even. Some processors have one instruction for that. Others compute the two multiply-adds, and
get the same bits. For them a panel has two lines of floats for each k, the odd halves and the even ones: then only the
words of ``a`` are taken apart in the inner loop.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compile.storage import bfloat16, full, like
from .micro import InstructionSet, host
from .micro.blocking import LINE, POINTED

F32, I32, I64, BIT, POINTER = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(1), ir.PointerType()
BYTE, I16 = ir.IntType(8), ir.IntType(16)


HOST = host.choose(host.features())
LANES, MR, NR = HOST.lanes, HOST.rows, HOST.lanes * HOST.vectors
PER_WORD = 1 if HOST.dot else 2  # floats of a panel for each word: the word itself, or both halves


def unit_of(kind):
    """Return LLVM's type of an element of an array or a pointer, as it lies in memory."""
    return I16 if getattr(kind, "dtype", None) == bfloat16 else F32


class Emit:
    """Emitter of vector code through an IRBuilder; strides and offsets count floats."""

    def __init__(self, builder: ir.IRBuilder, shape: InstructionSet) -> None:
        self.builder, self.tile = builder, shape
        self.vector = ir.VectorType(F32, shape.lanes)

    def at(self, pointer, offset, unit=F32):
        """Point `offset` floats further, or other units."""
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.builder.gep(pointer, [offset], source_etype=unit)

    def times(self, x, n: int):
        """Multiply by a constant."""
        return self.builder.mul(x, I64(n))

    def load(self, pointer, typ=None, align=4):
        """Load a vector, or another type, from any address of an element."""
        typ = typ or self.vector
        return self.builder.load(self.builder.bitcast(pointer, typ.as_pointer()), align=align, typ=typ)

    def store(self, value, pointer, align=4):
        """Store to any address of an element."""
        return self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=align)

    def call(self, name: str, result, *args):
        """Call a function of LLVM's by its name."""
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def prefetch(self, pointer, write: bool = False) -> None:
        """Fetch a cache line: to be written into the first-level cache, to be read into the second."""
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, I32(int(write)), I32(3 if write else 2), I32(1))

    def spread(self, x):
        """Copy a float into every lane."""
        none = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(none, x, I32(0))
        return self.builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, self.tile.lanes), None))

    def hidden(self, x):
        """Hide the origin of a value from LLVM, without an instruction.

        It would derive each row's address from that of the row before: a chain longer than the multiply-adds take.
        """
        return self.builder.asm(ir.FunctionType(x.type, [x.type]), "", "=r,0", [x], side_effect=False)

    def multiply_add(self, x, y, z):
        """Compute x * y + z, rounded once if the machine can."""
        name = "fma" if self.tile.fused else "fmuladd"
        return self.call(f"llvm.{name}.v{self.tile.lanes}f32", self.vector, x, y, z)

    def add_pairs(self, x, y, z):
        """Compute z plus the products of both halves of words, by the instruction or by two multiply-adds."""
        if self.tile.dot:
            return self.tile.dot.add(self, x, y, z)
        for odd in True, False:
            z = self.multiply_add(self.half(x, odd), self.half(y, odd), z)
        return z

    def half(self, word, odd: bool):
        """Take the odd or the even half of a word or of a vector of them, as floats."""
        kind = like(word, I32)
        bits = self.builder.bitcast(word, kind)
        bits = self.builder.and_(bits, full(kind, 0xFFFF0000)) if odd else self.builder.shl(bits, full(kind, 16))
        return self.builder.bitcast(bits, word.type)

    def lines(self, word):
        """List what lines of a panel hold of words."""
        return [word] if self.tile.dot else [self.half(word, odd) for odd in (True, False)]

    def rounded(self, x, y):
        """Round two vectors to bfloat16, one behind the other in one vector of 16 bits."""
        if self.tile.dot:
            return self.tile.dot.rounded(self, x, y)
        x, y = (bfloat16.narrow(self.builder, part) for part in (x, y))
        every = ir.Constant(ir.VectorType(I32, 2 * self.tile.lanes), list(range(2 * self.tile.lanes)))
        return self.builder.shuffle_vector(x, y, every)

    def loop(self, count, state, body):
        """Repeat `body` `count` times; it maps the round and the values of `state` to their next values."""
        bld = self.builder
        cells = [cgutils.alloca_once(bld, v.type) for v in state]
        for cell, value in zip(cells, state, strict=True):
            bld.store(value, cell)
        with cgutils.for_range(bld, count) as rounds:
            now = [bld.load(cell, typ=v.type) for cell, v in zip(cells, state, strict=True)]
            for cell, value in zip(cells, body(rounds.index, *now), strict=True):
                bld.store(value, cell)
        return [bld.load(cell, typ=v.type) for cell, v in zip(cells, state, strict=True)]

    def product(self, rows, vectors, pairs, listed, a, b, c, depth, add, fetch):
        """Emit the micro-kernel for some rows and vectors.

        The other arguments are those of the intrinsic `product`: a, b and c with their strides.

        With `pairs`, the floats of a are words of two bfloat16, and a panel holds `lines` of such words. If `listed`,
        `ahead` is a list of places, of which every second k fetches the next: two lines of the cache.

        k goes in pairs. Seven rows share a pointer: x86's addressing finds them by registers of 1, 3 and 5 strides in
        bytes, each times 1, 2 or 4. The offset of the first is a register too, if the instruction set asks for it.
        """
        bld, width = self.builder, range(vectors)
        (a, row, step), (b, line), (c, c_row), (ahead, ahead_step, shift) = a, b, c, fetch
        bases = [self.hidden(self.at(a, self.times(row, i))) for i in range(0, rows, POINTED)]
        line, step, *strides = (
            self.hidden(self.times(x, 4 * n)) for x, n in ((line, 1), (step, 1), (row, 1), (row, 3), (row, 5))
        )
        zero = self.hidden(I64(0)) if self.tile.indexed else I64(0)
        spots = [(i, j) for i in range(rows) for j in width]
        c_rows = [self.at(c, self.times(c_row, i)) for i in range(rows)]
        for place in c_rows:
            self.prefetch(place, write=True)

        accumulate = self.add_pairs if pairs and self.tile.dot else self.multiply_add
        passes = [[self.spread]]  # over the rows, by what to make of an element for each line of the panel
        if pairs and self.tile.halves_apart and not self.tile.dot:
            passes = [[lambda x, odd=odd: self.spread(self.half(x, odd))] for odd in (True, False)]
        elif pairs and not self.tile.dot:
            passes = [[lambda x, odd=odd: self.half(self.spread(x), odd) for odd in (True, False)]]

        def one(number, *state):
            (b, one, three, five, *bases), sums = map(self.hidden, state[: -len(spots)]), list(state[-len(spots) :])
            offsets = [zero, one, self.times(one, 2), three, self.times(one, 4), five, self.times(three, 2)]
            for parts in passes:
                if parts is not passes[0]:  # loaded again, which LLVM would not do by itself
                    bases = [self.hidden(base) for base in bases]
                places = [self.at(base, offset, BYTE) for base in bases for offset in offsets]
                y = []
                for _ in parts:
                    y.append([self.load(self.at(b, j * self.tile.lanes)) for j in width])
                    b = self.at(b, line, BYTE)
                for i in range(rows):
                    element = self.load(places[i], F32)
                    for part, ys in zip(parts, y, strict=True):
                        x = part(element)
                        for j in width:
                            spot = i * len(width) + j
                            sums[spot] = accumulate(x, ys[j], sums[spot])
            return [b, one, three, five, *(self.at(base, step, BYTE) for base in bases), *sums]

        def two(number, *state):
            place = self.at(ahead, bld.mul(bld.lshr(number, shift), ahead_step))
            if listed:
                place = bld.inttoptr(self.load(self.at(ahead, number, I64), I64), POINTER)
                apart = [I64(0), I64(LINE)]
            elif pairs:  # a line of columns in each of two rows that will be packed as pairs
                apart = [I64(0), bld.lshr(ahead_step, I64(1))]
            else:
                apart = [I64(j) for j in range(0, self.tile.lanes * self.tile.vectors, LINE)]
            for offset in apart:
                self.prefetch(self.at(place, offset))
            return one(number, *one(number, *state))

        state = [b, *strides, *bases, *([ir.Constant(self.vector, None)] * len(spots))]
        state = self.loop(bld.lshr(depth, I64(1)), state, two)
        state = self.loop(bld.and_(depth, I64(1)), state, one)
        with bld.if_else(add) as branches:
            for branch, adding in zip(branches, (True, False), strict=True):
                with branch:
                    for (i, j), x in zip(spots, state[-len(spots) :], strict=True):
                        place = self.at(c_rows[i], j * self.tile.lanes)
                        self.store(self.total(self.load(place), x) if adding else x, place)

    def total(self, x, y):
        """Add two vectors of sums."""
        return self.builder.fadd(x, y)

    def transpose(self, rows):
        """Transpose a square of vectors: the step of distance d exchanges bit d of row and column."""
        lanes, d = self.tile.lanes, 1
        while d < lanes:
            low = [i - d + lanes if i & d else i for i in range(lanes)]
            high = [i + lanes if i & d else i + d for i in range(lanes)]
            masks = [ir.Constant(ir.VectorType(I32, lanes), m) for m in (low, high)]
            rows = [self.builder.shuffle_vector(rows[i & ~d], rows[i | d], masks[bool(i & d)]) for i in range(lanes)]
            d *= 2
        return rows


FLOATS = types.CPointer(types.float32)
INT = types.int64
FETCH = types.Tuple((FLOATS, INT, INT))


@intrinsic
def at(typingctx, array, offset):
    """Point to the element at `offset` from an array's first, or to the float at `offset` from a pointer."""

    def codegen(context, builder, signature, args):
        kind, data = signature.args[0], args[0]
        if isinstance(kind, types.Array):
            data = context.make_array(kind)(context, builder, data).data
        place = builder.gep(data, [args[1]], source_etype=unit_of(kind))
        return builder.bitcast(place, context.get_value_type(FLOATS))

    return FLOATS(array, INT), codegen


def product_of(
    vectors: int, pairs: bool = False, tile: InstructionSet = HOST, listed: bool = False, emit: type[Emit] = Emit
):
    """Make the micro-kernel of `vectors` vectors of columns.

    Parameters
    ----------
    pairs : whether it multiplies words of two bfloat16.
    listed : whether `ahead` is a list of the places to fetch, which `put_place` writes, one for every second k.
    emit : the emitter, which may multiply words of another kind.
    """

    @intrinsic
    def product(typingctx, rows, a, row, step, b, line, c, c_row, depth, add, fetch):
        """Multiply `rows` <= MR rows of a with a panel of b, and write the tile to c or add it; k runs to `depth`.

        Strides: `row` and `step` (from k to k) of a, `line` (from k to k) of b, `c_row` of c. What comes next is
        meanwhile fetched into the second-level cache: with `fetch` a tuple (ahead, ahead_step, shift), at every second
        k NR floats from ``ahead[(k // 2 >> shift) * ahead_step]``.
        """

        def codegen(context, builder, signature, args):
            rows, a, row, step, b, line, c, c_row, depth, add, fetch = args
            fetch = cgutils.unpack_tuple(builder, fetch)
            end = builder.append_basic_block("end")
            choice = builder.switch(rows, end)
            for n in range(1, MR + 1):
                block = builder.append_basic_block(f"rows{n}")
                choice.add_case(I64(n), block)
                with builder.goto_block(block):
                    whole = (a, row, step), (b, line), (c, c_row), depth, add, fetch
                    emit(builder, tile).product(n, vectors, pairs, listed, *whole)
                    builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        where = FLOATS, INT, INT, FLOATS, INT, FLOATS, INT
        return types.void(INT, *where, INT, types.boolean, FETCH), codegen

    return product


product, narrow_product = product_of(HOST.vectors), product_of(1)
pair_product, narrow_pair_product = product_of(HOST.vectors, pairs=True), product_of(1, pairs=True)
listed_pair_product = product_of(HOST.vectors, pairs=True, listed=True)


@intrinsic
def put_place(typingctx, places, i, place):
    """Write the i-th place of a list, which takes two floats each."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        emit = Emit(builder, HOST)
        emit.store(builder.ptrtoint(args[2], I64), emit.at(data, args[1], I64))
        return context.get_dummy_value()

    return types.void(places, INT, FLOATS), codegen


@intrinsic
def copy(typingctx, to, to_row, x, x_row, rows):
    """Copy `rows` rows of NR floats."""

    def codegen(context, builder, signature, args):
        to, to_row, x, x_row, rows = args
        emit = Emit(builder, HOST)
        with cgutils.for_range(builder, rows) as loop:
            target, source = emit.at(to, builder.mul(loop.index, to_row)), emit.at(x, builder.mul(loop.index, x_row))
            found = [(emit.load(emit.at(source, j)), emit.at(target, j)) for j in range(0, NR, LANES)]
            for value, place in found:
                emit.store(value, place)
        return context.get_dummy_value()

    return types.void(FLOATS, INT, FLOATS, INT, INT), codegen


def transpose_to(lines):
    """Make the function that writes a square transposed, as the lines that `lines` makes of each column."""

    @intrinsic
    def transpose(typingctx, to, to_row, x, x_row):
        """Write a square of LANES x LANES floats or words transposed."""

        def codegen(context, builder, signature, args):
            to, to_row, x, x_row = args
            emit = Emit(builder, HOST)
            square = [emit.load(emit.at(x, emit.times(x_row, i))) for i in range(LANES)]
            columns = [line for column in emit.transpose(square) for line in lines(emit, column)]
            for i, line in enumerate(columns):
                emit.store(line, emit.at(to, emit.times(to_row, i)))
            return context.get_dummy_value()

        return types.void(FLOATS, INT, FLOATS, INT), codegen

    return transpose


transpose, transpose_words = transpose_to(lambda emit, column: [column]), transpose_to(Emit.lines)


@intrinsic
def prefetch(typingctx, place):
    """Fetch a cache line into the second-level cache; any address will do."""

    def codegen(context, builder, signature, args):
        Emit(builder, HOST).prefetch(args[0])
        return context.get_dummy_value()

    return types.void(FLOATS), codegen


@intrinsic
def ticket(typingctx, counter):
    """Take the next number from a counter that threads share: the first of an int32 array, zero to begin with."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        number = builder.atomic_rmw("add", builder.bitcast(data, I32.as_pointer()), I32(1), "monotonic")
        return builder.zext(number, I64)

    return INT(counter), codegen
