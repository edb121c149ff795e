"""Cross-entropy with its softmax on vectors: one pass over a row, in all but unusual ones; one logarithm a row."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.constants import ZERO
from ..toolkit.lanes import exp, load, load_some, select_some, spread, store, store_some, sum_lanes
from ..toolkit.simd import LANES
from .softmax import HUGE, SAMPLE, row_max


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
def shifted_sum(logits, lo, hi):
    """Compute sum(exp(logits - top)) and top: a number near the maximum, or below it as long as no exp is huge."""
    top = row_max(logits, lo, min(lo + SAMPLE, hi))
    total = sum_exp(logits, lo, hi, top)
    if not total < HUGE:  # NaN too
        top = row_max(logits, lo, hi)
        total = sum_exp(logits, lo, hi, top)
    return total, top


@helper()
def backward_row(dlogits, dlogits_add, logits, top, share, lo, hi):
    """Compute or add ``share * exp(logits - top)``."""
    whole = hi - (hi - lo) % LANES
    n = hi - whole
    for i in range(lo, whole, LANES):
        d = exp(load(logits, i) - top) * share
        store(dlogits, i, load(dlogits, i) + d if dlogits_add else d)
    if n > 0:
        d = exp(load_some(logits, whole, n) - top) * share
        store_some(dlogits, whole, load_some(dlogits, whole, n) + d if dlogits_add else d, n)


@helper()
def count(targets, ignore_index):
    """Count the targets that are not ignored."""
    n = 0
    for bt in range(targets.shape[0]):
        n += targets[bt] != ignore_index
    return n


@helper()
def sum_in_order(losses):
    """Sum the losses of the tokens, in float64."""
    total = 0.0
    for bt in range(losses.shape[0]):
        total += losses[bt]
    return total


@kernel(ops.cross_entropy_forward, "optimized")
def cross_entropy_forward(loss, losses, lse, logits, targets, ignore_index):
    """The sum of exp for each row, then the mean of the losses in the order of the rows.

    Parallel: the rows; the mean is serial.
    Bound: compute, the exp.
    """
    BT, V = logits.shape
    for bt in prange(BT):
        total, top = shifted_sum(logits, np.int64(bt) * V, np.int64(bt) * V + V)
        lse[bt] = np.log(total) + top
        losses[bt] = lse[bt] - logits[bt, targets[bt]] if targets[bt] != ignore_index else ZERO
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


@kernel(ops.cross_entropy_backward, "optimized")
def cross_entropy_backward(dlogits, dlogits_add, dloss, logits, lse, targets, ignore_index):
    """Each row's probabilities again, then one less at its target.

    Parallel: the rows.
    Bound: memory and the exp, about even.
    """
    BT, V = logits.shape
    share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
    for bt in prange(BT):
        if targets[bt] != ignore_index:
            backward_row(dlogits, dlogits_add, logits, lse[bt], share, np.int64(bt) * V, np.int64(bt) * V + V)
            dlogits[bt, targets[bt]] -= share  # loss = sum(lse - logits[target]) / n
        elif not dlogits_add:
            for v in range(V):
                dlogits[bt, v] = ZERO
