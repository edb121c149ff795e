"""The classifier, naive: a block of logits at a time, turned into its own gradient in place."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ...ops.declaration import BT, C, V
from ..compile.jit import helper, kernel
from ..toolkit.rules import by_rule


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


@by_rule(
    "vanilla",
    "classifier_update",
    "weight",
    scratch=[("logits", BT * V), ("grad", V * C), ("slot", V, "int32"), ("partial", V)],
)
def classifier_update(rule):
    """As the backward, of all tokens at once; then a row of the gradient at a time, which is put aside or applied.

    Parallel: the tokens, then the rows of `weight`.
    Bound: the memory that `weight` streams through, twice for each token.
    """
    rows, update = rule.rows, rule.update

    @helper(parallel=True)
    def classifier_update(
        weight, weight_numbers, loss, losses, dinp, dinp_add, held, sumsq, dloss, inp, copy, targets, tokens,
        ignore_index, logits, grad, slot, partial,
    ):  # fmt: skip
        BT, C = inp.shape
        V = weight[0].shape[0]
        share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
        for v in range(V):
            slot[v] = -1
        for t in range(tokens.shape[0] - 1, -1, -1):
            slot[tokens[t]] = t  # the first of equal tokens stays
            for i in range(C):
                held[t, i] = 0
        for bt in prange(BT):
            row = logits[np.int64(bt) * V : np.int64(bt) * V + V]
            if copy.shape[0] > 0:
                top, total, losses[bt] = row_losses(row, inp[bt], copy, targets[bt], ignore_index)
                row_backward(row, dinp[bt], dinp_add, copy, top, total, share, targets[bt], ignore_index)
            else:
                top, total, losses[bt] = row_losses(row, inp[bt], weight[0], targets[bt], ignore_index)
                row_backward(row, dinp[bt], dinp_add, weight[0], top, total, share, targets[bt], ignore_index)
        for v in prange(V):
            g = grad[np.int64(v) * C : np.int64(v) * C + C]
            for i in range(C):
                g[i] = 0
            for t in range(BT):
                d = logits[t * V + v]
                for i in range(C):
                    g[i] += inp[t, i] * d
            total = np.float32(0)
            if slot[v] >= 0:
                for i in range(C):
                    held[slot[v], i] = g[i]
            else:
                update(rows(weight, v), g, np.float32(1), weight_numbers)
                for i in range(C):
                    total += g[i] * g[i]
            partial[v] = total
        loss[0] = mean_loss(losses, targets, ignore_index)
        total = np.float32(0)
        for v in range(V):
            total += partial[v]
        sumsq[0] = total

    return classifier_update
