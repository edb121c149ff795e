"""Lion, naive."""

import numpy as np

from ..compile.jit import helper

ONE = np.float32(1)


@helper()
def numbers(lr, beta1, beta2, weight_decay):
    """The numbers shared by all elements, in float64 until the end."""
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    return b1, c1, b2, c2, np.float32(lr), np.float32(lr * weight_decay)


@helper()
def update(param, m, grad, scale, numbers):
    """Follow the formula; the sign of zero is zero, and NaN stays."""
    b1, c1, b2, c2, rate, decay = numbers
    for i in range(grad.shape[0]):
        g = grad[i] * scale
        c = b1 * m[i] + c1 * g
        m[i] = b2 * m[i] + c2 * g
        sign = ONE if c > 0 else -ONE if c < 0 else c
        param[i] -= rate * sign + decay * param[i]
