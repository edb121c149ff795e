"""RMS normalization of few rows on one thread: to wake others would take longer."""

import numpy as np

from ... import ops
from ..compile.jit import kernel
from ..optimized.rmsnorm import forward_row


@kernel(ops.rmsnorm_forward, "rows", parallel=False)
def rmsnorm_forward(out, rstd, inp, weight, eps):
    """The mean of the squares, then the normalized group.

    Bound: compute.
    """
    for bt in range(inp.shape[0]):
        forward_row(out[bt], rstd[bt], inp[bt], weight, np.float32(eps))
