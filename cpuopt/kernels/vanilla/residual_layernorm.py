"""Residual and layer normalization, naive: four passes over a row, the last three those of layer normalization."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


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
