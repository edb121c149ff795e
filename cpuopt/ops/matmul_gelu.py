"""A linear layer and the GELU after it in one: each takes what the other gives while it lies in the cache.

Forward::

    pre = inp @ weight^T + bias
    out = gelu(pre)

Backward, for the linear layer that follows the GELU, with the GELU's input `pre`::

    dpre = (dout @ weight) * gelu'(pre)

Source: ``matmul_forward`` and ``gelu_forward``; ``matmul_backward_input`` and ``gelu_backward``.
"""

from .declaration import BT, HALF, OC, C, Op, inp, out
from .gelu import gelu_backward, gelu_forward
from .gelu import reference_backward as gelu_slope
from .gelu import reference_forward as gelu
from .matmul import matmul_backward_input, matmul_forward
from .matmul import reference_forward as linear


def reference_forward(inp, weight, bias):
    pre = linear(inp, weight, bias)["out"]
    return {"pre": pre, **gelu(pre)}


def reference_backward(dout, weight, pre):
    return {"dpre": gelu_slope(dout @ weight, pre)["dinp"]}


matmul_gelu_forward = Op(
    "matmul_gelu_forward",
    out("out", BT, OC, reduces=C, types=HALF),
    out("pre", BT, OC, reduces=C),
    inp("inp", BT, C, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("bias", OC, optional=True, start=0),
    label="Matmul + GELU Forward",
    flops=2 * BT * C * OC + 9 * BT * OC,
    reference=reference_forward,
    source="matmul_forward and gelu_forward",
    fuses=(matmul_forward, gelu_forward),
    renames={"inp": "pre"},
)

matmul_gelu_backward = Op(
    "matmul_gelu_backward",
    out("dpre", BT, C, reduces=OC, types=HALF),
    inp("dout", BT, OC, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("pre", BT, C),
    label="Matmul + GELU Backward dinp",
    flops=2 * BT * C * OC + 18 * BT * C,
    reference=reference_backward,
    source="matmul_backward_input and gelu_backward",
    fuses=(matmul_backward_input, gelu_backward),
    renames={"inp": "pre", "dinp": "dpre"},
)
