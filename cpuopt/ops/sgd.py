"""Stochastic gradient descent with momentum; one parameter tensor, updated in place.

With g = grad * grad_scale + weight_decay * param::

    velocity = momentum * velocity + g
    param   -= lr * velocity

Source: Sutskever et al. 2013 (On the importance of initialization and momentum in deep learning), section 2, in the
form of ``torch.optim.SGD``, where the learning rate is no part of the velocity.
"""

from .optimizer import Number, Optimizer, State


def reference(param, velocity, grad, lr, momentum, weight_decay, grad_scale):
    velocity = momentum * velocity + (grad * grad_scale + weight_decay * param)
    return {"param": param - lr * velocity, "velocity": velocity}


sgd = Optimizer(
    "sgd",
    states=(State("velocity"),),
    numbers=(Number("momentum", 0.9, below=1), Number("weight_decay", 0.0)),
    label="SGD",
    flops=7,
    reference=reference,
    source="Sutskever et al. 2013, section 2; torch.optim.SGD",
)
