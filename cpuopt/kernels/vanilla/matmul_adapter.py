"""A linear layer with an adapter of low rank, naive: two dot products for each element."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.matmul_adapter_forward, "vanilla")
def matmul_adapter_forward(out, inp, weight, bias, low, up):
    """Two dot products for each element of `out`.

    Parallel: the rows of `weight`; each iteration owns a column of `out`.
    Bound: compute.
    """
    BT, C = inp.shape
    for o in prange(weight.shape[0]):
        for bt in range(BT):
            val = bias[o] if bias.shape[0] > 0 else np.float32(0)
            for i in range(C):
                val += inp[bt, i] * weight[o, i]
            for i in range(low.shape[1]):
                val += low[bt, i] * up[o, i]
            out[bt, o] = val
