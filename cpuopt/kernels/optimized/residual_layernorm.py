"""Residual and layer normalization on vectors: a row is added and normalized while it lies in the L1 cache."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from .layernorm import ZERO, normalize


@helper(forceinline=True)
def forward_row(residual, out, inp1, inp2, weight, bias, bt, eps):
    """Add row bt, and normalize the sum; return its mean and 1/std."""
    m = ZERO
    for i in range(inp1.shape[1]):
        t = inp1[bt, i] + inp2[bt, i]
        residual[bt, i] = t
        m += t
    return normalize(out, residual, weight, bias, bt, m, eps)


@kernel(ops.residual_layernorm_forward, "optimized")
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    for bt in prange(inp1.shape[0]):
        mean[bt], rstd[bt] = forward_row(residual, out, inp1, inp2, weight, bias, bt, eps)
