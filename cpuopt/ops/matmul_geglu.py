"""A linear layer and the GeGLU after it in one, as ``matmul_swiglu`` has the SwiGLU.

Forward, where the other linear layer has made `up`::

    pre = inp @ weight^T + bias
    out = geglu(pre, up)

Backward, for the linear layer that follows the GeGLU, with the GeGLU's inputs `pre` and `up`::

    dpre, dup = slopes of geglu at (pre, up) times (dout @ weight)

Source: ``matmul_forward`` and ``geglu_forward``; ``matmul_backward_input`` and ``geglu_backward``.
"""

from .geglu import geglu_backward, geglu_forward
from .geglu import reference_backward as geglu_slopes
from .geglu import reference_forward as geglu
from .matmul import reference_forward as linear
from .matmul_swiglu import linear_gated


def reference_forward(inp, weight, bias, up):
    pre = linear(inp, weight, bias)["out"]
    return {"pre": pre, **geglu(pre, up)}


def reference_backward(dout, weight, pre, up):
    slopes = geglu_slopes(dout @ weight, pre, up)
    return {"dpre": slopes["dinp"], "dup": slopes["dup"]}


matmul_geglu_forward, matmul_geglu_backward = linear_gated(
    *("geglu", "GeGLU", 10, geglu_forward, geglu_backward), reference_forward, reference_backward
)
