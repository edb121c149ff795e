"""A linear layer with an adapter of low rank: the sum of two products, each element of which is written once.

Forward::

    out = inp @ weight^T + bias + low @ up^T

The backward is that of the two products. `low` has R columns, of which there may be as many as one likes.

Source: Hu et al. 2021 (arXiv 2106.09685), equation 3; two of ``matmul_forward`` and ``residual_forward``.
"""

from .declaration import BT, HALF, OC, C, Op, R, inp, out
from .matmul import matmul_forward
from .matmul import reference_forward as linear
from .residual import residual_forward


def reference_forward(inp, weight, bias, low, up):
    return {"out": linear(inp, weight, bias)["out"] + low @ up.T}


matmul_adapter_forward = Op(
    "matmul_adapter_forward",
    out("out", BT, OC, reduces=C + R, types=HALF),
    inp("inp", BT, C, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("bias", OC, optional=True, start=0),
    inp("low", BT, R, types=HALF),
    inp("up", OC, R, types=HALF, fan_in=R),
    label="Matmul + Adapter Forward",
    flops=2 * BT * C * OC + 2 * BT * R * OC + 1 * BT * OC,
    reference=reference_forward,
    source="Hu et al. 2021, equation 3",
    fuses=(matmul_forward, matmul_forward, residual_forward),
)
