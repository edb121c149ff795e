"""Vectors as values in numba code: formulas are written as for one number, and compute LANES at once.

LLVM does not turn every loop into vector code, and where it does, loads a polynomial's constants again in each round. A
vector is loaded from an array at an offset counted in floats, whatever the array's shape, and combined with vectors or
float32 by ``+ - * /``; a product and a sum become one fused multiply-add if the machine has it.

``_some`` affects the first `n` lanes only; `n` is clamped. The others are zero when loaded, unchanged when stored.
"""

import operator
from typing import ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from ..compile.jit import helper
from .constants import HALF, ONE
from .fastmath import (
    A1,
    A3,
    A5,
    A7,
    A9,
    A11,
    A13,
    B0,
    B2,
    B4,
    B6,
    E0,
    E1,
    E2,
    E3,
    E4,
    E5,
    EXP2_MAX,
    EXP2_MIN,
    LN2_HI,
    LN2_LO,
    LOG2E,
    POWER,
    ROUND,
    T1,
    T2,
    T3,
    T4,
    T5,
    T6,
    TANH_MAX,
)
from .simd import F32, HOST, I16, I32, LANES, Emit, unit_of

FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SIZE = {F32: 4, I16: 2}
"""Bytes of an element in memory."""
INT = types.int64


class Vector(types.Type):
    """LANES float32 in a register."""

    OPERATORS: ClassVar = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}
    """Kept here, where the cache of compiled kernels sees a change."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Held as LLVM's vector."""

    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, FLOATS)


vector = Vector()


class Arithmetic(AbstractTemplate):
    """A vector with a vector or a float32."""

    def generic(self, args, kws):
        """Return the signature, if there is one."""
        if not kws and len(args) == 2 and vector in args and {*args} <= {vector, types.float32}:
            return signature(vector, *args)
        return None


class Lanes(Emit):
    """Emitter of the code of the functions below."""

    def __init__(self, context, builder) -> None:
        super().__init__(builder, HOST)
        self.context = context

    def point(self, kind, array, offset):
        """Point to an element of an array."""
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        return self.at(data, offset, unit_of(kind))

    def read(self, kind, place, mask=None):
        """Load a vector of floats from elements of an array's type; those that a mask leaves out are zero."""
        unit = unit_of(kind)
        vector = ir.VectorType(unit, LANES)
        if mask is None:
            found = self.load(place, vector, SIZE[unit])
        else:
            name = f"llvm.masked.load.v{LANES}{unit.intrinsic_name}.p0"
            found = self.call(name, vector, place, I32(SIZE[unit]), mask, ir.Constant(vector, None))
        return found if unit is F32 else kind.dtype.widen(self.builder, found)

    def write(self, kind, place, x, mask=None):
        """Store a vector of floats as elements of an array's type, but for those that a mask leaves out."""
        unit = unit_of(kind)
        x = x if unit is F32 else kind.dtype.narrow(self.builder, x)
        if mask is None:
            self.store(x, place, SIZE[unit])
        else:
            name = f"llvm.masked.store.v{LANES}{unit.intrinsic_name}.p0"
            self.call(name, ir.VoidType(), x, place, I32(SIZE[unit]), mask)

    def compute(self, name, *args):
        """Combine vectors, or a vector and a float."""
        args = [a if a.type == FLOATS else self.spread(a) for a in args]
        return getattr(self.builder, name)(*args, flags=("contract",))

    def first(self, n):
        """Mask the first n lanes."""
        n = self.builder.select(self.builder.icmp_signed("<", n, n.type(LANES)), n, n.type(LANES))
        n = self.builder.select(self.builder.icmp_signed(">", n, n.type(0)), n, n.type(0))
        none = ir.Constant(INTS, ir.Undefined)
        n = self.builder.insert_element(none, self.builder.trunc(n, I32), I32(0))
        n = self.builder.shuffle_vector(n, none, ir.Constant(INTS, None))
        return self.builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), n)


def define(symbol: object, name: str) -> None:
    """Make an operator accept vectors."""

    def compute(context, builder, sig, args):
        return Lanes(context, builder).compute(name, *args)

    infer_global(symbol)(type(name, (Arithmetic,), {"key": symbol}))
    for kinds in ((vector, vector), (vector, types.float32), (types.float32, vector)):
        lower_builtin(symbol, *kinds)(compute)


for symbol, name in Vector.OPERATORS.items():
    define(symbol, name)


