"""Vector code that LLVM would not find by itself: the micro-kernel of the matrix products, and what moves data for it.

`product` multiplies `rows` rows of one operand with a panel of the other::

    c[i, 0:NR] = or += sum_k a[i, k] * b[k, 0:NR]        NR = LANES * VECTORS

``a`` is the *broadcast* side: one float at a time, spread over a vector; its rows and its k may lie at any two strides.
``b`` is the *vector* side: NR neighbouring floats for each k. All sums stay in registers while k runs.

A `Tile` is the shape that a machine's registers allow, and `tile` is the rule. Nothing else here knows a machine: the
code is LLVM's vector code, so any target can be generated, and its machine code read (`machine_code`), on any host.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F32, I32, I64, POINTER = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.PointerType()


@dataclass(frozen=True)
class Tile:
    """The shape of a micro-kernel: `rows` rows of `vectors` vectors of `lanes` floats.

    `fused`: the machine has a fused multiply-add; without one, LLVM is left to choose.
    """

    lanes: int
    registers: int
    fused: bool
    rows: int = 0
    vectors: int = 0

    @property
    def width(self) -> int:
        """Columns: floats in a row."""
        return self.vectors * self.lanes


def tile(features: Iterable[str]) -> Tile:
    """Choose the tile for a machine from LLVM's names of its features.

    The sums, one row of the vector side and one broadcast must fit into the registers; one register too many and LLVM
    spills in the inner loop. At least 8 sums must be under way to fill two multiply-add pipes for four cycles. Of what
    fits, the narrowest tile with at most 3/4 load for each multiply-add is best: narrow tiles waste least at edges.
    """
    features = set(features)
    if "avx512f" in features:
        machine = Tile(16, 32, True)
    elif {"avx2", "fma"} <= features:
        machine = Tile(8, 16, True)
    elif "neon" in features:
        machine = Tile(4, 32, True)
    else:  # SSE and whatever else has 16 registers of 4 lanes, or can act as if; a product needs a register of its own
        machine = Tile(4, 15, False)
    for vectors in range(1, machine.registers):
        rows = (machine.registers - 1 - vectors) // vectors
        if rows * vectors >= 8 and (rows + vectors) / (rows * vectors) <= 0.75:
            return Tile(machine.lanes, machine.registers, machine.fused, rows, vectors)
    raise AssertionError(machine)


def host_features() -> set[str]:
    """Name the features of the machine that numba compiles for: the host, unless ``NUMBA_CPU_NAME`` says otherwise."""
    if numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        return {name for name, there in llvm.get_host_cpu_features().items() if there}
    implied = {"x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx2", "fma", "avx512f"}}
    listed = {f[1:] for f in (numba.config.CPU_FEATURES or "").split(",") if f.startswith("+")}
    return listed | implied.get(numba.config.CPU_NAME, set())


HOST = tile(host_features())
LANES, MR, NR = HOST.lanes, HOST.rows, HOST.width


def no_unroll(module):
    """Tell LLVM to leave a loop as it is written."""
    node = module.add_metadata([module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])])
    return node


class Emit:
    """Emits vector code for a tile through an IRBuilder."""

    def __init__(self, builder: ir.IRBuilder, shape: Tile) -> None:
        self.builder, self.tile = builder, shape
        self.vector = ir.VectorType(F32, shape.lanes)

    def at(self, pointer, *offsets):
        """Point `offsets` floats further."""
        for offset in offsets:
            offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
            pointer = self.builder.gep(pointer, [offset], source_etype=F32)
        return pointer

    def times(self, x, n: int):
        """Multiply an offset by a constant."""
        return self.builder.mul(x, ir.Constant(I64, n))

    def load(self, pointer, typ=None):
        """Load a vector, or what `typ` says, from any address."""
        typ = typ or self.vector
        return self.builder.load(self.builder.bitcast(pointer, typ.as_pointer()), align=4, typ=typ)

    def store(self, value, pointer):
        """Store a value at any address."""
        return self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=4)

    def call(self, name: str, result, *args):
        """Call a function of LLVM's by name."""
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def prefetch(self, pointer, write: bool = False) -> None:
        """Fetch a cache line ahead."""
        level = 3 if write else 2  # the first-level cache, or the second
        flags = [ir.Constant(I32, n) for n in (int(write), level, 1)]
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, *flags)

    def spread(self, x):
        """Copy a float into every lane."""
        none = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(none, x, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, self.tile.lanes), None))

    def hidden(self, x):
        """Keep LLVM from seeing where a value comes from; costs nothing."""
        return self.builder.asm(ir.FunctionType(x.type, [x.type]), "", "=r,0", [x], side_effect=False)

    def multiply_add(self, x, y, z):
        """Give x * y + z, rounded once where the machine can."""
        name = "fma" if self.tile.fused else "fmuladd"
        return self.call(f"llvm.{name}.v{self.tile.lanes}f32", self.vector, x, y, z)

    def loop(self, count, variables, body):
        """Repeat `body` `count` times; it maps the round and the values of the `variables` to their next values."""
        bld, before = self.builder, self.builder.block
        inside, after = bld.append_basic_block("loop"), bld.append_basic_block("after")
        starts = [ir.Constant(I64, 0), *variables]
        bld.cbranch(bld.icmp_signed(">", count, starts[0]), inside, after)
        bld.position_at_end(inside)
        now = [bld.phi(v.type) for v in starts]
        number = bld.add(now[0], ir.Constant(I64, 1))
        then = [number, *body(*now)]
        end = bld.cbranch(bld.icmp_signed("<", number, count), inside, after)
        end.set_metadata("llvm.loop", no_unroll(bld.module))
        last = bld.block
        bld.position_at_end(after)
        out = []
        for phi, start, value in zip(now, starts, then, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, last)
            out.append(bld.phi(phi.type))
            out[-1].add_incoming(start, before)
            out[-1].add_incoming(value, last)
        return out[1:]

    def product(self, rows, a, row, step, b, line, c, c_row, depth, add, ahead, ahead_step, shift):
        """Emit the micro-kernel; the arguments are those of the intrinsic `product`.

        k goes in pairs. Three rows of a share a pointer: two of them are found by one register and x86's addressing.
        """
        bld, lanes = self.builder, self.tile.lanes
        spots = [(i, j) for i in range(rows) for j in range(self.tile.vectors)]
        c_rows = [self.at(c, self.times(c_row, i)) for i in range(rows)]
        for place in c_rows:
            self.prefetch(place, write=True)
        bases = [self.hidden(self.at(a, self.times(row, i))) for i in range(0, rows, 3)]
        one_row, two_rows = self.hidden(self.times(row, 1)), self.hidden(self.times(row, 2))

        def add_products(bases, b, sums):
            y = [self.load(self.at(b, j * lanes)) for j in range(self.tile.vectors)]
            bases = [self.hidden(base) for base in bases]
            place = [p for base in bases for p in (base, self.at(base, one_row), self.at(base, two_rows))]
            x = []
            for i, j in spots:
                if not j:
                    x.append(self.spread(self.load(place[i], F32)))
                sums[i, j] = self.multiply_add(x[i], y[j], sums[i, j])
            return [self.at(base, step) for base in bases], self.at(b, line)

        def pair(number, b, *rest):
            bases, sums = rest[: -len(spots)], dict(zip(spots, rest[-len(spots) :], strict=True))
            self.prefetch(self.at(ahead, bld.mul(bld.lshr(number, shift), ahead_step)))
            for _ in range(2):
                bases, b = add_products(bases, b, sums)
            return b, *bases, *sums.values()

        def single(number, b, *rest):
            bases, sums = rest[: -len(spots)], dict(zip(spots, rest[-len(spots) :], strict=True))
            bases, b = add_products(bases, b, sums)
            return b, *bases, *sums.values()

        zeros = [ir.Constant(self.vector, None)] * len(spots)
        one = ir.Constant(I64, 1)
        state = self.loop(bld.lshr(depth, one), [b, *bases, *zeros], pair)
        state = self.loop(bld.and_(depth, one), state, single)
        sums = dict(zip(spots, state[-len(spots) :], strict=True))
        with bld.if_else(add) as branches:
            for branch, adding in zip(branches, (True, False), strict=True):
                with branch:
                    for i, j in spots:
                        place, x = self.at(c_rows[i], j * lanes), sums[i, j]
                        self.store(bld.fadd(self.load(place), x) if adding else x, place)

    def transpose(self, rows):
        """Transpose a square of vectors: after the step with distance d, bit d of row and column has changed places."""
        lanes, d = self.tile.lanes, 1
        while d < lanes:
            low = [i if not i & d else i - d + lanes for i in range(lanes)]
            high = [i + d if not i & d else i + lanes for i in range(lanes)]
            masks = [ir.Constant(ir.VectorType(I32, lanes), m) for m in (low, high)]
            rows = [self.builder.shuffle_vector(rows[i & ~d], rows[i | d], masks[bool(i & d)]) for i in range(lanes)]
            d *= 2
        return rows


