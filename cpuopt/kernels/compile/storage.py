"""Storage types in numba: what kernels read as float32 and round as they store.

numba has no bfloat16. Here it is a type of 16 bits. It turns into float32 when a kernel computes with it, and a number
is rounded to it when a kernel stores one. So the text of a naive kernel serves for every storage type. Nor has numba a
float16 for processors; here kernels read it, and none writes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_cast
from numba.core.typeconv import Conversion
from numba.core.typing.templates import AbstractTemplate, infer, infer_global
from numba.extending import models, register_model

from ...ops.storage import TYPES
from .numba_internals import FROM_DTYPE

I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
UP, HALF, QUIET = (
    16,
    0x7FFF,
    0x400000,
)  # bits that bfloat16 leaves out; just below half of them; the mark of a quiet NaN


class BFloat16(types.Type):
    """A bfloat16 in memory."""

    def __init__(self, name: str = "bfloat16") -> None:
        super().__init__(name=name)

    def can_convert_to(self, typingctx: Any, other: types.Type) -> Conversion | None:
        """Widen to float32 first of all."""
        return {types.float32: Conversion.promote, types.float64: Conversion.safe}.get(other)

    def can_convert_from(self, typingctx: Any, other: types.Type) -> Conversion | None:
        """Round a number as it is stored."""
        return Conversion.unsafe if isinstance(other, types.Float | types.Integer | types.Boolean) else None

    def unify(self, typingctx: Any, other: types.Type) -> types.Type | None:
        """Choose the type of a variable that holds a bfloat16 or another number: float32, or float64."""
        if isinstance(other, types.Integer | types.Boolean):
            return types.float32
        return typingctx.unify_pairs(types.float32, other) if isinstance(other, types.Float) else None

    # kept here, where the cache of compiled kernels sees a change
    @staticmethod
    def widen(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
        """Turn bits, or a vector of them, into float32."""
        words, floats = like(bits, I32), like(bits, F32)
        return builder.bitcast(builder.shl(builder.zext(bits, words), full(words, UP)), floats)

    @staticmethod
    def narrow(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """Round float32, or a vector of them, to nearest even; a NaN stays one."""
        words = like(x, I32)
        bits = builder.bitcast(x, words)
        odd = builder.and_(builder.lshr(bits, full(words, UP)), full(words, 1))
        rounded = builder.add(builder.add(bits, full(words, HALF)), odd)
        quiet = builder.or_(bits, full(words, QUIET))
        bits = builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded)
        return builder.trunc(builder.lshr(bits, full(words, UP)), like(x, I16))


class Float16(BFloat16):
    """A float16 in memory, which is read alone."""

    def can_convert_from(self, typingctx: Any, other: types.Type) -> Conversion | None:
        """Refuse to store a number."""
        return None

    @staticmethod
    def widen(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
        """Turn bits into float32 in arithmetic that all processors have: a power of two moves the exponent."""
        word = builder.zext(bits, I32)
        sign = builder.shl(builder.and_(word, full(I32, 0x8000)), full(I32, UP))
        rest = builder.shl(builder.and_(word, full(I32, 0x7FFF)), full(I32, 13))
        finite = builder.bitcast(builder.fmul(builder.bitcast(rest, F32), ir.Constant(F32, 2.0**112)), I32)
        other = builder.or_(rest, full(I32, 0x7F800000))  # infinity, or NaN
        size = builder.select(builder.icmp_unsigned("<", rest, full(I32, 0x7C00 << 13)), finite, other)
        return builder.bitcast(builder.or_(size, sign), F32)


def like(value: ir.Value, element: ir.Type) -> ir.Type:
    """Return the type of as many elements as a value has."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def full(kind: ir.Type, number: int) -> ir.Constant:
    """Return a constant of a type, of a vector in all lanes."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


@register_model(Float16)
@register_model(BFloat16)
class BFloat16Model(models.PrimitiveModel):
    """Held as its bits."""

    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, I16)


bfloat16, float16 = BFloat16(), Float16("float16")


@lower_cast(BFloat16, types.Float)
def _widen(context: Any, builder: ir.IRBuilder, of: types.Type, to: types.Type, bits: ir.Value) -> Any:
    return context.cast(builder, of.widen(builder, bits), types.float32, to)


@lower_cast(types.Float, BFloat16)
@lower_cast(types.Integer, BFloat16)
@lower_cast(types.Boolean, BFloat16)
def _narrow(context: Any, builder: ir.IRBuilder, of: types.Type, to: types.Type, x: ir.Value) -> Any:
    return to.narrow(builder, context.cast(builder, x, of, types.float32))


OWN = {"bfloat16": bfloat16, "float16": float16}
FROM_DTYPE.update({TYPES[name].dtype: kind for name, kind in OWN.items()})  # so that a dispatcher knows such an array
NUMBA: dict[str, types.Type] = {name: OWN.get(name) or getattr(types, name) for name in TYPES}
"""numba's type of an element, by the name of the storage type."""


class Widened(AbstractTemplate):
    """A call that numba knows for float32, with a bfloat16 among its arguments: ``np.float32(x)``, ``max(x, 0)``."""

    def generic(self, args: Any, kws: Any) -> Any:
        """Resolve the call for float32."""
        wide = [types.float32 if isinstance(x, BFloat16) else x for x in args]
        return None if kws or wide == [*args] else self.context.resolve_function_type(self.usual, wide, kws)

    @property
    def usual(self) -> Any:
        """The type of the function."""
        return self.key if isinstance(self.key, types.Type) else self.context.resolve_value_type(self.key)

    def get_impl_key(self, sig: Any) -> Any:
        """Return what finds the code, which is that for float32."""
        return self.usual.get_impl_key(sig)


UFUNCS = (
    "exp exp2 expm1 log log1p log2 sqrt tanh sinh cosh sin cos arctan absolute fabs sign square power minimum maximum "
    "fmin fmax floor ceil rint trunc isnan isinf isfinite copysign"
)
for _function in (float, int, bool, min, max, *(getattr(np, name) for name in UFUNCS.split())):
    infer_global(_function)(Widened)
for _kind in (types.boolean, *NUMBA.values()):
    if not isinstance(_kind, BFloat16):
        infer(type("WidenedCast", (Widened,), {"key": types.NumberClass(_kind)}))
