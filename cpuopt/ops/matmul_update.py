"""A linear layer's weight gradient and its optimizer's step in one: the gradient is never stored.

With dweight and dbias as in ``matmul_backward_weight``, and AdamW as the optimizer::

    weight, weight_m, weight_v = adamw(weight, weight_m, weight_v, dweight)
    bias, bias_m, bias_v       = adamw(bias, bias_m, bias_v, dbias), with bias_decay as its weight_decay
    sumsq                      = sum(dweight^2) + sum(dbias^2)

It stands for ``matmul_backward_weight``, ``sumsq`` and the optimizer where nothing else uses the gradient: no clipping
by the global norm, no second use of the weight.

Source: the three ops; the order, update in backward, is that of Lv et al. 2023 (LOMO, arXiv 2306.09782).
"""

import numpy as np

from .declaration import BT, HALF, OC, C, Op, inp, out
from .matmul import matmul_backward_weight
from .matmul import reference_backward_weight as gradients
from .optimizer import Optimizer, for_each_optimizer
from .sumsq import sumsq


@for_each_optimizer
def matmul_update(optimizer: Optimizer) -> Op:
    """Declare it for an optimizer."""

    def reference(**given):
        grads = gradients(given["dout"], given["inp"])
        found = optimizer.apply(given, "weight", grads["dweight"])
        total = (grads["dweight"] ** 2).sum()
        if given["bias"] is not None:
            found |= optimizer.apply(given, "bias", grads["dbias"], "bias_decay")
            total += (grads["dbias"] ** 2).sum()
        return found | {"sumsq": np.array([total])}

    return optimizer.fuse(
        "matmul_update",
        [
            *optimizer.places("weight", OC, C, reduces=BT, fan_in=C),
            *optimizer.places("bias", OC, reduces=BT, optional=True, start=0),
            out("sumsq", 1, reduces=BT + C + OC),  # summed by rows, then over rows
            inp("dout", BT, OC, types=HALF),
            inp("inp", BT, C, types=HALF),
            *optimizer.scalars("bias_decay"),
            *optimizer.counts,
        ],
        reference,
        label="Matmul Backward dw/db",
        flops=2 * BT * C * OC + (2 + optimizer.each) * OC * C,
        source=f"matmul_backward_weight, sumsq and {optimizer.name}; update in backward after Lv et al. 2023 (LOMO)",
        fuses=(matmul_backward_weight, sumsq),
    )
