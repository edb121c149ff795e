"""AdamW with one division an element."""

import numpy as np

from ..compile.jit import helper


@helper()
def numbers(lr, beta1, beta2, eps, weight_decay, step):
    """``rate = lr / (1 - beta1^step)``, ``root = 1 / sqrt(1 - beta2^step)``; in float64 until the end."""
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    rate, root = np.float32(lr / (1 - beta1**step)), np.float32(1 / np.sqrt(1 - beta2**step))
    return b1, c1, b2, c2, rate, root, np.float32(eps), np.float32(lr * weight_decay)


@helper()
def update(param, m, v, grad, scale, numbers):
    """Divide once."""
    b1, c1, b2, c2, rate, root, small, decay = numbers
    for i in range(grad.shape[0]):
        g = grad[i] * scale
        mi = b1 * m[i] + c1 * g
        vi = b2 * v[i] + c2 * (g * g)
        m[i] = mi
        v[i] = vi
        param[i] -= rate * mi / (np.sqrt(vi) * root + small) + decay * param[i]
