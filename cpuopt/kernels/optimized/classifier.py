"""The classifier on vectors: the three products of ``matmul`` on a block of logits, which become their own gradient.

If a target is ignored, the rows of the tokens that count are gathered first: no others have logits.
"""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ..compile.jit import helper, kernel
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import MR, NR
from .cross_entropy import backward_row, count, shifted_sum, sum_in_order
from .matmul import (
    FORWARD_SCRATCH,
    INPUT_SCRATCH,
    SHARED,
    STRIP,
    WEIGHT_SCRATCH,
    forward_panels,
    linear_weight,
    share_floats,
    strip_floats,
    up,
)
from .matmul import matmul_backward_input as linear_input
from .matmul import matmul_forward as linear

ZERO = np.float32(0)


def block(sizes):
    """Tokens of a block."""
    return min(BLOCK, sizes["BT"])


def panels(tokens, sizes):
    """Floats of the panels of forward and weight gradient in turn, of blocks of at most so many tokens."""
    return max(forward_panels(tokens, sizes["C"], sizes["V"]), up(tokens, NR) * up(sizes["C"], NR) + NR)


def logits(tokens):
    """List the scratch of so many tokens: the logits, and the packed tokens of forward and weight gradient in turn."""
    return [("logits", lambda s: tokens(s) * s["V"]), ("panels", lambda s: panels(tokens(s), s)), QUEUE]


@helper()
def find_rows(rows, losses, targets, ignore_index):
    """List the tokens that count, or the first if none does, so that all gradients are written; return how many.

    The losses of all become 0.
    """
    n = 0
    for t in range(targets.shape[0]):
        losses[t] = ZERO
        if targets[t] != ignore_index:
            rows[n] = t
            n += 1
    if n == 0:
        rows[0] = 0
    return max(n, 1)


@helper(parallel=True)
def gather(to, x, rows):
    """Copy some rows."""
    for t in prange(to.shape[0]):
        for i in range(to.shape[1]):
            to[t, i] = x[rows[t], i]


@helper(parallel=True)
def scatter(to, x, rows):
    """Copy rows back to where they were gathered."""
    for t in prange(x.shape[0]):
        for i in range(x.shape[1]):
            to[rows[t], i] = x[t, i]


@helper(parallel=True)
def clear(x, targets, ignore_index):
    """Zero the rows of the tokens that do not count."""
    for t in prange(x.shape[0]):
        if targets[t] == ignore_index:
            for i in range(x.shape[1]):
                x[t, i] = ZERO


@helper(parallel=True)
def loss_block(logits, losses, targets, ignore_index, rows):
    """Compute the losses of some tokens."""
    V = logits.shape[1]
    for t in prange(logits.shape[0]):
        total, top = shifted_sum(logits, np.int64(t) * V, np.int64(t) * V + V)
        target = targets[rows[t]]
        losses[rows[t]] = np.log(total) + (top - logits[t, target]) if target != ignore_index else ZERO


@helper()
def gradient_row(logits, losses, share, targets, ignore_index, t, bt):
    """Compute the loss of a token, and turn its logits into their gradient."""
    V = logits.shape[1]
    lo, hi = t * V, t * V + V
    if targets[bt] != ignore_index:
        total, top = shifted_sum(logits, lo, hi)
        losses[bt] = np.log(total) + (top - logits[t, targets[bt]])
        backward_row(logits, False, logits, top, share / total, lo, hi)
        logits[t, targets[bt]] -= share  # loss = sum(lse - logits[target]) / n
    else:
        for v in range(V):
            logits[t, v] = ZERO


@helper(parallel=True)
def gradient_block(logits, losses, share, targets, ignore_index, rows):
    """Compute the losses of some tokens, and turn the logits into their gradient."""
    for t in prange(logits.shape[0]):
        gradient_row(logits, losses, share, targets, ignore_index, np.int64(t), rows[t])


PER_THREAD = max(FORWARD_SCRATCH, INPUT_SCRATCH, WEIGHT_SCRATCH)


ROWS = "counted", lambda s: s["BT"], "int32"
FORWARD = [*logits(block), ("work", for_each_thread(PER_THREAD)), ROWS, ("some", lambda s: block(s) * s["C"])]


