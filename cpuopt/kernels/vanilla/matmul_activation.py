"""A linear layer with GELU, SwiGLU or GeGLU, naive: each element through both."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import BT, C
from ..compile.jit import kernel

S = np.float32(np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)  # Hendrycks and Gimpel 2016
HALF, ONE, THREE = np.float32(0.5), np.float32(1), np.float32(3)


@kernel(ops.matmul_gelu_forward, "vanilla")
def matmul_gelu_forward(out, pre, inp, weight, bias):
    """One dot product, then libm's tanh, for each element of `out`.

    Parallel: the rows of `weight`; each iteration owns a column of `pre` and `out`.
    Bound: compute.
    """
    BT, C = inp.shape
    for o in prange(weight.shape[0]):
        for bt in range(BT):
            x = bias[o] if bias.shape[0] > 0 else np.float32(0)
            for i in range(C):
                x += inp[bt, i] * weight[o, i]
            pre[bt, o] = x
            x = pre[bt, o]  # as it is stored
            out[bt, o] = HALF * x * (ONE + np.tanh(S * (x + CUBIC * x * x * x)))


@kernel(ops.matmul_gelu_backward, "vanilla", scratch=[("sums", BT * C)])
def matmul_gelu_backward(dpre, dout, weight, pre, sums):
    """Each row of `dpre` gathers the rows of `weight`, scaled by `dout`; then the slope of each element.

    Parallel: the rows of `dpre`.
    Memory: the sums in float32.
    Bound: the memory that `weight` streams through, once for each row.
    """
    OC, C = weight.shape
    total = sums.reshape(dpre.shape)
    for bt in prange(dpre.shape[0]):
        for i in range(C):
            total[bt, i] = 0
        for o in range(OC):
            d = dout[bt, o]
            for i in range(C):
                total[bt, i] += weight[o, i] * d
        for i in range(C):
            x = pre[bt, i]
            t = np.tanh(S * (x + CUBIC * x * x * x))
            slope = HALF * (ONE + t) + HALF * x * (ONE - t * t) * S * (ONE + THREE * CUBIC * x * x)
            dpre[bt, i] = slope * total[bt, i]


@kernel(ops.matmul_swiglu_forward, "vanilla")
def matmul_swiglu_forward(out, pre, inp, weight, bias, up):
    """One dot product, then libm's exp, for each element of `out`.

    Parallel: the rows of `weight`; each iteration owns a column of `pre` and `out`.
    Bound: compute.
    """
    BT, C = inp.shape
    for o in prange(weight.shape[0]):
        for bt in range(BT):
            x = bias[o] if bias.shape[0] > 0 else np.float32(0)
            for i in range(C):
                x += inp[bt, i] * weight[o, i]
            pre[bt, o] = x
            x = pre[bt, o]  # as it is stored
            out[bt, o] = x / (ONE + np.exp(-x)) * up[bt, o]


@kernel(ops.matmul_swiglu_backward, "vanilla", scratch=[("sums", BT * C)])
def matmul_swiglu_backward(dpre, dup, dout, weight, pre, up, sums):
    """Each row of `dpre` gathers the rows of `weight`, scaled by `dout`; then the two slopes of each element.

    Parallel: the rows of `dpre`.
    Memory: the sums in float32.
    Bound: the memory that `weight` streams through, once for each row.
    """
    OC, C = weight.shape
    total = sums.reshape(dpre.shape)
    for bt in prange(dpre.shape[0]):
        for i in range(C):
            total[bt, i] = 0
        for o in range(OC):
            d = dout[bt, o]
            for i in range(C):
                total[bt, i] += weight[o, i] * d
        for i in range(C):
            x, d = pre[bt, i], total[bt, i]
            s = ONE / (ONE + np.exp(-x))
            dup[bt, i] = d * x * s
            dpre[bt, i] = d * up[bt, i] * s * (ONE + x * (ONE - s))


@kernel(ops.matmul_geglu_forward, "vanilla")
def matmul_geglu_forward(out, pre, inp, weight, bias, up):
    """One dot product, then libm's tanh, for each element of `out`.

    Parallel: the rows of `weight`; each iteration owns a column of `pre` and `out`.
    Bound: compute.
    """
    BT, C = inp.shape
    for o in prange(weight.shape[0]):
        for bt in range(BT):
            x = bias[o] if bias.shape[0] > 0 else np.float32(0)
            for i in range(C):
                x += inp[bt, i] * weight[o, i]
            pre[bt, o] = x
            x = pre[bt, o]  # as it is stored
            out[bt, o] = HALF * x * (ONE + np.tanh(S * (x + CUBIC * x * x * x))) * up[bt, o]


@kernel(ops.matmul_geglu_backward, "vanilla", scratch=[("sums", BT * C)])
def matmul_geglu_backward(dpre, dup, dout, weight, pre, up, sums):
    """Each row of `dpre` gathers the rows of `weight`, scaled by `dout`; then the two slopes of each element.

    Parallel: the rows of `dpre`.
    Memory: the sums in float32.
    Bound: the memory that `weight` streams through, once for each row.
    """
    OC, C = weight.shape
    total = sums.reshape(dpre.shape)
    for bt in prange(dpre.shape[0]):
        for i in range(C):
            total[bt, i] = 0
        for o in range(OC):
            d = dout[bt, o]
            for i in range(C):
                total[bt, i] += weight[o, i] * d
        for i in range(C):
            x, d = pre[bt, i], total[bt, i]
            t = np.tanh(S * (x + CUBIC * x * x * x))
            slope = HALF * (ONE + t) + HALF * x * (ONE - t * t) * S * (ONE + THREE * CUBIC * x * x)
            dup[bt, i] = d * HALF * x * (ONE + t)
            dpre[bt, i] = d * up[bt, i] * slope
