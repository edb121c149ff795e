"""Functions of one value, element by element.

Forward, with its backward::

    relu         out = max(inp, 0)             dinp += dout where inp > 0
    tanh         out = tanh(inp)               dinp += dout * (1 - out^2)
    sigmoid      out = 1 / (1 + exp(-inp))     dinp += dout * out * (1 - out)
    reciprocal   out = 1 / inp                 dinp -= dout / inp^2

The gradient of relu at 0 is 0. A quotient is the product with a reciprocal.

Source: ``torch.nn.functional.relu``, ``torch.tanh``, ``torch.sigmoid``, ``torch.reciprocal``.
"""

from inspect import signature

import numpy as np

from .declaration import N, Op, acc, inp, out
from .silu import sigmoid


def declare(name, label, flops, forward, backward):
    """Declare a function and its backward, which reads what its reference takes besides dout."""
    source = f"torch.{name}"
    first = Op(
        f"{name}_forward",
        out("out", N),
        inp("inp", N),
        label=f"{label} Forward",
        flops=flops * N,
        reference=forward,
        source=source,
    )
    _, read = signature(backward).parameters
    return first, Op(
        f"{name}_backward",
        acc("dinp", N),
        inp("dout", N),
        inp(read, N),
        label=f"{label} Backward",
        flops=(flops + 1) * N,
        reference=backward,
        source=source,
        inverts=first,
    )


def relu(inp):
    return {"out": np.maximum(inp, 0)}


def relu_slope(dout, inp):
    return {"dinp": np.where(inp <= 0, 0, dout)}


def tanh(inp):
    return {"out": np.tanh(inp)}


def tanh_slope(dout, out):
    return {"dinp": dout * (1 - out**2)}


def logistic(inp):
    return {"out": sigmoid(inp)}


def logistic_slope(dout, inp):
    return {"dinp": dout * sigmoid(inp) * sigmoid(-inp)}


def reciprocal(inp):
    with np.errstate(divide="ignore"):
        return {"out": 1 / inp}


def reciprocal_slope(dout, inp):
    with np.errstate(divide="ignore"):
        return {"dinp": -dout / inp**2}


relu_forward, relu_backward = declare("relu", "ReLU", 1, relu, relu_slope)
tanh_forward, tanh_backward = declare("tanh", "Tanh", 1, tanh, tanh_slope)
sigmoid_forward, sigmoid_backward = declare("sigmoid", "Sigmoid", 4, logistic, logistic_slope)
reciprocal_forward, reciprocal_backward = declare("reciprocal", "Reciprocal", 1, reciprocal, reciprocal_slope)
