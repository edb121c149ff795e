"""Layer normalization on vectors, a row at a time while it lies in the L1 cache; parameters' gradients by chunks."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import C
from ..compile.jit import helper, kernel
from ..toolkit.constants import ONE, ZERO

CHUNKS = 32  # of rows, each with its own partial dweight and dbias: enough for many threads, few enough to add up fast


@helper(forceinline=True)
def forward_row(out, inp, weight, bias, bt, eps):
    """Compute the mean and 1/std of row bt, and its normalized form in `out`."""
    # pass 1: mean
    m = ZERO
    for i in range(inp.shape[1]):
        m += inp[bt, i]
    return normalize(out, inp, weight, bias, bt, m, eps)


@helper(forceinline=True)
def normalize(out, inp, weight, bias, bt, total, eps):
    """Normalize row bt, given its sum; return mean and 1/std."""
    C = inp.shape[1]
    m = total / np.float32(C)
    # pass 2: variance
    v = ZERO
    for i in range(C):
        d = inp[bt, i] - m
        v += d * d
    s = ONE / np.sqrt(v / np.float32(C) + np.float32(eps))
    # pass 3: normalize, scale, shift
    for i in range(C):
        out[bt, i] = (inp[bt, i] - m) * s * weight[i] + bias[i]
    return m, s


@helper(forceinline=True)
def residual_row(residual, out, inp1, inp2, weight, bias, bt, eps):
    """Add row bt, and normalize the sum; return its mean and 1/std."""
    m = ZERO
    for i in range(inp1.shape[1]):
        t = inp1[bt, i] + inp2[bt, i]
        residual[bt, i] = t
        m += t
    return normalize(out, residual, weight, bias, bt, m, eps)


@helper(forceinline=True)
def backward_row(dinp, dinp_add, dweight, dbias, dout, inp, weight, m, s):
    """Compute or add the gradient of a row; add its share to dweight and dbias."""
    C = inp.shape[0]
    # pass 1: the two means
    g_mean, g_xhat_mean = ZERO, ZERO
    for i in range(C):
        g = weight[i] * dout[i]
        g_mean += g
        g_xhat_mean += g * ((inp[i] - m) * s)
    g_mean /= np.float32(C)
    g_xhat_mean /= np.float32(C)
    # pass 2: out[i] = xhat[i] * weight[i] + bias[i]
    for i in range(C):
        xhat = (inp[i] - m) * s
        d = (weight[i] * dout[i] - g_mean - xhat * g_xhat_mean) * s
        dinp[i] = dinp[i] + d if dinp_add else d
        dweight[i] += dout[i] * xhat
        dbias[i] += dout[i]


@helper()
def combine(grad, add, partial, chunks, stride):
    """Sum the chunks' partial gradients in their order."""
    for i in range(grad.shape[0]):
        grad[i] = grad[i] if add else ZERO
    for chunk in range(chunks):
        part = partial[chunk * stride : chunk * stride + grad.shape[0]]
        for i in range(grad.shape[0]):
            grad[i] += part[i]


@kernel(ops.layernorm_forward, "optimized")
def layernorm_forward(out, mean, rstd, inp, weight, bias, eps):
    """Mean, variance, then the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    for bt in prange(inp.shape[0]):
        mean[bt], rstd[bt] = forward_row(out, inp, weight, bias, bt, eps)


@kernel(ops.layernorm_backward, "optimized", scratch=[("partial", CHUNKS * 2 * C)])
def layernorm_backward(dinp, dinp_add, dweight, dweight_add, dbias, dbias_add, dout, inp, weight, mean, rstd, partial):
    """Both passes over a row give its gradient and its share of the parameters' gradients.

    Parallel: chunks of rows, whose number the threads do not change; their partial sums are added in order.
    Memory: dweight and dbias for each chunk.
    Bound: memory.
    """
    BT, C = inp.shape
    chunks = min(BT, CHUNKS)
    for chunk in prange(chunks):
        dw = partial[2 * chunk * C : 2 * chunk * C + C]
        db = partial[2 * chunk * C + C : 2 * chunk * C + 2 * C]
        for i in range(C):
            dw[i] = ZERO
            db[i] = ZERO
        for bt in range(BT * chunk // chunks, BT * (chunk + 1) // chunks):
            backward_row(dinp[bt], dinp_add, dw, db, dout[bt], inp[bt], weight, mean[bt], rstd[bt])
    combine(dweight, dweight_add, partial, chunks, 2 * C)
    combine(dbias, dbias_add, partial[C:], chunks, 2 * C)


@kernel(ops.residual_layernorm_forward, "optimized")
def residual_layernorm_forward(residual, out, mean, rstd, inp1, inp2, weight, bias, eps):
    """The sum, then mean, variance and the normalized row.

    Parallel: the rows.
    Bound: memory.
    """
    for bt in prange(inp1.shape[0]):
        mean[bt], rstd[bt] = residual_row(residual, out, inp1, inp2, weight, bias, bt, eps)
