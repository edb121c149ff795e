"""Softmax over a row, naive."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.softmax_forward, "vanilla")
def softmax_forward(out, inp):
    """Maximum, then exp and its sum, then the quotient.

    Parallel: the rows.
    Bound: compute, the exp.
    """
    BT, V = inp.shape
    for bt in prange(BT):
        top = np.float32(-np.inf)
        for v in range(V):
            top = max(top, inp[bt, v])
        total = np.float32(0)
        for v in range(V):
            e = np.exp(inp[bt, v] - top)
            total += e
            out[bt, v] = e
        for v in range(V):
            out[bt, v] /= total


@kernel(ops.softmax_backward, "vanilla")
def softmax_backward(dinp, dinp_add, dout, out):
    """The weighted sum of the row's adjoints, then each element.

    Parallel: the rows.
    Bound: memory.
    """
    BT, V = out.shape
    for bt in prange(BT):
        dot = np.float32(0)
        for v in range(V):
            dot += out[bt, v] * dout[bt, v]
        for v in range(V):
            d = out[bt, v] * (dout[bt, v] - dot)  # out = exp(inp - top) / sum
            dinp[bt, v] = dinp[bt, v] + d if dinp_add else d
