"""The classifier on vectors: the three products of ``matmul`` on a block of logits, which become their own gradient."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ...ops.declaration import BT, V
from ..compile.jit import helper, kernel
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_rule
from ..toolkit.simd import MR, NR
from .cross_entropy import backward_row, count, shifted_sum, sum_in_order
from .matmul import BY_FLOATS, FORWARD_SCRATCH, INPUT_SCRATCH, WEIGHT_SCRATCH, forward_panels, share_floats, up
from .matmul import matmul_backward_input as linear_input
from .matmul import matmul_backward_weight as linear_weight
from .matmul import matmul_forward as linear
from .matmul_update import STRIP, strips, update_linear

ZERO = np.float32(0)


def block(sizes):
    """Tokens of a block."""
    return min(BLOCK, sizes["BT"])


def panels(tokens, sizes):
    """Floats of the panels of forward and weight gradient in turn, of blocks of at most so many tokens."""
    return max(forward_panels(tokens, sizes["C"], sizes["V"]), up(tokens, NR) * up(sizes["C"], NR) + NR)


LOGITS = [
    ("logits", lambda s: block(s) * s["V"]),
    ("panels", lambda s: panels(block(s), s)),
    QUEUE,
]
"""Scratch of all three: the logits, and the packed tokens of forward and weight gradient in turn."""


@helper()
def fill(x, value):
    """Set every element."""
    for i in range(x.shape[0]):
        x[i] = value


@helper(parallel=True)
def loss_block(logits, losses, targets, ignore_index):
    """Compute the losses of a block."""
    V = logits.shape[1]
    for t in prange(logits.shape[0]):
        total, top = shifted_sum(logits, np.int64(t) * V, np.int64(t) * V + V)
        losses[t] = np.log(total) + (top - logits[t, targets[t]]) if targets[t] != ignore_index else ZERO


@helper()
def gradient_row(logits, losses, share, targets, ignore_index, t):
    """Compute the loss of a token, and turn its logits into their gradient."""
    V = logits.shape[1]
    lo, hi = t * V, t * V + V
    if targets[t] != ignore_index:
        total, top = shifted_sum(logits, lo, hi)
        losses[t] = np.log(total) + (top - logits[t, targets[t]])
        backward_row(logits, False, logits, top, share / total, lo, hi)
        logits[t, targets[t]] -= share  # loss = sum(lse - logits[target]) / n
    else:
        losses[t] = ZERO
        for v in range(V):
            logits[t, v] = ZERO


@helper(parallel=True)
def gradient_block(logits, losses, share, targets, ignore_index):
    """Compute the losses of a block, and turn the logits into their gradient."""
    for t in prange(logits.shape[0]):
        gradient_row(logits, losses, share, targets, ignore_index, np.int64(t))


@helper()
def put_aside(slots, held, tokens):
    """Find the row of `held` for the weight's row of each token; -1 for a row that no token has."""
    for v in range(slots.shape[0]):
        slots[v] = -1
    for t in range(tokens.shape[0] - 1, -1, -1):
        slots[tokens[t]] = t  # the first of equal tokens stays
        fill(held[t], ZERO)


PER_THREAD = max(FORWARD_SCRATCH, INPUT_SCRATCH, WEIGHT_SCRATCH)


@kernel(ops.classifier_forward, "optimized", scratch=[*LOGITS, ("work", for_each_thread(PER_THREAD))], parallel=False)
def classifier_forward(loss, losses, inp, weight, targets, ignore_index, logits, panels, queue, work):
    """Block by block: the logits, and each row's loss.

    Parallel: as the product; then the tokens of a block. The mean is serial, in the order of the tokens.
    Memory: a block of logits.
    Bound: compute.
    """
    BT, V = inp.shape[0], weight.shape[0]
    threads = work.shape[0] // PER_THREAD
    for lo in range(0, BT, BLOCK):
        hi = min(BT, lo + BLOCK)
        part = logits[: (hi - lo) * V].reshape(hi - lo, V)
        linear(part, inp[lo:hi], weight, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
        loss_block(part, losses[lo:hi], targets[lo:hi], ignore_index)
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


@kernel(
    ops.classifier_backward,
    "optimized",
    scratch=[*LOGITS, ("work", for_each_thread(PER_THREAD))],
    skips=["dinp", "dweight"],
    parallel=False,
)
def classifier_backward(
    loss, losses, dinp, dinp_add, dweight, dweight_add, dloss, inp, weight, targets, ignore_index,
    logits, panels, queue, work,
):  # fmt: skip
    """Block by block: the logits, their gradient in their place, and the two products with it.

    No update follows that would write the weight, so dinp is not summed in parts.

    Parallel: as the products; between them the tokens of a block.
    Memory: a block of logits.
    Bound: compute.
    """
    BT, V = inp.shape[0], weight.shape[0]
    threads = work.shape[0] // PER_THREAD
    share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
    for lo in range(0, BT, BLOCK):
        hi = min(BT, lo + BLOCK)
        part, x = logits[: (hi - lo) * V].reshape(hi - lo, V), inp[lo:hi]
        linear(part, x, weight, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
        gradient_block(part, losses[lo:hi], share, targets[lo:hi], ignore_index)
        if dinp.shape[0] > 0:
            linear_input(dinp[lo:hi], dinp_add, part, weight, work[: threads * INPUT_SCRATCH], loss[:0], queue)
        blocks = work[: threads * WEIGHT_SCRATCH]
        if dweight.shape[0] > 0:
            linear_weight(dweight, dweight_add or lo > 0, loss[:0], False, part, x, panels, blocks, queue)
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


@by_rule(
    "optimized",
    "classifier_update",
    "weight",
    scratch=[
        ("logits", BT * V),
        ("panels", lambda s: panels(s["BT"], s)),
        QUEUE,
        ("work", strips),
        ("parts", lambda s: share_floats(s["BT"], s["C"], s["V"])),
        ("slot", V, "int32"),
        ("partial", V),
    ],
)
def classifier_update(rule):
    """All tokens are one block; the weight's gradient is applied strip by strip, or put aside.

    Parallel: as the products; between them the tokens.
    Memory: the logits; for each thread a strip of their gradient and one of the weight's.
    Bound: compute; for few tokens, the memory of weight and states.
    """
    update, rows = update_linear(rule, *BY_FLOATS), rule.rows

    @helper()
    def classifier_update(
        weight, weight_numbers, loss, losses, dinp, dinp_add, held, sumsq, dloss, inp, copy, targets, tokens,
        ignore_index, logits, panels, queue, work, parts, slot, partial,
    ):  # fmt: skip
        BT, C = inp.shape
        V = weight[0].shape[0]
        threads = work.shape[0] // (WEIGHT_SCRATCH + max(STRIP, MR * C))
        share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
        slots = slot[: V if tokens.shape[0] > 0 else 0]
        put_aside(slots, held, tokens)
        all_logits = logits.reshape(BT, V)
        read = copy if copy.shape[0] > 0 else weight[0]
        linear(all_logits, inp, read, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
        gradient_block(all_logits, losses, share, targets, ignore_index)
        linear_input(dinp, dinp_add, all_logits, read, work[: threads * INPUT_SCRATCH], parts, queue)
        no_bias = rows(rows(weight, 0), slice(0, 0))
        update(
            weight, no_bias, weight_numbers, weight_numbers, held, slots, sumsq, all_logits, inp, panels, work,
            partial, queue,
        )  # fmt: skip
        loss[0] = sum_in_order(losses) / count(targets, ignore_index)

    return classifier_update
