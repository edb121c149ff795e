"""Layer normalization of few rows on one thread: to wake others would take longer."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.layernorm import forward_row, residual_row


@kernel(ops.layernorm_forward, "rows", parallel=False)
def layernorm_forward(out, mean, rstd, inp, weight, bias, eps):
    """Mean, variance, then the normalized row.

    Bound: compute.
    """
    for bt in range(inp.shape[0]):
        mean[bt], rstd[bt] = forward_row(out, inp, weight, bias, bt, eps)


@kernel(ops.residual_layernorm_forward, "rows", parallel=False)
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Bound: compute.
    """
    for bt in range(inp1.shape[0]):
        mean[bt], rstd[bt] = residual_row(residual, out, inp1, inp2, weight, bias, bt, eps)
