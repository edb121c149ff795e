"""AdamW, naive."""

import numpy as np

from ..compile.jit import helper


@helper()
def numbers(lr, beta1, beta2, eps, weight_decay, step):
    """The numbers shared by all elements, in float64 until the end."""
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    m_unbias = np.float32(1 / (1 - beta1**step))
    v_unbias = np.float32(1 / (1 - beta2**step))
    return b1, c1, b2, c2, m_unbias, v_unbias, np.float32(lr), np.float32(eps), np.float32(lr * weight_decay)


@helper()
def update(param, m, v, grad, scale, numbers):
    """Follow the formula."""
    b1, c1, b2, c2, m_unbias, v_unbias, rate, small, decay = numbers
    for i in range(grad.shape[0]):
        g = grad[i] * scale
        mi = b1 * m[i] + c1 * g
        vi = b2 * v[i] + c2 * g * g
        m[i] = mi
        v[i] = vi
        param[i] -= rate * (mi * m_unbias) / (np.sqrt(vi * v_unbias) + small) + decay * param[i]
