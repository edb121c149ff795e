"""SGD with momentum, naive."""

import numpy as np

from ..compile.jit import helper


@helper()
def numbers(lr, momentum, weight_decay):
    """The scalars in float32."""
    return np.float32(lr), np.float32(momentum), np.float32(weight_decay)


@helper()
def update(param, velocity, grad, scale, numbers):
    """Follow the formula."""
    rate, momentum, decay = numbers
    for i in range(grad.shape[0]):
        v = momentum * velocity[i] + (grad[i] * scale + decay * param[i])
        velocity[i] = v
        param[i] -= rate * v
