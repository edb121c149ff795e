"""The classifier, naive: a block of logits at a time, turned into its own gradient in place."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ...ops.declaration import V
from ..compile.jit import helper, kernel
from ..toolkit.rules import stepped


@helper()
def row_losses(logits, inp, weight, target, ignore_index):
    """Compute the logits of a token, their maximum, the sum of exp(logits - maximum), and the loss."""
    V, C = weight.shape
    top = np.float32(-np.inf)
    for v in range(V):
        val = np.float32(0)
        for i in range(C):
            val += inp[i] * weight[v, i]
        logits[v] = val
        top = max(top, val)
    total = np.float32(0)
    for v in range(V):
        total += np.exp(logits[v] - top)
    loss = np.log(total) + (top - logits[target]) if target != ignore_index else np.float32(0)
    return top, total, loss


@helper()
def mean_loss(losses, targets, ignore_index):
    """Compute the mean of the losses that count, in the order of the rows."""
    total = 0.0
    n = 0
    for bt in range(losses.shape[0]):
        total += losses[bt]
        n += targets[bt] != ignore_index
    return total / n


@helper()
def row_backward(dlogits, dinp, dinp_add, weight, top, total, share, target, ignore_index):
    """Turn the logits of a token into their gradient; compute or add that of the token, if it is not empty."""
    V, C = weight.shape[0], dinp.shape[0]
    if not dinp_add:
        for i in range(C):
            dinp[i] = 0
    for v in range(V):
        d = np.float32(0)
        if target != ignore_index:
            hit = np.float32(1) if v == target else np.float32(0)
            d = (np.exp(dlogits[v] - top) / total - hit) * share
        dlogits[v] = d
        for i in range(C):
            dinp[i] += weight[v, i] * d


@helper()
def count(targets, ignore_index):
    """Count the targets that are not ignored."""
    n = 0
    for bt in range(targets.shape[0]):
        n += targets[bt] != ignore_index
    return n


@kernel(ops.classifier_forward, "vanilla", scratch=[("logits", BLOCK * V)])
def classifier_forward(loss, losses, inp, weight, targets, ignore_index, logits):
    """Block by block: the logits of each token, and its loss.

    Parallel: the tokens of a block.
    Bound: the memory that `weight` streams through, once for each token.
    """
    BT, V = inp.shape[0], weight.shape[0]
    for t0 in range(0, BT, BLOCK):
        for t in prange(min(BLOCK, BT - t0)):
            row = logits[np.int64(t) * V : np.int64(t) * V + V]
            _, _, losses[t0 + t] = row_losses(row, inp[t0 + t], weight, targets[t0 + t], ignore_index)
    loss[0] = mean_loss(losses, targets, ignore_index)


@stepped
@kernel(ops.classifier_backward, "vanilla", scratch=[("logits", BLOCK * V)], skips=["dinp", "dweight"])
def classifier_backward(
    loss, losses, dinp, dinp_add, dweight, dweight_add, dloss, inp, weight, targets, ignore_index, logits
):
    """Block by block: logits, losses, the gradient of each token; then the rows of the weight's gradient.

    Parallel: the tokens of a block, then the rows of `weight`.
    Bound: the memory that `weight` streams through, twice for each token.
    """
    BT, C = inp.shape
    V = weight.shape[0]
    share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
    for t0 in range(0, BT, BLOCK):
        n = min(BLOCK, BT - t0)
        for t in prange(n):
            bt = t0 + t
            row = logits[np.int64(t) * V : np.int64(t) * V + V]
            top, total, losses[bt] = row_losses(row, inp[bt], weight, targets[bt], ignore_index)
            own = dinp[bt] if dinp.shape[0] > 0 else losses[:0]
            row_backward(row, own, dinp_add, weight, top, total, share, targets[bt], ignore_index)
        for v in prange(dweight.shape[0]):
            if t0 == 0 and not dweight_add:
                for i in range(C):
                    dweight[v, i] = 0
            for t in range(n):
                d = logits[t * V + v]
                for i in range(C):
                    dweight[v, i] += inp[t0 + t, i] * d
    loss[0] = mean_loss(losses, targets, ignore_index)
