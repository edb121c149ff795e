"""``exp``, ``exp2``, ``tanh`` and ``maximum`` of one float32, as kernels call them in a loop.

They are polynomials in plain float32, without a branch or a call: LLVM vectorizes a loop around them for
whatever the machine has. NumPy's functions of the same name become one call of libm for each element.

NaN goes through all four; infinities give the exact limits. `tests/kernels/test_simd.py` holds the errors to:

========  =============================================  =====================================
function  largest error                                  beyond the range
========  =============================================  =====================================
exp       1e-7 of the value; 1.4e-45 where subnormal     0 below -103.98, infinite above 88.73
exp2      1.6e-7 of the value                            0 below -126.5, infinite above 127.5
tanh      3e-7 of the value; 2e-42 where below 1e-35     -1 and 1
maximum   none; NaN if either is NaN                     signs of zero are not kept apart
========  =============================================  =====================================

Source: ``exp`` is Cephes' expf (Moshier 1992); ``tanh`` the rational approximation of Eigen
(``generic_fast_tanh_float``).
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..compile.jit import helper
from .constants import ONE

F32, I32 = ir.FloatType(), ir.IntType(32)

EXACT = {"contract"}
"""Multiply-adds may be fused, sums not reordered: n*LN2_HI + n*LN2_LO must stay two terms wherever it is inlined."""


@intrinsic
def as_int(typingctx, x):
    """Take the bits of a float32 as an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


@intrinsic
def as_float(typingctx, n):
    """Take the bits of an int32 as a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@intrinsic
def maximum(typingctx, a, b):
    """Compute the larger of two float32, NaN if either is; unlike ``max`` and ``if``, it vectorizes in a loop."""

    def codegen(context, builder, signature, args):
        function = builder.module.globals.get("llvm.maximum.f32") or ir.Function(
            builder.module, ir.FunctionType(F32, [F32, F32]), "llvm.maximum.f32"
        )
        return builder.call(function, args, fastmath=("nsz",))

    return types.float32(types.float32, types.float32), codegen


LOG2E = np.float32(1.44269504088896341)
LN2_HI = np.float32(0.693359375)  # ln 2 in 9 bits, so that n * LN2_HI is exact
LN2_LO = np.float32(-2.12194440e-4)  # the rest of ln 2
ROUND = np.float32(3 << 22)  # 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
ROUND_BITS = np.int32(ROUND.view(np.int32))
EXP_MAX = np.float32(89)  # above ln(largest float32) = 88.72
EXP_MIN = np.float32(-105)  # below ln(half the smallest subnormal) = -103.97
BIAS, MANTISSA, ONE_BIT = np.int32(127), np.int32(23), np.int32(1)
E0, E1, E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
E3, E4, E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@helper(fastmath=EXACT, forceinline=True)
def exp(x):
    """e^x = 2^n * e^r with n = round(x / ln 2), so |r| <= ln(2)/2.

    2^n is applied as two factors: one alone could be neither 2^128 nor 2^-149.
    """
    x = EXP_MAX if x > EXP_MAX else x  # these comparisons let NaN through
    x = EXP_MIN if x < EXP_MIN else x
    n = np.int32(as_int(x * LOG2E + ROUND) - ROUND_BITS)
    t = np.float32(n)
    r = x - t * LN2_HI - t * LN2_LO
    p = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    p = p * (r * r) + r + ONE
    half = np.int32(n >> ONE_BIT)
    return p * as_float(np.int32((half + BIAS) << MANTISSA)) * as_float(np.int32((n - half + BIAS) << MANTISSA))


TANH_MAX = np.float32(9)  # to which the approximation was fitted; tanh rounds to 1 from 9.02 on
A1, A3, A5 = np.float32(4.89352455891786e-03), np.float32(6.37261928875436e-04), np.float32(1.48572235717979e-05)
A7, A9 = np.float32(5.12229709037114e-08), np.float32(-8.60467152213735e-11)
A11, A13 = np.float32(2.00018790482477e-13), np.float32(-2.76076847742355e-16)
B0, B2 = np.float32(4.89352518554385e-03), np.float32(2.26843463243900e-03)
B4, B6 = np.float32(1.18534705686654e-04), np.float32(1.19825839466702e-06)


@helper(fastmath=EXACT, forceinline=True)
def tanh(x):
    """An odd polynomial over an even one."""
    x = TANH_MAX if x > TANH_MAX else x
    x = -TANH_MAX if x < -TANH_MAX else x
    s = x * x
    p = x * ((((((A13 * s + A11) * s + A9) * s + A7) * s + A5) * s + A3) * s + A1)
    t = p / (((B6 * s + B4) * s + B2) * s + B0)
    t = ONE if t > ONE else t
    return -ONE if t < -ONE else t


POWER = ROUND + np.float32(127)  # so that the lowest bits of POWER + n are the exponent of 2^n
EXP2_MIN, EXP2_MAX = np.float32(-127), np.float32(128)  # 2^-127 counts as 0 and 2^128 as infinite
T6, T5, T4 = np.float32(1.5345812426e-4), np.float32(1.3399930904e-3), np.float32(9.6184890717e-3)
T3, T2, T1 = np.float32(5.5503286421e-2), np.float32(2.4022646248e-1), np.float32(6.9314718246e-1)


@helper(fastmath=EXACT, forceinline=True)
def exp2(x):
    """2^x = 2^n * 2^r with n = round(x), so |r| <= 1/2, and a minimax polynomial of r."""
    x = EXP2_MAX if x > EXP2_MAX else x
    x = EXP2_MIN if x < EXP2_MIN else x
    y = x + POWER
    r = x - (y - POWER)
    p = (((((T6 * r + T5) * r + T4) * r + T3) * r + T2) * r + T1) * r + ONE
    return p * as_float(np.int32(as_int(y) << MANTISSA))