@kernel(ops.classifier_forward, "optimized", scratch=FORWARD, parallel=False)
def classifier_forward(loss, losses, inp, weight, targets, ignore_index, logits, panels, queue, work, counted, some):
    """Block by block of the tokens that count: the logits, and each row's loss.

    Parallel: as the product; then the tokens of a block. The mean is serial, in the order of the tokens.
    Memory: a block of logits.
    Bound: compute.
    """
    (BT, C), V = inp.shape, weight.shape[0]
    threads, n = work.shape[0] // PER_THREAD, find_rows(counted, losses, targets, ignore_index)
    for lo in range(0, n, BLOCK):
        hi = min(n, lo + BLOCK)
        part, x, rows = logits[: (hi - lo) * V].reshape(hi - lo, V), inp[lo:hi], counted[lo:hi]
        if n < BT:
            x = some[: (hi - lo) * C].reshape(hi - lo, C)
            gather(x, inp, rows)
        linear(part, x, weight, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
        loss_block(part, losses, targets, ignore_index, rows)
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


def backward_scratch(steps):
    """List the scratch of the backward: of all tokens at once if it takes an optimizer's step."""
    tokens = (lambda s: s["BT"]) if steps else block
    made = [("some", lambda s: tokens(s) * s["C"]), ("dsome", lambda s: tokens(s) * s["C"])]
    return [*logits(tokens), ("work", backward_work(PER_THREAD, steps)), ("parts", parts_floats(steps, 1)), ROWS, *made]


def backward_work(products, steps):
    """Size the scratch of the threads: that of the products, or a strip of the weight's gradient."""
    return lambda s: for_each_thread(max(products, WEIGHT_SCRATCH + (strip_floats(s["C"]) if steps else 0)))(s)


def parts_floats(steps, unit):
    """Size the sums of dinp by shares, however many tokens count; without an update that follows there are none."""

    def floats(s):
        return max(share_floats(n, s["C"], up(s["V"], unit)) for n in range(1, min(s["BT"], SHARED) + 1))

    return lambda s: floats(s) if steps else 0


@by_epilogue(ops.classifier_backward, "optimized", scratch=backward_scratch, skips=["dinp", "dweight"])
def classifier_backward(epilogue):
    """Block by block of the tokens that count: the logits, their gradient in their place, and the two products with it.

    All of them are one block if an optimizer's step is taken.

    Parallel: as the products; between them the tokens of a block.
    Memory: a block of logits; a strip of the weight's gradient for each thread, if a step is taken from it.
    Bound: compute; for few tokens, the memory of weight and states.
    """
    weight_of, again, steps = linear_weight(epilogue), epilogue.again, epilogue.steps

    @helper()
    def classifier_backward(
        to, loss, losses, dinp, dinp_add, dloss, inp, weight, targets, ignore_index,
        logits, panels, queue, work, parts, counted, some, dsome,
    ):  # fmt: skip
        BT, C = inp.shape
        read = weight if weight.shape[0] > 0 else to[0]
        V, most, size = read.shape[0], BLOCK, WEIGHT_SCRATCH
        if steps:
            most, size = BT, WEIGHT_SCRATCH + max(STRIP, MR * C)
        threads = work.shape[0] // max(PER_THREAD, size)
        share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
        n = find_rows(counted, losses, targets, ignore_index)
        if n < BT and not dinp_add:
            clear(dinp, targets, ignore_index)
        for lo in range(0, n, most):
            hi = min(n, lo + most)
            part, x, rows = logits[: (hi - lo) * V].reshape(hi - lo, V), inp[lo:hi], counted[lo:hi]
            if n < BT:
                x = some[: (hi - lo) * C].reshape(hi - lo, C)
                gather(x, inp, rows)
            linear(part, x, read, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
            gradient_block(part, losses, share, targets, ignore_index, rows)
            if dinp.shape[0] > 0:
                d = dinp[lo:hi]
                if n < BT:
                    d = dsome[: (hi - lo) * C].reshape(hi - lo, C)
                    if dinp_add:
                        gather(d, dinp, rows)
                linear_input(d, dinp_add, part, read, work[: threads * INPUT_SCRATCH], parts, queue)
                if n < BT:
                    scatter(dinp, d, rows)
            if to[0].shape[0] > 0:
                weight_of(again(to, lo > 0), part, x, panels, work[: threads * size], queue)
        loss[0] = sum_in_order(losses) / count(targets, ignore_index)

    return classifier_backward
