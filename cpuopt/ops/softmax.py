"""Softmax over the last axis.

Forward::

    out[bt, v] = exp(inp[bt, v] - top) / sum_v exp(inp[bt, v] - top),   top = max_v inp[bt, v]

Backward::

    dinp[bt, v] += out[bt, v] * (dout[bt, v] - sum_u out[bt, u] * dout[bt, u])

Source: ``torch.nn.functional.softmax``; ``softmax_forward`` of llm.c.
"""

import numpy as np

from .declaration import BT, Op, V, acc, inp, out

SOURCE = "torch.nn.functional.softmax"


def reference_forward(inp):
    e = np.exp(inp - inp.max(axis=-1, keepdims=True))
    return {"out": e / e.sum(axis=-1, keepdims=True)}


def reference_backward(dout, out):
    return {"dinp": out * (dout - (out * dout).sum(axis=-1, keepdims=True))}


softmax_forward = Op(
    "softmax_forward",
    out("out", BT, V, reduces=V),
    inp("inp", BT, V),
    label="Softmax/Cross-entropy Forward",
    flops=5 * BT * V,
    reference=reference_forward,
    source=SOURCE,
)

softmax_backward = Op(
    "softmax_backward",
    acc("dinp", BT, V, reduces=V),
    inp("dout", BT, V),
    inp("out", BT, V),
    label="Softmax/Cross-entropy Backward",
    flops=4 * BT * V,
    reference=reference_backward,
    source=SOURCE,
    inverts=softmax_forward,
)
