"""Cross-entropy with its softmax, naive."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.cross_entropy_forward, "vanilla")
def cross_entropy_forward(loss, losses, lse, logits, targets, ignore_index):
    """Maximum and sum of exp for each row, then the mean of the losses in the order of the rows.

    Parallel: the rows; the mean is serial.
    Bound: compute, the exp.
    """
    BT, V = logits.shape
    for bt in prange(BT):
        top = np.float32(-np.inf)
        for v in range(V):
            top = max(top, logits[bt, v])
        total = np.float32(0)
        for v in range(V):
            total += np.exp(logits[bt, v] - top)
        z = np.log(total) + top
        lse[bt] = z
        counts = targets[bt] != ignore_index
        losses[bt] = z - logits[bt, targets[bt]] if counts else np.float32(0)
    total_loss = 0.0
    n = 0
    for bt in range(BT):
        total_loss += losses[bt]
        n += targets[bt] != ignore_index
    loss[0] = total_loss / n


@kernel(ops.cross_entropy_backward, "vanilla")
def cross_entropy_backward(dlogits, dlogits_add, dloss, logits, lse, targets, ignore_index):
    """Each row's probabilities again, less one at its target.

    Parallel: the rows.
    Bound: compute, the exp.
    """
    BT, V = logits.shape
    n = 0
    for bt in range(BT):
        n += targets[bt] != ignore_index
    share = dloss[0] / np.float32(max(n, 1))
    for bt in prange(BT):
        counts = targets[bt] != ignore_index
        for v in range(V):
            d = np.float32(0)
            if counts:
                hit = np.float32(1) if v == targets[bt] else np.float32(0)
                d = (np.exp(logits[bt, v] - lse[bt]) - hit) * share  # loss = sum(lse - logits[target]) / n
            dlogits[bt, v] = dlogits[bt, v] + d if dlogits_add else d
