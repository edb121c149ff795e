"""SwiGLU: a SiLU that gates another value, element by element.

Forward, with s = 1 / (1 + exp(-inp))::

    out = inp * s * up

Backward::

    dinp += dout * up * s * (1 + inp * (1 - s))
    dup  += dout * inp * s

Source: Shazeer 2020 (arXiv 2002.05202), equation 5, without the products.
"""

from .declaration import HALF, N, Op, acc, inp, out
from .mul import mul_forward
from .silu import reference_backward as silu_slope
from .silu import reference_forward as silu
from .silu import silu_forward

SOURCE = "Shazeer 2020, equation 5"


def reference_forward(inp, up):
    return {"out": silu(inp)["out"] * up}


def reference_backward(dout, inp, up):
    return {"dinp": silu_slope(dout * up, inp)["dinp"], "dup": dout * silu(inp)["out"]}


swiglu_forward = Op(
    "swiglu_forward",
    out("out", N, types=HALF),
    inp("inp", N),
    inp("up", N),
    label="SwiGLU Forward",
    flops=5 * N,
    reference=reference_forward,
    source=SOURCE,
    role="activation",
    fuses=(silu_forward, mul_forward),
    renames={"inp2": "up"},
)

swiglu_backward = Op(
    "swiglu_backward",
    acc("dinp", N, types=HALF),
    acc("dup", N, types=HALF),
    inp("dout", N),
    inp("inp", N),
    inp("up", N),
    label="SwiGLU Backward",
    flops=10 * N,
    reference=reference_backward,
    source=SOURCE,
    inverts=swiglu_forward,
)
