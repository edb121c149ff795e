"""RMS normalization of few rows on one thread: to wake others would take longer."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.rmsnorm import forward_group, groups, residual_group


@kernel(ops.rmsnorm_forward, "rows", parallel=False)
def rmsnorm_forward(out, rstd, inp, weight, eps):
    """The mean of the squares, then the normalized group.

    Bound: compute.
    """
    x, y, s = groups(inp, weight), groups(out, weight), rstd.reshape(rstd.size)
    for g in range(s.shape[0]):
        s[g] = forward_group(y, x, weight, g, eps)


@kernel(ops.residual_rmsnorm_forward, "rows", parallel=False)
def residual_rmsnorm_forward(residual, out, rstd, inp1, inp2, weight, eps):
    """The sum with the mean of its squares, then the normalized group.

    Bound: compute.
    """
    x, y, s = groups(inp1, weight), groups(inp2, weight), rstd.reshape(rstd.size)
    total, normalized = groups(residual, weight), groups(out, weight)
    for g in range(s.shape[0]):
        s[g] = residual_group(total, normalized, x, y, weight, g, eps)
