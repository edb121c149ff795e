"""Residual and RMS normalization on vectors: a group is added and normalized while it lies in the L1 cache."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from .rmsnorm import ZERO, groups, normalize


@helper(forceinline=True)
def forward_group(residual, out, inp1, inp2, weight, g, eps):
    """Add group g, and normalize the sum; return 1/rms."""
    v = ZERO
    for i in range(weight.shape[0]):
        t = inp1[g, i] + inp2[g, i]
        residual[g, i] = t
        v += t * t
    return normalize(out, residual, weight, g, v, eps)


@kernel(ops.residual_rmsnorm_forward, "optimized")
def residual_rmsnorm_forward(residual, out, rstd, inp1, inp2, weight, eps):
    """The sum with the mean of its squares, then the normalized group.

    Parallel: the groups of all rows.
    Bound: memory.
    """
    x, y = groups(inp1, weight), groups(inp2, weight)
    total, normalized = groups(residual, weight), groups(out, weight)
    s = rstd.reshape(rstd.size)
    for g in prange(s.shape[0]):
        s[g] = forward_group(total, normalized, x, y, weight, g, eps)
