"""Root-mean-square normalization of each row, or of G groups of C channels in each row; with a learned scale.

Forward, for each group of ``inp``::

    rstd = 1 / sqrt(sum(inp^2) / C + eps)
    xhat = inp * rstd
    out  = xhat * weight

Backward, with g = dout * weight::

    dinp    += rstd * (g - xhat * mean_C(g * xhat))
    dweight += sum over rows and groups of dout * xhat

``residual_rmsnorm`` is a residual connection and the normalization of its sum in one, while the sum lies in the cache::

    residual = inp1 + inp2
    out, rstd = rmsnorm(residual, weight, eps)

Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4; ``torch.nn.functional.rms_norm``. The groups are the
heads of q and k in Qwen3.
"""

import numpy as np

from .declaration import BT, EPS, HALF, C, G, Op, acc, inp, out
from .residual import residual_forward

SOURCE = "Zhang and Sennrich 2019, equation 4; torch.nn.functional.rms_norm"


def groups(x, weight):
    """Split (BT, G*C) into (BT, G, C)."""
    return x.reshape(len(x), -1, len(weight))


def reference_forward(inp, weight, eps):
    x = groups(inp, weight)
    rstd = 1 / np.sqrt((x**2).mean(axis=-1) + eps)
    return {"out": (x * rstd[..., None] * weight).reshape(inp.shape), "rstd": rstd}


def reference_backward(dout, inp, weight, rstd):
    xhat, d = groups(inp, weight) * rstd[..., None], groups(dout, weight)
    g = d * weight
    dinp = rstd[..., None] * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    return {"dinp": dinp.reshape(inp.shape), "dweight": (d * xhat).sum(axis=(0, 1))}


def reference_residual(inp1, inp2, weight, eps):
    return {"residual": inp1 + inp2, **reference_forward(inp1 + inp2, weight, eps)}


rmsnorm_forward = Op(
    "rmsnorm_forward",
    out("out", BT, G * C, reduces=C, types=HALF),
    out("rstd", BT, G, reduces=C),
    inp("inp", BT, G * C),
    inp("weight", C, start=1),
    EPS,
    label="RMSNorm Forward",
    flops=4 * BT * G * C,
    reference=reference_forward,
    source=SOURCE,
    role="normalization",
)

rmsnorm_backward = Op(
    "rmsnorm_backward",
    acc("dinp", BT, G * C, reduces=C),
    acc("dweight", C, reduces=BT * G),
    inp("dout", BT, G * C),
    inp("inp", BT, G * C),
    inp("weight", C, start=1),
    inp("rstd", BT, G),
    label="RMSNorm Backward",
    flops=10 * BT * G * C,
    reference=reference_backward,
    source=SOURCE,
    inverts=rmsnorm_forward,
)
residual_rmsnorm_forward = Op(
    "residual_rmsnorm_forward",
    out("residual", BT, G * C),
    out("out", BT, G * C, reduces=C, types=HALF),
    out("rstd", BT, G, reduces=C),
    inp("inp1", BT, G * C),
    inp("inp2", BT, G * C),
    inp("weight", C, start=1),
    EPS,
    label="Residual + RMSNorm Forward",
    flops=5 * BT * G * C,
    reference=reference_residual,
    source="residual_forward and rmsnorm_forward",
    fuses=(residual_forward, rmsnorm_forward),
    renames={"inp": "residual"},
)
