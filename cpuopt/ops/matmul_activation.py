"""A linear layer and the activation after it in one: each takes what the other gives while it lies in the cache.

Forward::

    pre = inp @ weight^T + bias
    out = gelu(pre)

Backward, for the linear layer that follows the activation, with the activation's input `pre`::

    dpre = (dout @ weight) * gelu'(pre)

If the activation gates a value `up`, which another linear layer has made (``cpuopt/ops/gated.py``)::

    out = gate(pre, up)
    dpre, dup = slopes of gate at (pre, up) times (dout @ weight)

Source: ``matmul_forward`` and the activation's forward; ``matmul_backward_input`` and the activation's backward.
"""

from .declaration import BT, HALF, OC, C, Op, inp, operand, out
from .gated import geglu_backward, geglu_forward, swiglu_backward, swiglu_forward
from .gelu import gelu_backward, gelu_forward
from .matmul import matmul_backward_input, matmul_forward
from .matmul import reference_forward as linear


def product_and_gelu(inp, weight, bias):
    pre = linear(inp, weight, bias)["out"]
    return {"pre": pre, **gelu_forward.reference(operand(pre))}


def product_and_slope(dout, weight, pre):
    return {"dpre": gelu_backward.reference(dout @ weight, pre)["dinp"]}


matmul_gelu_forward = Op(
    "matmul_gelu_forward",
    out("out", BT, OC, reduces=C, types=HALF),
    out("pre", BT, OC, reduces=C, types=HALF),
    inp("inp", BT, C, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("bias", OC, optional=True, start=0),
    label="Matmul + GELU Forward",
    flops=2 * BT * C * OC + 9 * BT * OC,
    reference=product_and_gelu,
    source="matmul_forward and gelu_forward",
    fuses=(matmul_forward, gelu_forward),
    renames={"inp": "pre"},
)

matmul_gelu_backward = Op(
    "matmul_gelu_backward",
    out("dpre", BT, C, reduces=OC, types=HALF),
    inp("dout", BT, OC, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("pre", BT, C, types=HALF, operand=False),
    label="Matmul + GELU Backward dinp",
    flops=2 * BT * C * OC + 18 * BT * C,
    reference=product_and_slope,
    source="matmul_backward_input and gelu_backward",
    fuses=(matmul_backward_input, gelu_backward),
    renames={"inp": "pre", "dinp": "dpre"},
)


def linear_gated(name, label, flops, gate, slopes):
    """Declare a linear layer with a gate, and one that makes the gradients of a gate.

    Parameters
    ----------
    flops : those of an element of the gate, forward; the backward has twice as many.
    gate, slopes : the ops of the gate alone, forward and backward.
    """

    def reference_forward(inp, weight, bias, up):
        pre = linear(inp, weight, bias)["out"]
        return {"pre": pre, **gate.reference(operand(pre), up)}

    def reference_backward(dout, weight, pre, up):
        found = slopes.reference(dout @ weight, pre, up)
        return {"dpre": found["dinp"], "dup": found["dup"]}

    first = Op(
        f"matmul_{name}_forward",
        out("out", BT, OC, reduces=C, types=HALF),
        out("pre", BT, OC, reduces=C, types=HALF),
        inp("inp", BT, C, types=HALF),
        inp("weight", OC, C, types=HALF, fan_in=C),
        inp("bias", OC, optional=True, start=0),
        inp("up", BT, OC, types=HALF, operand=False),
        label=f"Matmul + {label} Forward",
        flops=2 * BT * C * OC + flops * BT * OC,
        reference=reference_forward,
        source=f"matmul_forward and {gate.name}",
        fuses=(matmul_forward, gate),
        renames={"inp": "pre"},
    )
    return first, Op(
        f"matmul_{name}_backward",
        out("dpre", BT, C, reduces=OC, types=HALF),
        out("dup", BT, C, reduces=OC, types=HALF),
        inp("dout", BT, OC, types=HALF),
        inp("weight", OC, C, types=HALF, fan_in=C),
        inp("pre", BT, C, types=HALF, operand=False),
        inp("up", BT, C, types=HALF, operand=False),
        label=f"Matmul + {label} Backward dinp",
        flops=2 * BT * C * OC + 2 * flops * BT * C,
        reference=reference_backward,
        source=f"matmul_backward_input and {slopes.name}",
        fuses=(matmul_backward_input, slopes),
        renames={"inp": "pre", "dinp": "dpre"},
    )


matmul_swiglu_forward, matmul_swiglu_backward = linear_gated("swiglu", "SwiGLU", 5, swiglu_forward, swiglu_backward)
matmul_geglu_forward, matmul_geglu_backward = linear_gated("geglu", "GeGLU", 10, geglu_forward, geglu_backward)
