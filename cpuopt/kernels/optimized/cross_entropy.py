"""Cross-entropy with its softmax on vectors: one pass over a row, in all but unusual ones; one logarithm a row."""

import numpy as np
from numba import prange

from ... import ops
from ..jit import helper, kernel
from ..lanes import exp, load, load_some, select_some, spread, store, store_some, sum_lanes
from ..simd import LANES
from .softmax import HUGE, SAMPLE, row_max

ZERO = np.float32(0)


@helper()
def sum_exp(logits, lo, hi, top):
    """Sum exp(logits - top)."""
    whole = hi - (hi - lo) % LANES
    total = spread(ZERO)
    for i in range(lo, whole, LANES):
        total = total + exp(load(logits, i) - top)
    n = hi - whole
    if n > 0:
        total = total + select_some(n, exp(load_some(logits, whole, n) - top), spread(ZERO))
    return sum_lanes(total)


@helper()
def log_sum_exp(logits, lo, hi):
    """Give log(sum(exp(logits))); any number near the maximum or below can stand for it, as long as no exp is huge."""
    top = row_max(logits, lo, min(lo + SAMPLE, hi))
    total = sum_exp(logits, lo, hi, top)
    if not total < HUGE:  # NaN too
        top = row_max(logits, lo, hi)
        total = sum_exp(logits, lo, hi, top)
    return np.log(total) + top


@helper()
def backward_row(dlogits, dlogits_add, logits, lse, share, lo, hi):
    """Give or add ``share * softmax(logits)``."""
    whole = hi - (hi - lo) % LANES
    n = hi - whole
    for i in range(lo, whole, LANES):
        d = exp(load(logits, i) - lse) * share
        store(dlogits, i, load(dlogits, i) + d if dlogits_add else d)
    if n > 0:
        d = exp(load_some(logits, whole, n) - lse) * share
        store_some(dlogits, whole, load_some(dlogits, whole, n) + d if dlogits_add else d, n)


@kernel(ops.cross_entropy_forward, "optimized")
def cross_entropy_forward(loss, losses, lse, logits, targets, ignore_index):
    """The sum of exp for each row, then the mean of the losses in the order of the rows.

    Parallel: the rows; the mean is serial.
    Bound: compute, the exp.
    """
    BT, V = logits.shape
    for bt in prange(BT):
        lse[bt] = log_sum_exp(logits, np.int64(bt) * V, np.int64(bt) * V + V)
        losses[bt] = lse[bt] - logits[bt, targets[bt]] if targets[bt] != ignore_index else ZERO
    total = 0.0
    n = 0
    for bt in range(BT):
        total += losses[bt]
        n += targets[bt] != ignore_index
    loss[0] = total / n


@kernel(ops.cross_entropy_backward, "optimized")
def cross_entropy_backward(dlogits, dlogits_add, dloss, logits, lse, targets, ignore_index):
    """Each row's probabilities again, then one less at its target.

    Parallel: the rows.
    Bound: memory and the exp, about even.
    """
    BT, V = logits.shape
    n = 0
    for bt in range(BT):
        n += targets[bt] != ignore_index
    share = dloss[0] / np.float32(max(n, 1))
    for bt in prange(BT):
        if targets[bt] != ignore_index:
            backward_row(dlogits, dlogits_add, logits, lse[bt], share, np.int64(bt) * V, np.int64(bt) * V + V)
            dlogits[bt, targets[bt]] -= share  # loss = sum(lse - logits[target]) / n
        elif not dlogits_add:
            for v in range(V):
                dlogits[bt, v] = ZERO
