"""RMS normalization of few rows on one thread: to wake others would take longer."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.rmsnorm import forward_group, groups


@kernel(ops.rmsnorm_forward, "rows", parallel=False)
def rmsnorm_forward(out, rstd, inp, weight, eps):
    """The mean of the squares, then the normalized group.

    Bound: compute.
    """
    x, y, s = groups(inp, weight), groups(out, weight), rstd.reshape(rstd.size)
    for g in range(s.shape[0]):
        s[g] = forward_group(y, x, weight, g, eps)
