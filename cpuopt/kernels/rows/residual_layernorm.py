"""Residual and layer normalization of few rows on one thread: to wake others would take longer."""

import numpy as np

from ... import ops
from ..compile.jit import kernel
from ..optimized.layernorm import forward_row
from ..optimized.residual import SET, add


@kernel(ops.residual_layernorm_forward, "rows", parallel=False)
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Bound: compute.
    """
    BT, C = inp1.shape
    for bt in range(BT):
        add((residual,), SET, (inp1, inp2), bt * C, bt * C + C)
        mean[bt], rstd[bt] = forward_row(out[bt], residual[bt], weight, bias, np.float32(eps))
