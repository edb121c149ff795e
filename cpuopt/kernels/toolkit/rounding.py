"""Stochastic rounding of float32 to bfloat16, as ``cpuopt/ops/rounding.py`` defines it, inside of an optimizer's rule.

A rule gets a parameter or a state in bfloat16 as a `Rounded`. It widens an element when the rule reads it, and rounds a
number at random when the rule stores one. So all of a step is one loop, and rounding runs while the processor divides.
Some of them share a word of random bits; LLVM sees that it is the same and computes it once.

The arithmetic of 32 bits is written for LLVM: numba would give its sums and products 64 bits, at three times the time.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed, lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from ...ops.rounding import APART, M1, M2, PARTS, STEPS
from ..compile.storage import QUIET, UP, bfloat16, full

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


class Rounded(types.Type):
    """Elements in bfloat16, with what their random bits depend on."""

    def __init__(self, part: int) -> None:
        super().__init__(name=f"rounded at random, by part {part} of the bits")
        self.part = part

    # kept here, where the cache of compiled kernels sees a change
    @staticmethod
    def random_word(builder, index, lower, upper):
        """Compute the 32 random bits of an element, or of each of a vector."""

        def number(x):
            return full(index.type, int(x))

        def mixed(z, bits):
            return builder.xor(z, builder.lshr(z, number(bits)))

        z = builder.add(builder.mul(index, number(STEPS)), lower)
        z = builder.xor(builder.mul(mixed(z, 16), number(M1)), upper)
        return mixed(builder.mul(mixed(z, 15), number(M2)), 16)

    def drop(self, builder, x, word):
        """Add a part of a word to the bits of a float32, and drop their lower half; a NaN stays one."""
        word = builder.mul(word, I32(int(STEPS))) if self.part == 2 else word
        random = builder.lshr(word, I32(UP)) if self.part else builder.and_(word, I32(0xFFFF))
        bits = builder.bitcast(x, I32)
        quiet = builder.or_(bits, I32(QUIET))
        bits = builder.select(builder.fcmp_unordered("uno", x, x), quiet, builder.add(bits, random))
        return builder.trunc(builder.lshr(bits, I32(UP)), I16)

    def read(self, context, builder, state, i):
        """Load an element."""
        state = cgutils.create_struct_proxy(self)(context, builder, state)
        return bfloat16.widen(builder, builder.load(builder.gep(state.data, [i], source_etype=I16), typ=I16))

    def write(self, context, builder, state, i, x):
        """Round a number and store it."""
        state = cgutils.create_struct_proxy(self)(context, builder, state)
        word = self.random_word(builder, builder.add(state.first, builder.trunc(i, I32)), state.lower, state.upper)
        builder.store(self.drop(builder, x, word), builder.gep(state.data, [i], source_etype=I16))


@register_model(Rounded)
class RoundedModel(models.StructModel):
    """A pointer, not an array: numba would count references to it."""

    def __init__(self, manager, kind) -> None:
        members = ("data", types.CPointer(types.uint16)), *((n, types.int32) for n in ("first", "lower", "upper"))
        super().__init__(manager, kind, members)


@infer_global(operator.getitem)
class Read(AbstractTemplate):
    """An element in float32."""

    def generic(self, args, kws):
        """Return the signature, if there is one."""
        return signature(types.float32, args[0], types.intp) if isinstance(args[0], Rounded) else None


@infer_global(operator.setitem)
class Write(AbstractTemplate):
    """An element, rounded."""

    def generic(self, args, kws):
        """Return the signature, if there is one."""
        return signature(types.none, args[0], types.intp, types.float32) if isinstance(args[0], Rounded) else None


@lower_builtin(operator.getitem, Rounded, types.intp)
def _read(context, builder, sig, args):
    return sig.args[0].read(context, builder, *args)


@lower_builtin(operator.setitem, Rounded, types.intp, types.float32)
def _write(context, builder, sig, args):
    sig.args[0].write(context, builder, *args)
    return context.get_dummy_value()


def rounded_of(n):
    """Make the function that gives a rule the n-th state: ``rounded(x, draw, first)``, x from element `first` on.

    An array of another type than bfloat16 stays as it is.
    """

    @intrinsic
    def rounded(typingctx, x, draw, first):
        if x.dtype != bfloat16:
            return x(x, types.int64, types.int64), lambda context, builder, sig, args: impl_ret_borrowed(
                context, builder, sig.return_type, args[0]
            )
        kind = Rounded(n % PARTS)

        def codegen(context, builder, sig, args):
            x, draw, first = args
            made = cgutils.create_struct_proxy(kind)(context, builder)
            data = context.make_array(sig.args[0])(context, builder, x).data
            made.data = builder.bitcast(data, made.data.type)
            made.first = builder.add(builder.trunc(first, I32), I32(n // PARTS * APART))
            made.lower, made.upper = (builder.trunc(x, I32) for x in (draw, builder.lshr(draw, I64(32))))
            return made._getvalue()

        return kind(x, types.int64, types.int64), codegen

    return rounded
