"""Product of two values of one shape, element by element; and of a value with a number, plus another.

Forward::

    out = inp1 * inp2                      mul
    out = factor * inp + shift             scale

Backward::

    dinp1 += dout * inp2
    dinp2 += dout * inp1
    dinp  += factor * dout

Source: ``torch.mul``, ``torch.add``.
"""

from .declaration import N, Op, acc, inp, out, scalar

SOURCE = "torch.mul"


def reference_forward(inp1, inp2):
    return {"out": inp1 * inp2}


def reference_backward(dout, inp1, inp2):
    return {"dinp1": dout * inp2, "dinp2": dout * inp1}


def reference_scale(inp, factor, shift):
    return {"out": factor * inp + shift}


def reference_scale_backward(dout, factor):
    return {"dinp": factor * dout}


mul_forward = Op(
    "mul_forward",
    out("out", N),
    inp("inp1", N),
    inp("inp2", N),
    label="Mul Forward",
    flops=1 * N,
    reference=reference_forward,
    source=SOURCE,
    role="gate",
)

mul_backward = Op(
    "mul_backward",
    acc("dinp1", N),
    acc("dinp2", N),
    inp("dout", N),
    inp("inp1", N),
    inp("inp2", N),
    label="Mul Backward",
    flops=2 * N,
    reference=reference_backward,
    source=SOURCE,
    inverts=mul_forward,
)

scale_forward = Op(
    "scale_forward",
    out("out", N),
    inp("inp", N),
    scalar("factor", low=-2, high=2, usual=1),
    scalar("shift", low=-2, high=2),
    label="Scale Forward",
    flops=2 * N,
    reference=reference_scale,
    source=SOURCE,
)

scale_backward = Op(
    "scale_backward",
    acc("dinp", N),
    inp("dout", N),
    scalar("factor", low=-2, high=2, usual=1),
    label="Scale Backward",
    flops=1 * N,
    reference=reference_scale_backward,
    source=SOURCE,
    inverts=scale_forward,
)
