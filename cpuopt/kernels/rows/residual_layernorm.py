"""Residual and layer normalization of few rows on one thread: to wake others would take longer."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.residual_layernorm import forward_row


@kernel(ops.residual_layernorm_forward, "rows", parallel=False)
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Bound: compute.
    """
    for bt in range(inp1.shape[0]):
        mean[bt], rstd[bt] = forward_row(residual, out, inp1, inp2, weight, bias, bt, eps)
