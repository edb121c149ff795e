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
def rule(param, m, v, g, b1, c1, b2, c2, rate, root, small, decay):
    """Divide once."""
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return param - (rate * m / (np.sqrt(v) * root + small) + decay * param), m, v
