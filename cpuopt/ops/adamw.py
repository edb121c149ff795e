"""AdamW: Adam with weight decay apart from the gradient; one parameter tensor, updated in place.

With g = grad * grad_scale and step counted from 1::

    m      = beta1 * m + (1 - beta1) * g
    v      = beta2 * v + (1 - beta2) * g^2
    param -= lr * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay * param)

Source: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2; ``torch.optim.AdamW``; ``gpt2_update`` of llm.c.
"""

import numpy as np

from .declaration import N, Op, inp, scalar, state


def reference(param, m, v, grad, lr, beta1, beta2, eps, weight_decay, grad_scale, step):
    g = grad * grad_scale
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    direction = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return {"param": param - lr * (direction + weight_decay * param), "m": m, "v": v}


adamw = Op(
    "adamw",
    state("param", N),
    state("m", N),
    state("v", N),
    inp("grad", N),
    scalar("lr"),
    scalar("beta1"),
    scalar("beta2"),
    scalar("eps"),
    scalar("weight_decay"),
    scalar("grad_scale"),
    scalar("step", integer=True),
    label="AdamW",
    flops=16 * N,
    reference=reference,
    source="Loshchilov and Hutter 2019, algorithm 2; torch.optim.AdamW",
)
