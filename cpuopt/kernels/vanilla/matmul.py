"""Matrix product, naive: dot products forward, scaled rows added backward."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import BT, C
from ..compile.jit import kernel
from ..toolkit.rules import stepped


@kernel(ops.matmul_forward, "vanilla")
def matmul_forward(out, inp, weight, bias):
    """One dot product for each element of `out`.

    Parallel: the rows of `weight`; each iteration owns a column of `out`.
    Bound: compute.
    """
    BT, C = inp.shape
    for o in prange(weight.shape[0]):
        for bt in range(BT):
            val = bias[o] if bias.shape[0] > 0 else np.float32(0)
            for i in range(C):
                val += inp[bt, i] * weight[o, i]
            out[bt, o] = val


@kernel(ops.matmul_backward_input, "vanilla", scratch=[("sums", BT * C)])
def matmul_backward_input(dinp, dinp_add, dout, weight, sums):
    """Each row of `dinp` gathers the rows of `weight`, scaled by `dout`.

    Parallel: the rows of `dinp`.
    Memory: the sums in float32.
    Bound: the memory that `weight` streams through, once for each row.
    """
    OC, C = weight.shape
    total = sums.reshape(dinp.shape)
    for bt in prange(dinp.shape[0]):
        for i in range(C):
            total[bt, i] = dinp[bt, i] if dinp_add else 0
        for o in range(OC):
            d = dout[bt, o]
            for i in range(C):
                total[bt, i] += weight[o, i] * d  # out[bt, o] += inp[bt, i] * weight[o, i]
        for i in range(C):
            dinp[bt, i] = total[bt, i]


@stepped
@kernel(ops.matmul_backward_weight, "vanilla", skips=["dweight"])
def matmul_backward_weight(dweight, dweight_add, dbias, dbias_add, dout, inp):
    """Each row of `dweight` gathers the rows of `inp`, scaled by `dout`.

    Parallel: the rows of `dweight`.
    Bound: compute.
    """
    BT, C = inp.shape[0], dweight.shape[1]  # of a frozen weight, 0
    for o in prange(dout.shape[1]):
        if not dweight_add:
            for i in range(C):
                dweight[o, i] = 0
        dsum = np.float32(0)
        for bt in range(BT):
            d = dout[bt, o]
            dsum += d  # out[bt, o] += bias[o]
            for i in range(C):
                dweight[o, i] += inp[bt, i] * d  # out[bt, o] += inp[bt, i] * weight[o, i]
        if dbias.shape[0] > 0:
            dbias[o] = dbias[o] + dsum if dbias_add else dsum
