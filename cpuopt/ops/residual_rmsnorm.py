"""A residual connection and the RMS normalization of its sum in one, while the sum lies in the cache.

::

    residual = inp1 + inp2
    out, rstd = rmsnorm(residual, weight, eps)

Source: ``residual_forward`` and ``rmsnorm_forward``.
"""

from .declaration import BT, EPS, HALF, C, G, Op, inp, out
from .residual import residual_forward
from .rmsnorm import reference_forward as rmsnorm
from .rmsnorm import rmsnorm_forward


def reference(inp1, inp2, weight, eps):
    return {"residual": inp1 + inp2, **rmsnorm(inp1 + inp2, weight, eps)}


residual_rmsnorm_forward = Op(
    "residual_rmsnorm_forward",
    out("residual", BT, G * C),
    out("out", BT, G * C, reduces=C, types=HALF),
    out("rstd", BT, G, reduces=C),
    inp("inp1", BT, G * C),
    inp("inp2", BT, G * C),
    inp("weight", C, start=1),
    EPS,
    label="Residual + RMSNorm Forward",
    flops=5 * BT * G * C,
    reference=reference,
    source="residual_forward and rmsnorm_forward",
    fuses=(residual_forward, rmsnorm_forward),
    renames={"inp": "residual"},
)
