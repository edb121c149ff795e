"""Residual and RMS normalization of few rows on one thread: to wake others would take longer."""

import numpy as np

from ... import ops
from ..compile.jit import kernel
from ..optimized.residual_rmsnorm import forward_row


@kernel(ops.residual_rmsnorm_forward, "rows", parallel=False)
def residual_rmsnorm_forward(residual, out, rstd, inp1, inp2, weight, eps):
    """The sum with the mean of its squares, then the normalized group.

    Bound: compute.
    """
    for bt in range(inp1.shape[0]):
        forward_row(residual[bt], out[bt], rstd[bt], inp1[bt], inp2[bt], weight, np.float32(eps))
