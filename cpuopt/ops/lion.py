"""Lion: the sign of a momentum, with weight decay apart from the gradient; one parameter tensor, updated in place.

With g = grad * grad_scale::

    param -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * param)
    m      = beta2 * m + (1 - beta2) * g

Source: Chen et al. 2023 (Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675), algorithm 2.
"""

import numpy as np

from .optimizer import Number, Optimizer, State


def reference(param, m, grad, lr, beta1, beta2, weight_decay, grad_scale):
    g = grad * grad_scale
    direction = np.sign(beta1 * m + (1 - beta1) * g)
    return {"param": param - lr * (direction + weight_decay * param), "m": beta2 * m + (1 - beta2) * g}


lion = Optimizer(
    "lion",
    states=(State("m"),),
    numbers=(Number("beta1", 0.9, below=1), Number("beta2", 0.99, below=1), Number("weight_decay", 0.0)),
    label="Lion",
    flops=12,
    reference=reference,
    source="Chen et al. 2023, algorithm 2",
)
