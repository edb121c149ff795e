"""Residual and RMS normalization, naive: two passes over a row."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


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
