"""A linear layer's weight gradient and its AdamW step in one: the gradient is never stored.

With dweight and dbias as in ``matmul_backward_weight``::

    weight, weight_m, weight_v = adamw(weight, weight_m, weight_v, dweight)
    bias, bias_m, bias_v       = adamw(bias, bias_m, bias_v, dbias), with bias_decay as its weight_decay
    sumsq                      = sum(dweight^2) + sum(dbias^2)

It stands for ``matmul_backward_weight``, ``sumsq`` and ``adamw`` where nothing else uses the gradient: no clipping by
the global norm, no second use of the weight.

Source: the three ops; the order, update in backward, is that of Lv et al. 2023 (LOMO, arXiv 2306.09782).
"""

import numpy as np

from .adamw import adamw
from .adamw import reference as adamw_reference
from .declaration import BT, OC, C, Op, inp, out, scalar, state
from .matmul import matmul_backward_weight
from .matmul import reference_backward_weight as gradients
from .sumsq import sumsq


def reference(  # the declared arguments
    weight,
    weight_m,
    weight_v,
    bias,
    bias_m,
    bias_v,
    dout,
    inp,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias_decay,
    step,
):
    grads = gradients(dout, inp)
    hyper = (lr, beta1, beta2, eps)
    new = adamw_reference(weight, weight_m, weight_v, grads["dweight"], *hyper, weight_decay, 1.0, step)
    result = {"weight": new["param"], "weight_m": new["m"], "weight_v": new["v"]}
    total = (grads["dweight"] ** 2).sum()
    if bias is not None:
        new = adamw_reference(bias, bias_m, bias_v, grads["dbias"], *hyper, bias_decay, 1.0, step)
        result |= {"bias": new["param"], "bias_m": new["m"], "bias_v": new["v"]}
        total += (grads["dbias"] ** 2).sum()
    return result | {"sumsq": np.array([total])}


matmul_update = Op(
    "matmul_update",
    state("weight", OC, C, reduces=BT),
    state("weight_m", OC, C, reduces=BT),
    state("weight_v", OC, C, reduces=BT),
    state("bias", OC, reduces=BT, optional=True),
    state("bias_m", OC, reduces=BT, optional=True),
    state("bias_v", OC, reduces=BT, optional=True),
    out("sumsq", 1, reduces=BT + C + OC),  # summed by rows, then over rows
    inp("dout", BT, OC),
    inp("inp", BT, C),
    scalar("lr"),
    scalar("beta1"),
    scalar("beta2"),
    scalar("eps"),
    scalar("weight_decay"),
    scalar("bias_decay"),
    scalar("step", integer=True),
    label="Matmul Backward dw/db + AdamW",
    flops=2 * BT * C * OC + 18 * OC * C,
    reference=reference,
    source="matmul_backward_weight, sumsq and adamw; update in backward after Lv et al. 2023 (LOMO)",
    fuses=(matmul_backward_weight, sumsq, adamw),
)
