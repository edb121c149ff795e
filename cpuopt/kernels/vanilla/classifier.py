"""The classifier, naive: a block of logits at a time, turned into its own gradient in place."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ...ops.declaration import V
from ..compile.jit import helper, kernel
from ..toolkit.rules import stepped


@helper()
def losses_of_logits(logits, target):
    """Compute the maximum of a token's logits, the sum of exp(logits - maximum), and the loss."""
    top, total = np.float32(-np.inf), np.float32(0)
    for v in range(logits.shape[0]):
        top = max(top, logits[v])
    for v in range(logits.shape[0]):
        total += np.exp(logits[v] - top)
    return top, total, np.log(total) + (top - logits[target])


@helper()
def row_losses(logits, inp, weight, target):
    """Compute the logits of a token, their maximum, the sum of exp(logits - maximum), and the loss."""
    for v in range(weight.shape[0]):
        val = np.float32(0)
        for i in range(weight.shape[1]):
            val += inp[i] * weight[v, i]
        logits[v] = val
    return losses_of_logits(logits, target)


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
def row_backward(dlogits, dinp, weight, top, total, share, target):
    """Turn the logits of a token into their gradient; add that of the token, if it is not empty."""
    V, C = weight.shape[0], dinp.shape[0]
    for v in range(V):
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
    """Block by block: the logits of each token that counts, and its loss.

    Parallel: the tokens of a block.
    Bound: the memory that `weight` streams through, once for each token.
    """
    BT, V = inp.shape[0], weight.shape[0]
    for t0 in range(0, BT, BLOCK):
        for t in prange(min(BLOCK, BT - t0)):
            row = logits[np.int64(t) * V : np.int64(t) * V + V]
            losses[t0 + t] = 0
            if targets[t0 + t] != ignore_index:
                _, _, losses[t0 + t] = row_losses(row, inp[t0 + t], weight, targets[t0 + t])
    loss[0] = mean_loss(losses, targets, ignore_index)


@stepped
@kernel(ops.classifier_backward, "vanilla", scratch=[("logits", BLOCK * V)], skips=["dinp", "dweight"])
def classifier_backward(
    loss, losses, dinp, dinp_add, dweight, dweight_add, dloss, inp, weight, targets, ignore_index, logits
):
    """Block by block: logits, losses and gradient of each token that counts; then the rows of the weight's gradient.

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
            losses[bt] = 0
            own = dinp[bt] if dinp.shape[0] > 0 else losses[:0]
            for i in range(0 if dinp_add else own.shape[0]):
                own[i] = 0
            if targets[bt] != ignore_index:
                top, total, losses[bt] = row_losses(row, inp[bt], weight, targets[bt])
                row_backward(row, own, weight, top, total, share, targets[bt])
        for v in prange(dweight.shape[0]):
            if t0 == 0 and not dweight_add:
                for i in range(C):
                    dweight[v, i] = 0
            for t in range(n):
                if targets[t0 + t] != ignore_index:
                    d = logits[t * V + v]
                    for i in range(C):
                        dweight[v, i] += inp[t0 + t, i] * d
    loss[0] = mean_loss(losses, targets, ignore_index)
