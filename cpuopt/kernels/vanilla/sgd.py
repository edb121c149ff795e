"""SGD with momentum, naive."""

import numpy as np

from ..compile.jit import helper


@helper()
def numbers(lr, momentum, weight_decay):
    """The scalars in float32."""
    return np.float32(lr), np.float32(momentum), np.float32(weight_decay)


@helper()
def rule(param, velocity, g, rate, momentum, decay):
    """As the formula has it."""
    velocity = momentum * velocity + (g + decay * param)
    return param - rate * velocity, velocity
