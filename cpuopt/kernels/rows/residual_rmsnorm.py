"""Residual and RMS normalization of few rows on one thread: to wake others would take longer."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.residual_rmsnorm import forward_group
from ..optimized.rmsnorm import groups


@kernel(ops.residual_rmsnorm_forward, "rows", parallel=False)
def residual_rmsnorm_forward(residual, out, rstd, inp1, inp2, weight, eps):
    """The sum with the mean of its squares, then the normalized group.

    Bound: compute.
    """
    x, y, s = groups(inp1, weight), groups(inp2, weight), rstd.reshape(rstd.size)
    total, normalized = groups(residual, weight), groups(out, weight)
    for g in range(s.shape[0]):
        s[g] = forward_group(total, normalized, x, y, weight, g, eps)
