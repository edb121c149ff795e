"""Softmax over a row on vectors, without a pass for the maximum in all but unusual rows."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.constants import LOWEST, ONE, ZERO
from ..toolkit.lanes import exp, larger, load, load_some, max_lanes, select_some, spread, store, store_some, sum_lanes
from ..toolkit.simd import LANES

SAMPLE = 256  # elements whose maximum stands for the row's, unless exp of some other is huge
HUGE = np.float32(1e30)  # the sum of exp that a row may reach: it and its inverse are far from overflow and underflow


@helper()
def row_max(x, lo, hi):
    """Compute the largest of x[lo:hi]; NaN is passed over, and shows when it comes to the sum of exp.

    Four maxima are under way at a time, because each waits for the one before.
    """
    m0 = m1 = m2 = m3 = spread(LOWEST)
    i = lo
    while i + 4 * LANES <= hi:
        m0, m1 = larger(load(x, i), m0), larger(load(x, i + LANES), m1)
        m2, m3 = larger(load(x, i + 2 * LANES), m2), larger(load(x, i + 3 * LANES), m3)
        i += 4 * LANES
    while i < hi:
        m0 = larger(select_some(hi - i, load_some(x, i, hi - i), spread(LOWEST)), m0)
        i += LANES
    return max_lanes(larger(larger(m0, m1), larger(m2, m3)))


@helper()
def exps(out, inp, lo, hi, top):
    """Write exp(inp - top), and return the sum."""
    whole = hi - (hi - lo) % LANES
    n = hi - whole
    total = spread(ZERO)
    for i in range(lo, whole, LANES):
        e = exp(load(inp, i) - top)
        store(out, i, e)
        total = total + e
    if n > 0:
        e = exp(load_some(inp, whole, n) - top)
        store_some(out, whole, e, n)
        total = total + select_some(n, e, spread(ZERO))
    return sum_lanes(total)


@helper()
def forward_row(out, inp, lo, hi):
    """Do one row."""
    # pass 1: exp, and the sum; any number near the maximum or below can stand for it
    total = exps(out, inp, lo, hi, row_max(inp, lo, min(lo + SAMPLE, hi)))
    if not total < HUGE:  # NaN too
        total = exps(out, inp, lo, hi, row_max(inp, lo, hi))
    # pass 2: the quotient
    factor = ONE / total
    whole = hi - (hi - lo) % LANES
    for i in range(lo, whole, LANES):
        store(out, i, load(out, i) * factor)
    if whole < hi:
        store_some(out, whole, load_some(out, whole, hi - whole) * factor, hi - whole)


@helper()
def backward_row(dinp, dinp_add, dout, out):
    """Do one row."""
    # pass 1: the weighted sum of the adjoints
    dot = ZERO
    for v in range(out.shape[0]):
        dot += out[v] * dout[v]
    # pass 2: out = exp(inp - top) / sum
    if dinp_add:
        for v in range(out.shape[0]):
            dinp[v] += out[v] * (dout[v] - dot)
    else:
        for v in range(out.shape[0]):
            dinp[v] = out[v] * (dout[v] - dot)


@kernel(ops.softmax_forward, "optimized")
def softmax_forward(out, inp):
    """Exp and its sum, then the quotient.

    Parallel: the rows.
    Bound: compute, the exp.
    """
    BT, V = inp.shape
    for bt in prange(BT):
        forward_row(out, inp, np.int64(bt) * V, np.int64(bt) * V + V)


@kernel(ops.softmax_backward, "optimized")
def softmax_backward(dinp, dinp_add, dout, out):
    """The weighted sum of the row's adjoints, then each element.

    Parallel: the rows.
    Bound: memory.
    """
    for bt in prange(out.shape[0]):
        backward_row(dinp[bt], dinp_add, dout[bt], out[bt])
