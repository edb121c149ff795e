"""Residual and layer normalization of few rows on one thread: to wake others would take longer."""

import numpy as np

from ... import ops
from ..compile.jit import kernel
from ..optimized.layernorm import forward_row
from ..optimized.residual import forward as add


@kernel(ops.residual_layernorm_forward, "rows", parallel=False)
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Bound: compute.
    """
    for bt in range(inp1.shape[0]):
        add(residual[bt], inp1[bt], inp2[bt])
        mean[bt], rstd[bt] = forward_row(out[bt], residual[bt], weight, bias, np.float32(eps))
