"""Layer normalization of each row, with a learned scale and shift; alone, and of a sum while that lies in the cache.

Forward, for each row of ``inp``::

    mean = sum(inp) / C
    rstd = 1 / sqrt(sum((inp - mean)^2) / C + eps)
    xhat = (inp - mean) * rstd
    out  = xhat * weight + bias

Backward, with g = dout * weight::

    dinp    += rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))
    dweight += sum over rows of dout * xhat
    dbias   += sum over rows of dout

``residual_layernorm`` is a residual connection and the normalization of its sum in one::

    residual = inp1 + inp2
    out, mean, rstd = layernorm(residual, weight, bias, eps)

Source: Ba, Kiros and Hinton 2016 (arXiv 1607.06450), equation 4; ``torch.nn.functional.layer_norm``.
"""

import numpy as np

from .declaration import BT, EPS, HALF, C, Op, acc, inp, out, rounded
from .residual import residual_forward

SOURCE = "Ba, Kiros and Hinton 2016, equation 4; torch.nn.functional.layer_norm"


def reference_forward(inp, weight, bias, eps):
    mean = inp.mean(axis=-1)
    rstd = 1 / np.sqrt(inp.var(axis=-1) + eps)
    xhat = (inp - mean[:, None]) * rstd[:, None]
    return {"out": xhat * weight + bias, "mean": mean, "rstd": rstd}


def reference_backward(dout, inp, weight, mean, rstd):
    xhat = (inp - mean[:, None]) * rstd[:, None]
    g = dout * weight
    centred = g - rounded(g.mean(axis=-1, keepdims=True)) - xhat * (g * xhat).mean(axis=-1, keepdims=True)
    return {"dinp": rstd[:, None] * centred, "dweight": (dout * xhat).sum(axis=0), "dbias": dout.sum(axis=0)}


def reference_residual(inp1, inp2, weight, bias, eps):
    return {"residual": inp1 + inp2, **reference_forward(inp1 + inp2, weight, bias, eps)}


layernorm_forward = Op(
    "layernorm_forward",
    out("out", BT, C, reduces=C, types=HALF),
    out("mean", BT, reduces=C),
    out("rstd", BT, reduces=C),
    inp("inp", BT, C),
    inp("weight", C, start=1),
    inp("bias", C, start=0),
    EPS,
    label="Layernorm Forward",
    flops=8 * BT * C,
    reference=reference_forward,
    source=SOURCE,
    role="normalization",
)

layernorm_backward = Op(
    "layernorm_backward",
    acc("dinp", BT, C, reduces=C),
    acc("dweight", C, reduces=BT),
    acc("dbias", C, reduces=BT),
    inp("dout", BT, C),
    inp("inp", BT, C),
    inp("weight", C, start=1),
    inp("mean", BT),
    inp("rstd", BT),
    label="Layernorm Backward",
    flops=16 * BT * C,
    reference=reference_backward,
    source=SOURCE,
    inverts=layernorm_forward,
)
residual_layernorm_forward = Op(
    "residual_layernorm_forward",
    out("residual", BT, C),
    out("out", BT, C, reduces=C, types=HALF),
    out("mean", BT, reduces=C),
    out("rstd", BT, reduces=C),
    inp("inp1", BT, C),
    inp("inp2", BT, C),
    inp("weight", C, start=1),
    inp("bias", C, start=0),
    EPS,
    label="Residual + Layernorm Forward",
    flops=9 * BT * C,
    reference=reference_residual,
    source="residual_forward and layernorm_forward",
    fuses=(residual_forward, layernorm_forward),
    renames={"inp": "residual"},
)
