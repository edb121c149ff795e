"""Nesterov momentum, naive."""

import numpy as np

from ..compile.jit import helper


@helper()
def numbers(lr, momentum):
    """The scalars in float32."""
    return np.float32(lr), np.float32(momentum)


@helper()
def update(param, velocity, grad, scale, rate, momentum):
    """Follow the formula."""
    for i in range(grad.shape[0]):
        g = grad[i] * scale
        v = momentum * velocity[i] + g
        velocity[i] = v
        param[i] -= rate * (g + momentum * v)
