"""Layer normalization of few rows on one thread: to wake others would take longer."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.layernorm import forward_row


@kernel(ops.layernorm_forward, "rows", parallel=False)
def layernorm_forward(out, mean, rstd, inp, weight, bias, eps):
    """Mean, variance, then the normalized row.

    Bound: compute.
    """
    for bt in range(inp.shape[0]):
        mean[bt], rstd[bt] = forward_row(out, inp, weight, bias, bt, eps)