FLOATS = types.CPointer(types.float32)
INT = types.int64


@intrinsic
def at(typingctx, array, offset):
    """Point to the float at `offset` from an array's first, or from a pointer."""

    def codegen(context, builder, signature, args):
        kind, data = signature.args[0], args[0]
        if isinstance(kind, types.Array):
            data = context.make_array(kind)(context, builder, data).data
        return builder.gep(data, [args[1]], source_etype=F32)

    return FLOATS(array, INT), codegen


@intrinsic
def product(typingctx, rows, a, row, step, b, line, c, c_row, depth, add, ahead, ahead_step, shift):
    """Multiply `rows` <= MR rows of a with a panel of b, and write the tile to c or add it.

    Strides in floats: `row` and `step` (from k to k) of a, `line` (from k to k) of b, `c_row` of c. k runs to `depth`.
    While it runs, what the next product will need comes into the second-level cache: at every second k the cache line
    of ``ahead[(k // 2 >> shift) * ahead_step]``.
    """

    def codegen(context, builder, signature, args):
        rows, *args = args
        end = builder.append_basic_block("end")
        choice = builder.switch(rows, end)
        for n in range(1, MR + 1):
            block = builder.append_basic_block(f"rows{n}")
            choice.add_case(ir.Constant(I64, n), block)
            with builder.goto_block(block):
                Emit(builder, HOST).product(n, *args)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    where = FLOATS, INT, INT, FLOATS, INT, FLOATS, INT
    return types.void(INT, *where, INT, types.boolean, FLOATS, INT, INT), codegen


