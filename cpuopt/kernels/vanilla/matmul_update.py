"""Weight gradient and its optimizer's step in one, naive: a row of the gradient at a time."""

import numpy as np
from numba import prange

from ...ops.declaration import OC, C
from ..compile.jit import helper
from ..toolkit.rules import by_rule


@by_rule("vanilla", "matmul_update", "weight", "bias", scratch=[("row", OC * C), ("partial", OC)])
def matmul_update(rule):
    """The gradient of a row of `weight`, then the step of that row.

    Parallel: the rows of `weight`; the squares are summed in the order of the rows.
    Memory: the gradient, a row at a time.
    Bound: compute.
    """
    rows, update = rule.rows, rule.update

    @helper(parallel=True)
    def matmul_update(weight, bias, weight_numbers, bias_numbers, sumsq, dout, inp, row, partial):
        BT, C = inp.shape
        OC = dout.shape[1]
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
            # pass 2: the optimizer
            update(rows(weight, o), g, np.float32(1), weight_numbers)
            total = np.float32(0)
            for i in range(C):
                total += g[i] * g[i]
            if bias[0].shape[0] > 0:
                g[0] = db
                update(rows(bias, slice(o, o + 1)), g[:1], np.float32(1), bias_numbers)
                total += db * db
            partial[o] = total
        total = np.float32(0)
        for o in range(OC):
            total += partial[o]
        sumsq[0] = total

    return matmul_update
