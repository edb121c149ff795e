"""Stochastic rounding of float32 to bfloat16, as ``cpuopt/ops/rounding.py`` defines it.

The arithmetic of 32 bits is written for LLVM: numba would give its sums and products 64 bits, at three times the time.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...ops.rounding import M1, M2, STEPS
from ..compile.jit import helper
from ..compile.storage import QUIET, UP, bfloat16

I16, I32 = ir.IntType(16), ir.IntType(32)
WORD, HALF_WORD, LOWER, UPPER = np.int64(0xFFFFFFFF), np.int64(32), np.int32(0), np.int32(16)


@helper()
def round_at_random(out, x, draw, first, state):
    """out[i] = x[i], up or down by the random bits of element first + i; a NaN stays one."""
    lower, upper = keys(draw, state)
    shift, begin = UPPER if state % 2 else LOWER, np.int32(first & WORD)
    for i in range(x.shape[0]):
        out[i] = drop(x[i], random_word(np.int32(begin + i), lower, upper), shift)


@helper()
def round_two_at_random(out, out2, x, x2, draw, first, state):
    """Round an even state and the next one, which share a word of random bits."""
    lower, upper = keys(draw, state)
    begin = np.int32(first & WORD)
    for i in range(x.shape[0]):
        word = random_word(np.int32(begin + i), lower, upper)
        out[i] = drop(x[i], word, LOWER)
        out2[i] = drop(x2[i], word, UPPER)


@helper(inline="always")
def keys(draw, state):
    """Return the two numbers that make random words those of a step and of two states."""
    return np.int32(draw & WORD), np.int32(((draw >> HALF_WORD) + state // 2) & WORD)


def constant(n):
    """Return a number for LLVM."""
    return ir.Constant(I32, int(n))


@intrinsic
def random_word(typingctx, index, lower, upper):
    """Compute the 32 random bits of an element."""

    def codegen(context, builder, signature, args):
        index, lower, upper = args

        def mixed(z, bits):
            return builder.xor(z, builder.lshr(z, constant(bits)))

        z = builder.add(builder.mul(index, constant(STEPS)), lower)
        z = builder.xor(builder.mul(mixed(z, 16), constant(M1)), upper)
        return mixed(builder.mul(mixed(z, 15), constant(M2)), 16)

    return types.int32(types.int32, types.int32, types.int32), codegen


@intrinsic
def drop(typingctx, x, word, shift):
    """Add 16 bits of a word, from `shift` on, to those of a float32, and drop the lower half."""

    def codegen(context, builder, signature, args):
        x, word, shift = args
        random = builder.and_(builder.lshr(word, shift), constant(0xFFFF))
        bits = builder.bitcast(x, I32)
        quiet = builder.or_(bits, constant(QUIET))
        bits = builder.select(builder.fcmp_unordered("uno", x, x), quiet, builder.add(bits, random))
        return builder.trunc(builder.lshr(bits, constant(UP)), I16)

    return bfloat16(types.float32, types.int32, types.int32), codegen