@intrinsic
def load(typingctx, x, i):
    """Load x[i : i + LANES]."""

    def codegen(context, builder, signature, args):
        emit, kind = Lanes(context, builder), signature.args[0]
        return emit.read(kind, emit.point(kind, *args))

    return vector(x, INT), codegen


@intrinsic
def load_some(typingctx, x, i, n):
    """Load x[i : i + n]."""

    def codegen(context, builder, signature, args):
        emit, kind = Lanes(context, builder), signature.args[0]
        return emit.read(kind, emit.point(kind, *args[:2]), emit.first(args[2]))

    return vector(x, INT, INT), codegen


@intrinsic
def store(typingctx, x, i, v):
    """Store v to x[i : i + LANES]."""

    def codegen(context, builder, signature, args):
        emit, kind = Lanes(context, builder), signature.args[0]
        emit.write(kind, emit.point(kind, *args[:2]), args[2])
        return context.get_dummy_value()

    return types.void(x, INT, vector), codegen


@intrinsic
def store_some(typingctx, x, i, v, n):
    """Store v to x[i : i + n]."""

    def codegen(context, builder, signature, args):
        emit, kind = Lanes(context, builder), signature.args[0]
        emit.write(kind, emit.point(kind, *args[:2]), args[2], emit.first(args[3]))
        return context.get_dummy_value()

    return types.void(x, INT, vector, INT), codegen


@intrinsic
def transpose(typingctx, to, i, to_row, x, j, x_row, scale):
    """Write LANES rows transposed: ``to[i + n*to_row + m] = scale * x[j + m*x_row + n]`` for n, m < LANES."""

    def codegen(context, builder, signature, args):
        emit, out, kind = Lanes(context, builder), signature.args[0], signature.args[3]
        to, x = emit.point(out, *args[:2]), emit.point(kind, *args[3:5])
        rows = [emit.at(x, emit.times(args[5], m), unit_of(kind)) for m in range(LANES)]
        square = [emit.compute("fmul", emit.read(kind, row), args[6]) for row in rows]
        for n, row in enumerate(emit.transpose(square)):
            emit.write(out, emit.at(to, emit.times(args[2], n), unit_of(out)), row)
        return context.get_dummy_value()

    return types.void(to, INT, INT, x, INT, INT, types.float32), codegen


@intrinsic
def add_transposed(typingctx, to, i, to_row, x, j, x_row, extra, e):
    """Write LANES rows transposed: ``to[i + n*to_row + m] = x[j + m*x_row + n] + extra[e + m]`` for n, m < LANES.

    `x` and `extra` are float32.
    """

    def codegen(context, builder, signature, args):
        emit, (out, *_), (to, i, to_row, x, j, x_row, extra, e) = Lanes(context, builder), signature.args, args
        to, x = emit.point(out, to, i), emit.point(signature.args[3], x, j)
        more = emit.load(emit.point(signature.args[6], extra, e))
        square = [emit.load(emit.at(x, emit.times(x_row, m))) for m in range(LANES)]
        for n, row in enumerate(emit.transpose(square)):
            emit.write(out, emit.at(to, emit.times(to_row, n), unit_of(out)), builder.fadd(row, more))
        return context.get_dummy_value()

    return types.void(to, INT, INT, x, INT, INT, extra, INT), codegen


@intrinsic
def spread(typingctx, x):
    """Copy a float32 into every lane."""

    def codegen(context, builder, signature, args):
        return Lanes(context, builder).spread(args[0])

    return vector(types.float32), codegen


@intrinsic
def select_some(typingctx, n, x, y):
    """Take the first n lanes of x, the others of y."""

    def codegen(context, builder, signature, args):
        return builder.select(Lanes(context, builder).first(args[0]), *args[1:])

    return vector(INT, vector, vector), codegen


@intrinsic
def select_positive(typingctx, x, y, z):
    """Take y where x > 0, else z."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", args[0], ir.Constant(FLOATS, None)), *args[1:])

    return vector(vector, vector, vector), codegen


@intrinsic
def larger(typingctx, x, y):
    """Take the larger of x and y in each lane; y where either is NaN."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), codegen


