"""GeGLU: a GELU in its tanh form that gates another value, element by element.

Forward, with u = sqrt(2/pi) * (inp + 0.044715 * inp^3)::

    out = inp/2 * (1 + tanh(u)) * up

Backward::

    dinp += dout * up * ((1 + tanh(u))/2 + inp/2 * (1 - tanh(u)^2) * sqrt(2/pi) * (1 + 3 * 0.044715 * inp^2))
    dup  += dout * inp/2 * (1 + tanh(u))

Source: Shazeer 2020 (arXiv 2002.05202), equation 5, without the products.
"""

from .gelu import gelu_forward
from .gelu import reference_backward as gelu_slope
from .gelu import reference_forward as gelu
from .swiglu import gated


def reference_forward(inp, up):
    return {"out": gelu(inp)["out"] * up}


def reference_backward(dout, inp, up):
    return {"dinp": gelu_slope(dout * up, inp)["dinp"], "dup": dout * gelu(inp)["out"]}


geglu_forward, geglu_backward = gated("geglu", "GeGLU", 10, gelu_forward, reference_forward, reference_backward)
