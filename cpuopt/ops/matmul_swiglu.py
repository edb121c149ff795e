"""A linear layer and the SwiGLU after it in one: each takes what the other gives while it lies in the cache.

Forward, where the other linear layer has made `up`::

    pre = inp @ weight^T + bias
    out = swiglu(pre, up)

Backward, for the linear layer that follows the SwiGLU, with the SwiGLU's inputs `pre` and `up`::

    dpre, dup = slopes of swiglu at (pre, up) times (dout @ weight)

Source: ``matmul_forward`` and ``swiglu_forward``; ``matmul_backward_input`` and ``swiglu_backward``.
"""

from .declaration import BT, HALF, OC, C, Op, inp, out
from .matmul import matmul_backward_input, matmul_forward
from .matmul import reference_forward as linear
from .swiglu import reference_backward as swiglu_slopes
from .swiglu import reference_forward as swiglu
from .swiglu import swiglu_backward, swiglu_forward


def reference_forward(inp, weight, bias, up):
    pre = linear(inp, weight, bias)["out"]
    return {"pre": pre, **swiglu(pre, up)}


def reference_backward(dout, weight, pre, up):
    slopes = swiglu_slopes(dout @ weight, pre, up)
    return {"dpre": slopes["dinp"], "dup": slopes["dup"]}


matmul_swiglu_forward = Op(
    "matmul_swiglu_forward",
    out("out", BT, OC, reduces=C, types=HALF),
    out("pre", BT, OC, reduces=C),
    inp("inp", BT, C, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("bias", OC, optional=True, start=0),
    inp("up", BT, OC),
    label="Matmul + SwiGLU Forward",
    flops=2 * BT * C * OC + 5 * BT * OC,
    reference=reference_forward,
    source="matmul_forward and swiglu_forward",
    fuses=(matmul_forward, swiglu_forward),
    renames={"inp": "pre"},
)

matmul_swiglu_backward = Op(
    "matmul_swiglu_backward",
    out("dpre", BT, C, reduces=OC, types=HALF),
    out("dup", BT, C, reduces=OC, types=HALF),
    inp("dout", BT, OC, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("pre", BT, C),
    inp("up", BT, C),
    label="Matmul + SwiGLU Backward dinp",
    flops=2 * BT * C * OC + 10 * BT * C,
    reference=reference_backward,
    source="matmul_backward_input and swiglu_backward",
    fuses=(matmul_backward_input, swiglu_backward),
    renames={"inp": "pre", "dinp": "dpre"},
)
