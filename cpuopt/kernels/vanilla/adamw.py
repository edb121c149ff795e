"""AdamW, naive."""

import numpy as np

from ..compile.jit import helper


@helper()
def numbers(lr, beta1, beta2, eps, weight_decay, step):
    """What is the same for all elements, in float64 until the end."""
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    m_unbias = np.float32(1 / (1 - beta1**step))
    v_unbias = np.float32(1 / (1 - beta2**step))
    return b1, c1, b2, c2, m_unbias, v_unbias, np.float32(lr), np.float32(eps), np.float32(lr * weight_decay)


@helper()
def rule(param, m, v, g, b1, c1, b2, c2, m_unbias, v_unbias, rate, small, decay):
    """As the formula has it."""
    m = b1 * m + c1 * g
    v = b2 * v + c2 * g * g
    param -= rate * (m * m_unbias) / (np.sqrt(v * v_unbias) + small) + decay * param
    return param, m, v
