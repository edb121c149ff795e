"""SwiGLU and GeGLU: an activation that gates another value, element by element.

Forward, with f the SiLU (``cpuopt/ops/silu.py``) or the GELU in its tanh form (``cpuopt/ops/gelu.py``)::

    out = f(inp) * up

Backward::

    dinp += dout * up * f'(inp)
    dup  += dout * f(inp)

Source: Shazeer 2020 (arXiv 2002.05202), equation 5, without the products.
"""

from .declaration import HALF, N, Op, acc, inp, out
from .gelu import gelu_backward, gelu_forward
from .mul import mul_forward
from .silu import silu_backward, silu_forward

SOURCE = "Shazeer 2020, equation 5"


def gated(name, label, flops, activation, slope):
    """Declare an activation that gates another value, and its backward, from the ops of the activation alone.

    Parameters
    ----------
    flops : those of an element, forward; the backward has twice as many.
    """

    def reference_forward(inp, up):
        return {"out": activation.reference(inp)["out"] * up}

    def reference_backward(dout, inp, up):
        return {"dinp": slope.reference(dout * up, inp)["dinp"], "dup": dout * activation.reference(inp)["out"]}

    first = Op(
        f"{name}_forward",
        out("out", N, types=HALF),
        inp("inp", N, types=HALF, operand=False),
        inp("up", N, types=HALF, operand=False),
        label=f"{label} Forward",
        flops=flops * N,
        reference=reference_forward,
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
        inp("inp", N, types=HALF, operand=False),
        inp("up", N, types=HALF, operand=False),
        label=f"{label} Backward",
        flops=2 * flops * N,
        reference=reference_backward,
        source=SOURCE,
        inverts=first,
    )


swiglu_forward, swiglu_backward = gated("swiglu", "SwiGLU", 5, silu_forward, silu_backward)
geglu_forward, geglu_backward = gated("geglu", "GeGLU", 10, gelu_forward, gelu_backward)
