"""Residual and RMS normalization on vectors: a group is added and normalized while it lies in the L1 cache."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from .rmsnorm import ZERO, normalize


@helper(forceinline=True)
def forward_row(residual, out, rstd, inp1, inp2, weight, eps):
    """Add the groups of a row, and normalize the sums."""
    C = weight.shape[0]
    for g in range(rstd.shape[0]):
        here = slice(g * C, g * C + C)
        total, x, y = residual[here], inp1[here], inp2[here]
        v = ZERO
        for i in range(C):
            t = x[i] + y[i]
            total[i] = t
            v += t * t
        rstd[g] = normalize(out[here], total, weight, v, eps)


@kernel(ops.residual_rmsnorm_forward, "optimized")
def residual_rmsnorm_forward(residual, out, rstd, inp1, inp2, weight, eps):
    """The sum with the mean of its squares, then the normalized group.

    Parallel: the rows.
    Bound: memory.
    """
    for bt in prange(inp1.shape[0]):
        forward_row(residual[bt], out[bt], rstd[bt], inp1[bt], inp2[bt], weight, np.float32(eps))
