"""RMS normalization on vectors, a group at a time while it lies in the L1 cache; the weight's gradient by chunks."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import C
from ..compile.jit import helper, kernel
from ..toolkit.constants import ONE, ZERO
from ..toolkit.fastmath import EXACT
from .layernorm import CHUNKS, combine


@helper(fastmath=EXACT, forceinline=True)
def inverse_root(x):
    """Compute 1/sqrt(x): by an estimate, as LLVM may otherwise, it would be NaN if x is infinite."""
    return ONE / np.sqrt(x)


@helper()
def groups(x, weight):
    """View the groups of all rows as rows."""
    C = weight.shape[0]
    return x.reshape(x.size // C, C)


@helper(forceinline=True)
def normalize(out, inp, weight, g, squares, eps):
    """Normalize group g, given the sum of its squares, and scale it; return 1/rms."""
    C = weight.shape[0]
    s = inverse_root(squares / np.float32(C) + np.float32(eps))
    for i in range(C):
        out[g, i] = inp[g, i] * s * weight[i]
    return s


@helper(forceinline=True)
def forward_group(out, inp, weight, g, eps):
    """Normalize group g; return 1/rms."""
    v = ZERO
    for i in range(weight.shape[0]):
        v += inp[g, i] * inp[g, i]
    return normalize(out, inp, weight, g, v, eps)


@helper(forceinline=True)
def residual_group(residual, out, inp1, inp2, weight, g, eps):
    """Add group g, and normalize the sum; return 1/rms."""
    v = ZERO
    for i in range(weight.shape[0]):
        t = inp1[g, i] + inp2[g, i]
        residual[g, i] = t
        v += t * t
    return normalize(out, residual, weight, g, v, eps)


@helper(forceinline=True)
def backward_row(dinp, dinp_add, dweight, dout, inp, weight, s):
    """Compute or add the gradient of a group; add its share to dweight."""
    C = weight.shape[0]
    # pass 1: the mean
    g_xhat_mean = ZERO
    for i in range(C):
        g_xhat_mean += weight[i] * dout[i] * inp[i]
    g_xhat_mean *= s / np.float32(C)
    # pass 2: out[i] = xhat * weight[i]
    for i in range(C):
        xhat = inp[i] * s
        d = (weight[i] * dout[i] - xhat * g_xhat_mean) * s
        dinp[i] = dinp[i] + d if dinp_add else d
        dweight[i] += dout[i] * xhat


@kernel(ops.rmsnorm_forward, "optimized")
def rmsnorm_forward(out, rstd, inp, weight, eps):
    """The mean of the squares, then the normalized group.

    Parallel: the groups of all rows.
    Bound: memory.
    """
    x, y = groups(inp, weight), groups(out, weight)
    s = rstd.reshape(rstd.size)  # of a view that a helper returns, numba would drop the assignments below
    for g in prange(s.shape[0]):
        s[g] = forward_group(y, x, weight, g, eps)


@kernel(ops.rmsnorm_backward, "optimized", scratch=[("partial", CHUNKS * C)])
def rmsnorm_backward(dinp, dinp_add, dweight, dweight_add, dout, inp, weight, rstd, partial):
    """Both passes over a group give its gradient and its share of the weight's gradient.

    Parallel: chunks of rows, whose number the threads do not change; their partial sums are added in order.
    Memory: dweight for each chunk.
    Bound: memory.
    """
    BT, G = rstd.shape
    C = weight.shape[0]
    chunks = min(BT, CHUNKS)
    for chunk in prange(chunks):
        dw = partial[chunk * C : chunk * C + C]
        for i in range(C):
            dw[i] = ZERO
        for bt in range(BT * chunk // chunks, BT * (chunk + 1) // chunks):
            for g in range(G):
                here = slice(g * C, g * C + C)
                backward_row(dinp[bt, here], dinp_add, dw, dout[bt, here], inp[bt, here], weight, rstd[bt, g])
    combine(dweight, dweight_add, partial, chunks, C)


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
        s[g] = residual_group(total, normalized, x, y, weight, g, eps)
