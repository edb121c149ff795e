"""The head and its loss over a weight in int8, in two ops: the loss and the gradient of the logits; that of the weight.

Forward, which only an evaluation needs; the rows of `inp` are quantized as in ``matmul_int8.py``::

    loss, losses = cross_entropy(step * scales * (q @ weight^T), targets)

Backward, which gives the loss as well::

    dlogits = d cross_entropy(...) * dloss

The logits exist for a block of tokens at a time, their gradient for all: ``matmul_int8_backward_input`` reads it, and
``head_backward_weight``, with whose gradient a lookup of the same weight shares one optimizer's step::

    dweight += dlogits^T @ inp

A token whose target is ignored has no logits, and zeros as their gradient.

Source: ``classifier`` and ``matmul_int8``.
"""

import numpy as np

from .classifier import losses_of
from .cross_entropy import counted
from .cross_entropy import reference_backward as loss_backward
from .cross_entropy import reference_forward as loss_forward
from .declaration import BT, HALF, IGNORE_INDEX, OC, C, Op, Updates, V, acc, index, inp, out, rounded
from .matmul_int8 import NUMBER, quantized

SOURCE = "classifier and matmul_int8"


def logits_of(inp, weight, scales):
    q, step = quantized(inp.astype(NUMBER))
    kind = inp.dtype
    return step.astype(kind) * scales * (q.astype(kind) @ weight.astype(kind).T)


def reference_forward(inp, weight, scales, targets, ignore_index):
    counts = targets != ignore_index
    return losses_of(counts, loss_forward(logits_of(inp[counts], weight, scales), targets[counts], ignore_index))


def reference_backward(dloss, inp, weight, scales, targets, ignore_index):
    counts = targets != ignore_index
    ids = targets[counts]
    logits = rounded(logits_of(inp[counts], weight, scales))
    found = loss_forward(logits, ids, ignore_index)
    dlogits = np.zeros((len(inp), len(weight)), logits.dtype)
    dlogits[counts] = loss_backward(dloss, logits, rounded(found["lse"]), ids, ignore_index)["dlogits"]
    return {**losses_of(counts, found), "dlogits": dlogits}


def reference_weight(dout, inp):
    return {"dweight": dout.T @ inp}


classifier_int8_forward = Op(
    "classifier_int8_forward",
    out("loss", 1, reduces=BT + V + C),
    out("losses", BT, reduces=V + C),
    inp("inp", BT, C, types=HALF),
    inp("weight", V, C, types=("int8",)),
    inp("scales", V),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Classifier int8 Forward",
    flops=2 * BT * C * V + 4 * BT * V,
    asked=counted,
    reference=reference_forward,
    source=SOURCE,
)

classifier_int8_backward = Op(
    "classifier_int8_backward",
    out("loss", 1, reduces=BT + V + C),
    out("losses", BT, reduces=V + C),
    out("dlogits", BT, V, reduces=V + C, types=HALF),
    inp("dloss", 1),
    inp("inp", BT, C, types=HALF),
    inp("weight", V, C, types=("int8",)),
    inp("scales", V),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Classifier int8",
    flops=2 * BT * C * V + 8 * BT * V,
    asked=counted,
    reference=reference_backward,
    source=SOURCE,
)

head_backward_weight = Op(
    "head_backward_weight",
    acc("dweight", OC, C, reduces=BT),
    inp("dout", BT, OC, types=HALF),
    inp("inp", BT, C, types=HALF),
    label="Head Backward dw",
    flops=2 * BT * C * OC,
    reference=reference_weight,
    source="matmul",
    updates=Updates("head_update", ("dweight",), aside="inp"),
)
