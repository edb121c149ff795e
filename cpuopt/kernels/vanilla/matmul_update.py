"""Weight gradient and AdamW step in one, naive: a row of the gradient at a time."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import OC, C
from ..compile.jit import kernel


@kernel(ops.matmul_update, "vanilla", scratch=[("row", OC * C), ("partial", OC)])
def matmul_update(
    weight, weight_m, weight_v, bias, bias_m, bias_v, sumsq, dout, inp, lr, beta1, beta2, eps, weight_decay, bias_decay,
    step, row, partial,
):  # fmt: skip
    """The gradient of a row of `weight`, then the step of that row.

    Parallel: the rows of `weight`; the squares are summed in the order of the rows.
    Memory: the gradient, a row at a time.
    Bound: compute.
    """
    BT, C = inp.shape
    OC = weight.shape[0]
    b1, b2 = np.float32(beta1), np.float32(beta2)
    c1, c2 = np.float32(1 - beta1), np.float32(1 - beta2)
    m_unbias = np.float32(1 / (1 - beta1**step))
    v_unbias = np.float32(1 / (1 - beta2**step))
    rate, small = np.float32(lr), np.float32(eps)
    decay, decay_bias = np.float32(lr * weight_decay), np.float32(lr * bias_decay)
    for o in prange(OC):
        # pass 1: the gradient of the row, and of its bias
        g = row[o * C : (o + 1) * C]
        for i in range(C):
            g[i] = 0
        db = np.float32(0)
        for bt in range(BT):
            d = dout[bt, o]
            db += d
            for i in range(C):
                g[i] += inp[bt, i] * d
        # pass 2: AdamW
        total = np.float32(0)
        for i in range(C):
            mi = b1 * weight_m[o, i] + c1 * g[i]
            vi = b2 * weight_v[o, i] + c2 * g[i] * g[i]
            weight_m[o, i] = mi
            weight_v[o, i] = vi
            weight[o, i] -= rate * (mi * m_unbias) / (np.sqrt(vi * v_unbias) + small) + decay * weight[o, i]
            total += g[i] * g[i]
        if bias.shape[0] > 0:
            mi = b1 * bias_m[o] + c1 * db
            vi = b2 * bias_v[o] + c2 * db * db
            bias_m[o] = mi
            bias_v[o] = vi
            bias[o] -= rate * (mi * m_unbias) / (np.sqrt(vi * v_unbias) + small) + decay_bias * bias[o]
            total += db * db
        partial[o] = total
    total = np.float32(0)
    for o in range(OC):
        total += partial[o]
    sumsq[0] = total