@intrinsic
def copy(typingctx, dst, dst_row, src, src_row, rows):
    """Copy `rows` rows of NR floats."""

    def codegen(context, builder, signature, args):
        dst, dst_row, src, src_row, rows = args
        emit = Emit(builder, HOST)
        with cgutils.for_range(builder, rows) as loop:
            to, come = emit.at(dst, builder.mul(loop.index, dst_row)), emit.at(src, builder.mul(loop.index, src_row))
            found = [emit.load(emit.at(come, j)) for j in range(0, NR, LANES)]
            for j, x in zip(range(0, NR, LANES), found, strict=True):
                emit.store(x, emit.at(to, j))
        return context.get_dummy_value()

    return types.void(FLOATS, INT, FLOATS, INT, INT), codegen


@intrinsic
def move(typingctx, dst, src):
    """Copy LANES floats."""

    def codegen(context, builder, signature, args):
        emit = Emit(builder, HOST)
        emit.store(emit.load(args[1]), args[0])
        return context.get_dummy_value()

    return types.void(FLOATS, FLOATS), codegen


@intrinsic
def prefetch(typingctx, place):
    """Bring a cache line into the second-level cache."""

    def codegen(context, builder, signature, args):
        Emit(builder, HOST).prefetch(args[0])
        return context.get_dummy_value()

    return types.void(FLOATS), codegen


@intrinsic
def transpose(typingctx, dst, dst_row, src, src_row, extra):
    """Write a LANES x LANES square transposed, and add the vector `extra` to each row written."""

    def codegen(context, builder, signature, args):
        dst, dst_row, src, src_row, extra = args
        emit = Emit(builder, HOST)
        square = [emit.load(emit.at(src, emit.times(src_row, i))) for i in range(LANES)]
        extra = emit.load(extra)
        for i, x in enumerate(emit.transpose(square)):
            emit.store(builder.fadd(x, extra), emit.at(dst, emit.times(dst_row, i)))
        return context.get_dummy_value()

    return types.void(FLOATS, INT, FLOATS, INT, FLOATS), codegen


@intrinsic
def ticket(typingctx, counter):
    """Take the next number from a counter that threads share; the array's first four bytes hold it."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        counter = builder.bitcast(data, I32.as_pointer())
        number = builder.atomic_rmw("add", counter, ir.Constant(I32, 1), "monotonic")
        return builder.zext(number, I64)

    return INT(counter), codegen


def machine_code(shape: Tile, rows: int, triple: str, cpu: str, features: str = "") -> str:
    """Generate the micro-kernel for any machine that LLVM knows; return its assembly."""
    module = ir.Module()
    module.triple = triple
    kinds = [POINTER, I64, I64, POINTER, I64, POINTER, I64, I64, ir.IntType(1), POINTER, I64, I64]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    Emit(builder, shape).product(rows, *function.args)
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_assembly(parsed)
