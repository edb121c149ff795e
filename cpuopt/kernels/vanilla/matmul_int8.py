"""Products with a weight in int8, naive: each row is quantized, then multiplied as integers.

Each operation is rounded by itself, as ``cpuopt/ops/matmul_int8.py`` defines it: no multiply-adds, no reciprocals.
"""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import BT, OC, C
from ..compile.jit import helper, kernel
from .dropout import GAMMA, mix

ZERO, ONE, NAN = np.float32(0), np.float32(1), np.float32(np.nan)
MOST, LARGEST, LONG = np.float32(127), np.float32(3.4028235e38), 131072
SUM = 2**31 - 1
LEAST = np.float32(7.888609052210118e-31)  # 2^-100
MIDDLE, UNIT = np.float32(128), np.float32(2.0**-16)
STEPS, M1, M2 = np.uint64(0x9E3779B1), np.uint64(0x7FEB352D), np.uint64(0x846CA68B)
WORD, HALF, U1 = np.uint64(0xFFFFFFFF), np.uint64(0xFFFF), np.uint64(1)
U15, U16, U32 = np.uint64(15), np.uint64(16), np.uint64(32)


@helper()
def larger(most, x):
    """Return the larger magnitude; NaN if either is."""
    x = abs(x)
    return x if x > most or x != x else most


@helper(fastmath=False)
def units(most, K):
    """Return the step of a row of K elements with this largest magnitude, and what these are multiplied by."""
    if not most <= LARGEST:
        return NAN, ZERO
    n = np.float32(SUM // (128 * K)) if K > LONG else MOST  # so that int32 holds a sum
    return (most / n, n / most) if most >= LEAST else (ZERO, ZERO)


@helper()
def random_bits(draw, index):
    """Compute the 16 random bits of an element."""
    z = (index * STEPS + (draw & WORD)) & WORD
    z = ((z ^ (z >> U16)) * M1 & WORD) ^ (draw >> U32)
    z = (z ^ (z >> U15)) * M2 & WORD
    return (z ^ (z >> U16)) & HALF


@helper(fastmath=False)
def to_nearest(q, x):
    """Quantize a row, and return its step."""
    most = ZERO
    for i in range(x.shape[0]):
        most = larger(most, np.float32(x[i]))
    step, factor = units(most, x.shape[0])
    for i in range(x.shape[0]):
        q[i] = np.int32(np.rint(np.float32(x[i]) * factor)) if factor > ZERO else np.int32(0)
    return step


@helper(fastmath=False)
def dot(q, weight, scale):
    """Multiply a quantized row with a row of the weight, and the sum with `scale`."""
    total = np.int64(0)
    for i in range(q.shape[0]):
        total += np.int64(q[i]) * np.int64(weight[i])
    return np.float32(total) * scale


@kernel(ops.matmul_int8_forward, "vanilla", scratch=[("q", BT * C, "int32")], fastmath=False)
def matmul_int8_forward(out, out_add, inp, weight, scales, bias, q):
    """Quantize a row of `inp` to nearest, then one sum of integers for each element of `out`.

    Parallel: the rows of `inp`; each iteration owns a row of `out`.
    Bound: compute.
    """
    BT, C = inp.shape
    for bt in prange(BT):
        row = q[bt * C : bt * C + C]
        step = to_nearest(row, inp[bt])
        for o in range(weight.shape[0]):
            value = dot(row, weight[o], step * scales[o]) + (bias[o] if bias.shape[0] > 0 else ZERO)
            out[bt, o] = out[bt, o] + value if out_add else value


@kernel(
    ops.matmul_int8_backward_input,
    "vanilla",
    scratch=[("q", BT * OC, "int32"), ("sums", BT * C, "int64")],
    fastmath=False,
)
def matmul_int8_backward_input(dinp, dinp_add, dout, weight, scales, stream, seed, counter, q, sums):
    """Quantize a row of `dout` times the scales at random, then add the rows of `weight`, each times an integer.

    Parallel: the rows of `dinp`.
    Memory: the sums of integers.
    Bound: the memory that `weight` streams through, once for each row.
    """
    OC, C = weight.shape
    draw = mix(mix(mix(np.uint64(seed) + GAMMA) + np.uint64(counter) + GAMMA) + np.uint64(stream) + GAMMA) >> U1
    for bt in prange(dout.shape[0]):
        most = ZERO
        for o in range(OC):
            most = larger(most, np.float32(dout[bt, o]) * scales[o])
        step, factor = units(most, OC)
        for o in range(OC):
            u = np.float32(random_bits(draw, np.uint64(bt * OC + o))) * UNIT
            x = np.float32(dout[bt, o]) * scales[o] * factor + (MIDDLE + u)
            rounded = min(max(np.floor(x) - MIDDLE, -MOST), MOST)
            q[bt * OC + o] = np.int32(rounded) if factor > ZERO else np.int32(0)
        for i in range(C):
            sums[bt * C + i] = 0
        for o in range(OC):
            for i in range(C):
                sums[bt * C + i] += np.int64(q[bt * OC + o]) * np.int64(weight[o, i])
        for i in range(C):
            value = np.float32(sums[bt * C + i]) * step
            dinp[bt, i] = dinp[bt, i] + value if dinp_add else value
