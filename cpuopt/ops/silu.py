"""SiLU, also called swish.

Forward, with s = 1 / (1 + exp(-inp))::

    out = inp * s

Backward::

    dinp += dout * s * (1 + inp * (1 - s))

Source: Elfwing, Uchibe and Doya 2017 (arXiv 1702.03118), equation 5; ``torch.nn.functional.silu``.
"""

import numpy as np

from .declaration import HALF, N, Op, acc, inp, out

SOURCE = "Elfwing, Uchibe and Doya 2017, equation 5; torch.nn.functional.silu"


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow: exp(-log(1 + exp(-x)))."""
    return np.exp(-np.logaddexp(0, -x))


def reference_forward(inp):
    return {"out": inp * sigmoid(inp)}


def reference_backward(dout, inp):
    s = sigmoid(inp)
    return {"dinp": dout * s * (1 + inp * (1 - s))}


silu_forward = Op(
    "silu_forward",
    out("out", N, types=HALF),
    inp("inp", N, types=HALF, operand=False),
    label="SiLU Forward",
    flops=4 * N,
    reference=reference_forward,
    source=SOURCE,
    role="activation",
)

silu_backward = Op(
    "silu_backward",
    acc("dinp", N, types=HALF),
    inp("dout", N),
    inp("inp", N, types=HALF, operand=False),
    label="SiLU Backward",
    flops=8 * N,
    reference=reference_backward,
    source=SOURCE,
    inverts=silu_forward,
)
