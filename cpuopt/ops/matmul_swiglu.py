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


def linear_gated(name, label, flops, gate, slopes, forward, backward):
    """Declare a linear layer with a gate, and one that makes the gradients of a gate, from the references of both.

    Parameters
    ----------
    flops : those of an element of the gate, forward; the backward has twice as many.
    gate, slopes : the ops of the gate alone, forward and backward.
    """
    first = Op(
        f"matmul_{name}_forward",
        out("out", BT, OC, reduces=C, types=HALF),
        out("pre", BT, OC, reduces=C),
        inp("inp", BT, C, types=HALF),
        inp("weight", OC, C, types=HALF, fan_in=C),
        inp("bias", OC, optional=True, start=0),
        inp("up", BT, OC),
        label=f"Matmul + {label} Forward",
        flops=2 * BT * C * OC + flops * BT * OC,
        reference=forward,
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
        inp("pre", BT, C),
        inp("up", BT, C),
        label=f"Matmul + {label} Backward dinp",
        flops=2 * BT * C * OC + 2 * flops * BT * C,
        reference=backward,
        source=f"matmul_backward_input and {slopes.name}",
        fuses=(matmul_backward_input, slopes),
        renames={"inp": "pre", "dinp": "dpre"},
    )


matmul_swiglu_forward, matmul_swiglu_backward = linear_gated(
    *("swiglu", "SwiGLU", 5, swiglu_forward, swiglu_backward), reference_forward, reference_backward
)
