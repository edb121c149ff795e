"""AdamW, naive: one loop over the parameters."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.adamw, "vanilla")
def adamw(param, m, v, grad, lr, beta1, beta2, eps, weight_decay, grad_scale, step):
    """Element by element; what is the same for all is computed once, in float64.

    Parallel: the elements.
    Bound: memory.
    """
    b1, b2 = np.float32(beta1), np.float32(beta2)
    c1, c2 = np.float32(1 - beta1), np.float32(1 - beta2)
    m_unbias = np.float32(1 / (1 - beta1**step))
    v_unbias = np.float32(1 / (1 - beta2**step))
    rate, small, decay, scale = np.float32(lr), np.float32(eps), np.float32(lr * weight_decay), np.float32(grad_scale)
    for i in prange(param.shape[0]):
        g = grad[i] * scale
        mi = b1 * m[i] + c1 * g
        vi = b2 * v[i] + c2 * g * g
        m[i] = mi
        v[i] = vi
        param[i] -= rate * (mi * m_unbias) / (np.sqrt(vi * v_unbias) + small) + decay * param[i]
