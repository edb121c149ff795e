"""Residual and layer normalization on vectors: a row is added and normalized while it lies in the L1 cache."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel
from .layernorm import forward_row
from .residual import forward as add


@kernel(ops.residual_layernorm_forward, "optimized")
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    for bt in prange(inp1.shape[0]):
        add(residual[bt], inp1[bt], inp2[bt])
        mean[bt], rstd[bt] = forward_row(out[bt], residual[bt], weight, bias, np.float32(eps))
