"""The classifier over a weight in int8, naive: a block of logits at a time."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ...ops.declaration import C, V
from ..compile.jit import helper, kernel
from ..toolkit.rules import stepped
from .classifier import count, losses_of_logits, mean_loss
from .matmul_int8 import dot, to_nearest

SCRATCH = [("logits", BLOCK * V), ("q", BLOCK * C, "int32")]


@helper()
def row_logits(logits, q, inp, weight, scales):
    """Compute the logits of a token."""
    step = to_nearest(q, inp)
    for v in range(weight.shape[0]):
        logits[v] = dot(q, weight[v], step * scales[v])


@kernel(ops.classifier_int8_forward, "vanilla", scratch=SCRATCH)
def classifier_int8_forward(loss, losses, inp, weight, scales, targets, ignore_index, logits, q):
    """Block by block: the logits of each token that counts, and its loss.

    Parallel: the tokens of a block.
    Bound: compute.
    """
    (BT, C), V = inp.shape, weight.shape[0]
    for t0 in range(0, BT, BLOCK):
        for t in prange(min(BLOCK, BT - t0)):
            row = logits[np.int64(t) * V : np.int64(t) * V + V]
            losses[t0 + t] = 0
            if targets[t0 + t] != ignore_index:
                row_logits(row, q[t * C : t * C + C], inp[t0 + t], weight, scales)
                _, _, losses[t0 + t] = losses_of_logits(row, targets[t0 + t])
    loss[0] = mean_loss(losses, targets, ignore_index)


@kernel(ops.classifier_int8_backward, "vanilla", scratch=SCRATCH)
def classifier_int8_backward(loss, losses, dlogits, dloss, inp, weight, scales, targets, ignore_index, logits, q):
    """Block by block: the logits of each token that counts, its loss, and the gradient of the logits.

    Parallel: the tokens of a block.
    Bound: compute.
    """
    (BT, C), V = inp.shape, weight.shape[0]
    share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
    for t0 in range(0, BT, BLOCK):
        for t in prange(min(BLOCK, BT - t0)):
            bt = t0 + t
            row = logits[np.int64(t) * V : np.int64(t) * V + V]
            losses[bt] = 0
            if targets[bt] != ignore_index:
                row_logits(row, q[t * C : t * C + C], inp[bt], weight, scales)
                top, total, losses[bt] = losses_of_logits(row, targets[bt])
                for v in range(V):
                    hit = np.float32(1) if v == targets[bt] else np.float32(0)
                    dlogits[bt, v] = (np.exp(row[v] - top) / total - hit) * share
            else:
                for v in range(V):
                    dlogits[bt, v] = 0
    loss[0] = mean_loss(losses, targets, ignore_index)


@stepped
@kernel(ops.head_backward_weight, "vanilla")
def head_backward_weight(dweight, dweight_add, dout, inp):
    """Each row of `dweight` gathers the rows of `inp`, scaled by `dout`.

    Parallel: the rows of `dweight`.
    Bound: compute.
    """
    BT, C = inp.shape
    for v in prange(dout.shape[1]):
        if not dweight_add:
            for i in range(C):
                dweight[v, i] = 0
        for bt in range(BT):
            for i in range(C):
                dweight[v, i] += inp[bt, i] * dout[bt, v]
