"""AdamW on vectors: one pass, seven streams."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel

CHUNK = 8192  # elements: 32 KB a stream, so that a chunk's four arrays fill 128 KB of the L2 cache


@helper()
def update(param, m, v, grad, b1, c1, b2, c2, rate, root, small, decay, scale):
    """Divide once: ``rate = lr / (1 - beta1^step)``, ``root = 1 / sqrt(1 - beta2^step)``."""
    for i in range(param.shape[0]):
        g = grad[i] * scale
        mi = b1 * m[i] + c1 * g
        vi = b2 * v[i] + c2 * (g * g)
        m[i] = mi
        v[i] = vi
        param[i] -= rate * mi / (np.sqrt(vi) * root + small) + decay * param[i]


@kernel(ops.adamw, "optimized")
def adamw(param, m, v, grad, lr, beta1, beta2, eps, weight_decay, grad_scale, step):
    """Chunk by chunk; what is the same for all elements is computed once, in float64.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    rate, root = np.float32(lr / (1 - beta1**step)), np.float32(1 / np.sqrt(1 - beta2**step))
    small, decay, scale = np.float32(eps), np.float32(lr * weight_decay), np.float32(grad_scale)
    n = param.shape[0]
    for chunk in prange((n + CHUNK - 1) // CHUNK):
        lo, hi = chunk * CHUNK, min(chunk * CHUNK + CHUNK, n)
        update(param[lo:hi], m[lo:hi], v[lo:hi], grad[lo:hi], b1, c1, b2, c2, rate, root, small, decay, scale)
