"""RMS normalization, naive: two passes over a row forward, two backward."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.rmsnorm_forward, "vanilla")
def rmsnorm_forward(out, rstd, inp, weight, eps):
    """The mean of the squares, then the normalized group.

    Parallel: the groups of all rows.
    Bound: memory.
    """
    BT, G = rstd.shape
    C = weight.shape[0]
    groups = inp.reshape(BT * G, C)
    normalized = out.reshape(BT * G, C)
    saved = rstd.reshape(BT * G)
    for g in prange(BT * G):
        # pass 1: the mean of the squares
        v = np.float32(0)
        for i in range(C):
            v += groups[g, i] * groups[g, i]
        s = 1 / np.sqrt(np.float64(v) / C + eps)  # float64: in float32 an approximation replaces it
        # pass 2: normalize, scale
        for i in range(C):
            normalized[g, i] = groups[g, i] * np.float32(s) * weight[i]
        saved[g] = s


@kernel(ops.rmsnorm_backward, "vanilla")
def rmsnorm_backward(dinp, dinp_add, dweight, dweight_add, dout, inp, weight, rstd):
    """The mean of a group, then its gradient; then the weight's gradient, channel by channel.

    Parallel: the rows for `dinp`, then the channels for `dweight`.
    Bound: memory.
    """
    BT, G = rstd.shape
    C = weight.shape[0]
    for bt in prange(BT):
        for g in range(G):
            # pass 1: the mean
            g_xhat_mean = np.float32(0)
            for i in range(C):
                g_xhat_mean += weight[i] * dout[bt, g * C + i] * inp[bt, g * C + i] * rstd[bt, g]
            g_xhat_mean /= np.float32(C)
            # pass 2: out[i] = inp[i] * rstd * weight[i]
            for i in range(C):
                xhat = inp[bt, g * C + i] * rstd[bt, g]
                d = (weight[i] * dout[bt, g * C + i] - xhat * g_xhat_mean) * rstd[bt, g]
                dinp[bt, g * C + i] = dinp[bt, g * C + i] + d if dinp_add else d
    for i in prange(C):
        dw = np.float32(0)
        for bt in range(BT):
            for g in range(G):
                dw += dout[bt, g * C + i] * inp[bt, g * C + i] * rstd[bt, g]
        dweight[i] = dweight[i] + dw if dweight_add else dw


@kernel(ops.residual_rmsnorm_forward, "vanilla")
def residual_rmsnorm_forward(residual, out, rstd, inp1, inp2, weight, eps):
    """The sum with the mean of its squares, then the normalized group.

    Parallel: the rows.
    Bound: memory.
    """
    BT, G = rstd.shape
    C = weight.shape[0]
    for bt in prange(BT):
        for g in range(G):
            v = np.float32(0)
            for i in range(C):
                x = inp1[bt, g * C + i] + inp2[bt, g * C + i]
                residual[bt, g * C + i] = x
                v += x * x
            s = 1 / np.sqrt(np.float64(v) / C + eps)  # float64: in float32 an approximation replaces it
            for i in range(C):
                out[bt, g * C + i] = residual[bt, g * C + i] * np.float32(s) * weight[i]
            rstd[bt, g] = s
