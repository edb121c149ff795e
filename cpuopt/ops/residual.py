"""Sum of two values of one shape: the residual connection.

Forward::

    out = inp1 + inp2

Backward::

    dinp1 += dout
    dinp2 += dout

Source: He et al. 2015 (arXiv 1512.03385), equation 1; ``torch.add``.
"""

from .declaration import N, Op, acc, inp, out

SOURCE = "He et al. 2015, equation 1; torch.add"


def reference_forward(inp1, inp2):
    return {"out": inp1 + inp2}


def reference_backward(dout):
    return {"dinp1": dout, "dinp2": dout}


residual_forward = Op(
    "residual_forward",
    out("out", N),
    inp("inp1", N),
    inp("inp2", N),
    label="Residual Forward",
    flops=1 * N,
    reference=reference_forward,
    source=SOURCE,
    role="sum",
)

residual_backward = Op(
    "residual_backward",
    acc("dinp1", N),
    acc("dinp2", N),
    inp("dout", N),
    label="Residual Backward",
    flops=2 * N,
    reference=reference_backward,
    source=SOURCE,
    inverts=residual_forward,
)
