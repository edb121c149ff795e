"""Storage types in numba: what kernels read as float32 and round as they store.

numba has no bfloat16. Here it is a type of 16 bits. It turns into float32 when a kernel computes with it, and a number
is rounded to it when a kernel stores one. So the text of a naive kernel serves for every storage type.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_cast
from numba.core.typeconv import Conversion
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

    def __init__(self) -> None:
        super().__init__(name="bfloat16")

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


def like(value: ir.Value, element: ir.Type) -> ir.Type:
    """Return the type of as many elements as a value has."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def full(kind: ir.Type, number: int) -> ir.Constant:
    """Return a constant of a type, of a vector in all lanes."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


@register_model(BFloat16)
class BFloat16Model(models.PrimitiveModel):
    """Held as its bits."""

    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, I16)


bfloat16 = BFloat16()


@lower_cast(BFloat16, types.Float)
def _widen(context: Any, builder: ir.IRBuilder, of: types.Type, to: types.Type, bits: ir.Value) -> Any:
    return context.cast(builder, of.widen(builder, bits), types.float32, to)


@lower_cast(types.Float, BFloat16)
@lower_cast(types.Integer, BFloat16)
@lower_cast(types.Boolean, BFloat16)
def _narrow(context: Any, builder: ir.IRBuilder, of: types.Type, to: types.Type, x: ir.Value) -> Any:
    return to.narrow(builder, context.cast(builder, x, of, types.float32))


FROM_DTYPE[TYPES["bfloat16"].dtype] = bfloat16  # so that a dispatcher knows such an array
NUMBA: dict[str, types.Type] = {name: getattr(types, name, bfloat16) for name in TYPES}
"""numba's type of an element, by the name of the storage type."""
