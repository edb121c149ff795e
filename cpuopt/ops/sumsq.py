"""Sum of squares of a tensor: one parameter's share of the gradient's global norm.

::

    out = sum(inp^2)

The norm is sqrt of the sum of all shares. Source: ``torch.nn.utils.clip_grad_norm_``.
"""

import numpy as np

from .declaration import N, Op, inp, out


def reference(inp):
    return {"out": np.array([(inp**2).sum()])}


sumsq = Op(
    "sumsq",
    out("out", 1, reduces=N),
    inp("inp", N),
    label="Gradient norm",
    flops=2 * N,
    reference=reference,
    source="torch.nn.utils.clip_grad_norm_",
)
