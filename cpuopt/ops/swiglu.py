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


def gated(name, label, flops, activation, forward, backward):
    """Declare an activation that gates another value, and its backward, from the references of both.

    Parameters
    ----------
    flops : those of an element, forward; the backward has twice as many.
    """
    first = Op(
        f"{name}_forward",
        out("out", N, types=HALF),
        inp("inp", N),
        inp("up", N),
        label=f"{label} Forward",
        flops=flops * N,
        reference=forward,
        source=SOURCE,
        role="activation",
        fuses=(activation, mul_forward),
        renames={"inp2": "up"},
    )
    return first, Op(
        f"{name}_backward",
        acc("dinp", N, types=HALF),
        acc("dup", N, types=HALF),
        inp("dout", N),
        inp("inp", N),
        inp("up", N),
        label=f"{label} Backward",
        flops=2 * flops * N,
        reference=backward,
        source=SOURCE,
        inverts=first,
    )


swiglu_forward, swiglu_backward = gated(*("swiglu", "SwiGLU", 5, silu_forward), reference_forward, reference_backward)
