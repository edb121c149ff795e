"""Residual and layer normalization on vectors: a row is added and normalized while it lies in the L1 cache."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel
from .layernorm import forward_row
from .residual import SET, add


@kernel(ops.residual_layernorm_forward, "optimized")
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    BT, C = inp1.shape
    for bt in prange(BT):
        add((residual,), SET, (inp1, inp2), bt * C, bt * C + C)
        mean[bt], rstd[bt] = forward_row(out[bt], residual[bt], weight, bias, np.float32(eps))
