"""Layer normalization, naive: three passes over a row forward, two backward."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.layernorm_forward, "vanilla")
def layernorm_forward(out, mean, rstd, inp, weight, bias, eps):
    """Mean, then variance, then the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    BT, C = inp.shape
    for bt in prange(BT):
        # pass 1: mean
        m = np.float32(0)
        for i in range(C):
            m += inp[bt, i]
        m /= np.float32(C)
        # pass 2: variance
        v = np.float32(0)
        for i in range(C):
            d = inp[bt, i] - m
            v += d * d
        s = np.float32(1) / np.sqrt(v / np.float32(C) + np.float32(eps))
        # pass 3: normalize, scale, shift
        for i in range(C):
            out[bt, i] = (inp[bt, i] - m) * s * weight[i] + bias[i]
        mean[bt] = m
        rstd[bt] = s


@kernel(ops.layernorm_backward, "vanilla")
def layernorm_backward(dinp, dinp_add, dweight, dweight_add, dbias, dbias_add, dout, inp, weight, mean, rstd):
    """The two means of a row, then its gradient; then the parameters' gradients, column by column.

    Parallel: the rows for `dinp`, then the channels for `dweight` and `dbias`.
    Bound: memory.
    """
    BT, C = inp.shape
    for bt in prange(BT):
        # pass 1: the two means
        g_mean = np.float32(0)
        g_xhat_mean = np.float32(0)
        for i in range(C):
            xhat = (inp[bt, i] - mean[bt]) * rstd[bt]
            g = weight[i] * dout[bt, i]
            g_mean += g
            g_xhat_mean += g * xhat
        g_mean /= np.float32(C)
        g_xhat_mean /= np.float32(C)
        # pass 2: out[bt, i] = (inp[bt, i] - mean) * rstd * weight[i] + bias[i]
        for i in range(C):
            xhat = (inp[bt, i] - mean[bt]) * rstd[bt]
            d = (weight[i] * dout[bt, i] - g_mean - xhat * g_xhat_mean) * rstd[bt]
            dinp[bt, i] = dinp[bt, i] + d if dinp_add else d
    for i in prange(C):
        dw = np.float32(0)
        db = np.float32(0)
        for bt in range(BT):
            dw += dout[bt, i] * (inp[bt, i] - mean[bt]) * rstd[bt]
            db += dout[bt, i]
        dweight[i] = dweight[i] + dw if dweight_add else dw
        dbias[i] = dbias[i] + db if dbias_add else db


@kernel(ops.residual_layernorm_forward, "vanilla")
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, its mean, then variance, then the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    BT, C = inp1.shape
    for bt in prange(BT):
        for i in range(C):
            residual[bt, i] = inp1[bt, i] + inp2[bt, i]
        m = np.float32(0)
        for i in range(C):
            m += residual[bt, i]
        m /= np.float32(C)
        v = np.float32(0)
        for i in range(C):
            d = residual[bt, i] - m
            v += d * d
        s = np.float32(1) / np.sqrt(v / np.float32(C) + np.float32(eps))
        for i in range(C):
            out[bt, i] = (residual[bt, i] - m) * s * weight[i] + bias[i]
        mean[bt] = m
        rstd[bt] = s
