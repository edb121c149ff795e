"""GELU in its tanh form.

Forward, with u = sqrt(2/pi) * (inp + 0.044715 * inp^3)::

    out = inp/2 * (1 + tanh(u))

Backward::

    dinp += dout * ((1 + tanh(u))/2 + inp/2 * (1 - tanh(u)^2) * sqrt(2/pi) * (1 + 3 * 0.044715 * inp^2))

Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2; ``torch.nn.functional.gelu(approximate="tanh")``.
"""

from math import pi, sqrt

import numpy as np

from .declaration import HALF, N, Op, acc, inp, out, rounded

SOURCE = 'Hendrycks and Gimpel 2016, section 2; torch.nn.functional.gelu(approximate="tanh")'


def reference_forward(inp):
    return {"out": 0.5 * inp * (1 + rounded(np.tanh(sqrt(2 / pi) * (inp + 0.044715 * inp * inp**2))))}


def reference_backward(dout, inp):
    t = rounded(np.tanh(sqrt(2 / pi) * (inp + 0.044715 * inp * inp**2)))
    du = sqrt(2 / pi) * (1 + 3 * 0.044715 * inp**2)
    return {"dinp": dout * (0.5 * (1 + t) + 0.5 * inp * (1 - t**2) * du)}


gelu_forward = Op(
    "gelu_forward",
    out("out", N, types=HALF),
    inp("inp", N, types=HALF, operand=False),
    label="GELU Forward",
    flops=9 * N,
    reference=reference_forward,
    source=SOURCE,
    role="activation",
)

gelu_backward = Op(
    "gelu_backward",
    acc("dinp", N, types=HALF),
    inp("dout", N),
    inp("inp", N, types=HALF, operand=False),
    label="GELU Backward",
    flops=18 * N,
    reference=reference_backward,
    source=SOURCE,
    inverts=gelu_forward,
)
