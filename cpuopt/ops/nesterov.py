"""Gradient descent with Nesterov momentum; one parameter tensor, updated in place.

With g = grad * grad_scale::

    velocity = momentum * velocity + g
    param   -= lr * (g + momentum * velocity)

Source: Sutskever et al. 2013 (On the importance of initialization and momentum in deep learning), section 3, in the
form of ``torch.optim.SGD(nesterov=True)``; the outer optimizer of Douillard et al. 2023 (DiLoCo, arXiv 2311.08105).
"""

from .optimizer import Number, Optimizer, State


def reference(param, velocity, grad, lr, momentum, grad_scale):
    g = grad * grad_scale
    velocity = momentum * velocity + g
    return {"param": param - lr * (g + momentum * velocity), "velocity": velocity}


nesterov = Optimizer(
    "nesterov",
    states=(State("velocity"),),
    numbers=(Number("momentum", 0.9, below=1),),
    label="Nesterov",
    flops=7,
    reference=reference,
    source="Sutskever et al. 2013, section 3; torch.optim.SGD(nesterov=True)",
    files="outer",
)
