"""The classifier of bfloat16: as ``classifier``; the gradient of the logits is rounded for the two products with it."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ..compile.jit import helper, kernel
from ..toolkit.pairs import halves, narrow, read_of
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import MR, NR, PER_WORD
from .classifier import (
    ROWS,
    backward_work,
    block,
    clear,
    find_rows,
    gather,
    gradient_row,
    loss_block,
    parts_floats,
    scatter,
)
from .cross_entropy import count, sum_in_order
from .matmul import FORWARD_SCRATCH, STRIP, WEIGHT_SCRATCH, up
from .matmul_bf16 import HALF, INPUT_SCRATCH, linear_bf16, linear_input, linear_weight, odd_rows, word_panels

PER_THREAD = max(FORWARD_SCRATCH, INPUT_SCRATCH, WEIGHT_SCRATCH)


def panels(tokens, sizes):
    """Floats of the panels of forward and weight gradient in turn, of blocks of at most so many tokens."""
    columns = up(sizes["C"], NR)
    return max(word_panels(tokens, sizes["C"], sizes["V"]), (tokens // 2 + 1) * columns * PER_WORD)


def logits(tokens):
    """Size the scratch of so many tokens: the logits, and their gradient as words."""
    return [
        ("logits", lambda s: tokens(s) * s["V"]),
        ("words", lambda s: tokens(s) * -(-s["V"] // 2)),
        ("panels", lambda s: panels(tokens(s), s)),
        ("rows", odd_rows("BT", "V")),
        QUEUE,
    ]


@helper(parallel=True)
def gradient_block(logits, dlogits, losses, share, targets, ignore_index, counted):
    """Compute the losses of some tokens, turn the logits into their gradient, and round that."""
    V, W = logits.shape[1], dlogits.shape[1]
    for t in prange(logits.shape[0]):
        row = np.int64(t)
        gradient_row(logits, losses, share, targets, ignore_index, row, counted[t])
        narrow(dlogits, row * W, logits, row * V, V, False)
        if W > V:
            dlogits[t, V] = 0


def some(tokens):
    """Size the rows of the tokens that count, in words."""
    return "some", lambda s: tokens(s) * s["C"] // 2 + 1


FORWARD = [*logits(block), ("work", for_each_thread(PER_THREAD)), ROWS, some(block)]


@kernel(ops.classifier_forward, "optimized", of=HALF, scratch=FORWARD, parallel=False)
def classifier_forward(
    loss, losses, inp, weight, targets, ignore_index, logits, words, panels, rows, queue, work, counted, some
):
    """Block by block of the tokens that count: the logits, and each row's loss.

    Parallel: as the product; then the tokens of a block. The mean is serial, in the order of the tokens.
    Memory: a block of logits.
    Bound: compute.
    """
    (BT, C), V = inp.shape, weight.shape[0]
    threads, n = work.shape[0] // PER_THREAD, find_rows(counted, losses, targets, ignore_index)
    for lo in range(0, n, BLOCK):
        hi = min(n, lo + BLOCK)
        part, x = logits[: (hi - lo) * V].reshape(hi - lo, V), inp[lo:hi]
        if n < BT:
            x = halves(some)[: (hi - lo) * C].reshape(hi - lo, C)
            gather(x, inp, counted[lo:hi])
        linear_bf16(part, x, weight, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue, rows)
        loss_block(part, losses, targets, ignore_index, counted[lo:hi])
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


def backward_scratch(steps):
    """List the scratch of the backward: of all tokens at once if it takes an optimizer's step."""
    tokens = (lambda s: s["BT"]) if steps else block
    made = [ROWS, some(tokens), ("dsome", lambda s: tokens(s) * s["C"])]
    return [*logits(tokens), ("work", backward_work(PER_THREAD, steps)), ("parts", parts_floats(steps, 2)), *made]


@by_epilogue(ops.classifier_backward, "optimized", of=HALF, scratch=backward_scratch, skips=["dinp", "dweight"])
def classifier_backward(epilogue):
    """Block by block of the tokens that count: logits, their gradient, rounded in their place, and the products.

    All of them are one block if an optimizer's step is taken.

    Parallel: as the products; between them the tokens of a block.
    Memory: a block of logits, and half of it; a strip of the weight's gradient for each thread, if a step is taken.
    Bound: compute; for few tokens, the memory of weight and states.
    """
    weight_of, again, steps = linear_weight(epilogue), epilogue.again, epilogue.steps

    @helper()
    def classifier_backward(
        to, loss, losses, dinp, dinp_add, dloss, inp, weight, targets, ignore_index,
        logits, words, panels, rows, queue, work, parts, counted, some, dsome,
    ):  # fmt: skip
        BT, C = inp.shape
        read = read_of(to[0], weight)
        V, most, size = read.shape[0], BLOCK, WEIGHT_SCRATCH
        if steps:
            most, size = BT, WEIGHT_SCRATCH + max(STRIP, MR * C)
        W, threads = (V + 1) // 2, work.shape[0] // max(PER_THREAD, size)
        share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
        total = find_rows(counted, losses, targets, ignore_index)
        if total < BT and not dinp_add:
            clear(dinp, targets, ignore_index)
        for lo in range(0, total, most):
            hi = min(total, lo + most)
            n, x, there = hi - lo, inp[lo:hi], counted[lo:hi]
            part, pairs = logits[: n * V].reshape(n, V), words[: n * W].reshape(n, W)
            if total < BT:
                x = halves(some)[: n * C].reshape(n, C)
                gather(x, inp, there)
            linear_bf16(part, x, read, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue, rows)
            dlogits = halves(pairs)
            gradient_block(part, dlogits, losses, share, targets, ignore_index, there)
            if dinp.shape[0] > 0:
                d = dinp[lo:hi]
                if total < BT:
                    d = dsome[: n * C].reshape(n, C)
                    if dinp_add:
                        gather(d, dinp, there)
                linear_input(d, dinp_add, pairs, read, work[: threads * INPUT_SCRATCH], parts, queue)
                if total < BT:
                    scatter(dinp, d, there)
            if to[0].shape[0] > 0:
                weight_of(again(to, lo > 0), dlogits, x, panels, work[: threads * size], queue)
        loss[0] = sum_in_order(losses) / count(targets, ignore_index)

    return classifier_backward