@intrinsic
def smaller(typingctx, x, y):
    """Take the smaller of x and y in each lane; y where either is NaN."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return vector(vector, vector), codegen


def reduce(name: str):
    """Make the function that combines all lanes, by LLVM's name of it."""

    @intrinsic
    def combine(typingctx, x):
        def codegen(context, builder, signature, args):
            emit, flags = Lanes(context, builder), ("reassoc",)
            start = [F32(-0.0)] if name == "fadd" else []
            call = emit.call(f"llvm.vector.reduce.{name}.v{LANES}f32", F32, *start, *args)
            call.fastmath.update(flags)
            return call

        return types.float32(vector), codegen

    return combine


sum_lanes = reduce("fadd")
max_lanes = reduce("fmaximum")  # NaN if a lane is


@intrinsic
def scale_by_power(typingctx, x, y):
    """Compute x * 2^n, where adding n to ROUND gave y; 2^-127 counts as 0 and 2^128 as infinite."""

    def codegen(context, builder, signature, args):
        n = builder.shl(builder.bitcast(args[1], INTS), ir.Constant(INTS, [23] * LANES))
        power = builder.bitcast(builder.add(n, ir.Constant(INTS, [127 << 23] * LANES)), FLOATS)
        return builder.fmul(args[0], power)

    return vector(vector, vector), codegen


EXP_MIN, EXP_MAX = np.float32(-88), np.float32(88.5)  # n of scale_by_power reaches -127 and 128, and no further


@helper(forceinline=True)
def exp(x):
    """Compute e^x by the polynomial of `fastmath`; 0 below -87.68, infinite above 88.37. NaN stays."""
    x = smaller(spread(EXP_MAX), larger(spread(EXP_MIN), x))
    y = x * LOG2E + ROUND
    n = y - ROUND
    r = x - n * LN2_HI - n * LN2_LO
    p = ((((spread(E0) * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    return scale_by_power(p * (r * r) + (r + ONE), y)


@intrinsic
def power(typingctx, y):
    """Compute 2^n, where adding n to POWER gave y; 2^-127 counts as 0 and 2^128 as infinite."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.shl(builder.bitcast(args[0], INTS), ir.Constant(INTS, [23] * LANES)), FLOATS)

    return vector(vector), codegen


@intrinsic
def exponent(typingctx, x):
    """Find the n for which x / 2^n, of a positive x that is not subnormal, is nearest to 1."""

    def codegen(context, builder, signature, args):
        above = builder.sub(builder.bitcast(args[0], INTS), ir.Constant(INTS, [HALF_ROOT] * LANES))
        return builder.sitofp(builder.ashr(above, ir.Constant(INTS, [23] * LANES)), FLOATS)

    return vector(vector), codegen


HALF_ROOT = 0x3F3504F3  # the bits of the root of 1/2
L0, L1, L2 = np.float32(7.0376836292e-2), np.float32(-1.1514610310e-1), np.float32(1.1676998740e-1)
L3, L4, L5 = np.float32(-1.2420140846e-1), np.float32(1.4249322787e-1), np.float32(-1.6668057665e-1)
L6, L7, L8 = np.float32(2.0000714765e-1), np.float32(-2.4999993993e-1), np.float32(3.3333331174e-1)


@helper(forceinline=True)
def exp2(x):
    """Compute 2^x by the polynomial of `fastmath`; 0 below -126.5, infinite above 127.5. NaN stays."""
    x = smaller(spread(EXP2_MAX), larger(spread(EXP2_MIN), x))
    y = x + POWER
    r = x - (y - POWER)
    return ((((((spread(T6) * r + T5) * r + T4) * r + T3) * r + T2) * r + T1) * r + ONE) * power(y)


@helper(forceinline=True)
def log(x):
    """Compute the logarithm of numbers from 2^-126 to 2^126 by Cephes' polynomial. Not finite for NaN and infinity."""
    n = exponent(x)
    f = scale_by_power(x, ROUND - n) - ONE
    p = (((((((spread(L0) * f + L1) * f + L2) * f + L3) * f + L4) * f + L5) * f + L6) * f + L7) * f + L8
    return n * LN2_HI + (f + (f * f * (p * f - HALF) + n * LN2_LO))


@helper(forceinline=True)
def tanh(x):
    """Compute tanh(x) by the polynomials of `fastmath`. NaN stays."""
    x = smaller(spread(TANH_MAX), larger(spread(-TANH_MAX), x))
    s = x * x
    p = x * ((((((spread(A13) * s + A11) * s + A9) * s + A7) * s + A5) * s + A3) * s + A1)
    t = p / (((spread(B6) * s + B4) * s + B2) * s + B0)
    return smaller(spread(ONE), larger(spread(-ONE), t))
