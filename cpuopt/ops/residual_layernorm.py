"""A residual connection and the layer normalization of its sum in one, while the sum lies in the cache.

::

    residual = inp1 + inp2
    out, mean, rstd = layernorm(residual, weight, bias, eps)

Source: ``residual_forward`` and ``layernorm_forward``.
"""

from .declaration import BT, EPS, HALF, C, Op, inp, out
from .layernorm import layernorm_forward
from .layernorm import reference_forward as layernorm
from .residual import residual_forward


def reference(inp1, inp2, weight, bias, eps):
    return {"residual": inp1 + inp2, **layernorm(inp1 + inp2, weight, bias, eps)}


residual_layernorm_forward = Op(
    "residual_layernorm_forward",
    out("residual", BT, C),
    out("out", BT, C, reduces=C, types=HALF),
    out("mean", BT, reduces=C),
    out("rstd", BT, reduces=C),
    inp("inp1", BT, C),
    inp("inp2", BT, C),
    inp("weight", C, start=1),
    inp("bias", C, start=0),
    EPS,
    label="Residual + Layernorm Forward",
    flops=9 * BT * C,
    reference=reference,
    source="residual_forward and layernorm_forward",
    fuses=(residual_forward, layernorm_forward),
    renames={"inp": "residual"},
)
