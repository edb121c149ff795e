"""AdamW: Adam with weight decay apart from the gradient; one parameter tensor, updated in place.

With g = grad * grad_scale and step counted from 1::

    m      = beta1 * m + (1 - beta1) * g
    v      = beta2 * v + (1 - beta2) * g^2
    param -= lr * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay * param)

Source: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2; ``torch.optim.AdamW``; ``gpt2_update`` of llm.c.
"""

import numpy as np

from .optimizer import Number, Optimizer, State


def reference(param, m, v, grad, lr, beta1, beta2, eps, weight_decay, grad_scale, step):
    g = grad * grad_scale
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    direction = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return {"param": param - lr * (direction + weight_decay * param), "m": m, "v": v}


adamw = Optimizer(
    "adamw",
    states=(State("m"), State("v", negative=False)),
    numbers=(
        Number("beta1", 0.9, below=1),
        Number("beta2", 0.999, below=1),
        Number("eps", 1e-8, positive=True),
        Number("weight_decay", 0.0),
    ),
    label="AdamW",
    flops=16,
    reference=reference,
    source="Loshchilov and Hutter 2019, algorithm 2; torch.optim.AdamW",
    files="adam",
)
