"""The classifier of bfloat16: as ``classifier``; the gradient of the logits is rounded for the two products with it."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ..compile.jit import helper, kernel
from ..toolkit.pairs import halves, narrow
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import MR, NR, PER_WORD
from .classifier import backward_work, block, gradient_row, loss_block, parts_floats
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
def gradient_block(logits, dlogits, losses, share, targets, ignore_index):
    """Compute the losses of a block, turn the logits into their gradient, and round that."""
    V, W = logits.shape[1], dlogits.shape[1]
    for t in prange(logits.shape[0]):
        row = np.int64(t)
        gradient_row(logits, losses, share, targets, ignore_index, row)
        narrow(dlogits, row * W, logits, row * V, V, False)
        if W > V:
            dlogits[t, V] = 0


FORWARD = [*logits(block), ("work", for_each_thread(PER_THREAD))]


@kernel(ops.classifier_forward, "optimized", of=HALF, scratch=FORWARD, parallel=False)
def classifier_forward(loss, losses, inp, weight, targets, ignore_index, logits, words, panels, rows, queue, work):
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
        linear_bf16(part, inp[lo:hi], weight, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue, rows)
        loss_block(part, losses[lo:hi], targets[lo:hi], ignore_index)
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


def backward_scratch(steps):
    """List the scratch of the backward: of all tokens at once if it takes an optimizer's step."""
    tokens = (lambda s: s["BT"]) if steps else block
    return [*logits(tokens), ("work", backward_work(PER_THREAD, steps)), ("parts", parts_floats(steps, 2))]


@by_epilogue(ops.classifier_backward, "optimized", of=HALF, scratch=backward_scratch, skips=["dinp", "dweight"])
def classifier_backward(epilogue):
    """Block by block: the logits, their gradient in their place and rounded, and the two products with it.

    All tokens are one block if an optimizer's step is taken.

    Parallel: as the products; between them the tokens of a block.
    Memory: a block of logits, and half of it; a strip of the weight's gradient for each thread, if a step is taken.
    Bound: compute; for few tokens, the memory of weight and states.
    """
    weight_of, again, steps = linear_weight(epilogue), epilogue.again, epilogue.steps

    @helper()
    def classifier_backward(
        to, loss, losses, dinp, dinp_add, dloss, inp, weight, targets, ignore_index,
        logits, words, panels, rows, queue, work, parts,
    ):  # fmt: skip
        BT, C = inp.shape
        V, most, size = weight.shape[0], BLOCK, WEIGHT_SCRATCH
        if steps:
            most, size = BT, WEIGHT_SCRATCH + max(STRIP, MR * C)
        W, threads = (V + 1) // 2, work.shape[0] // max(PER_THREAD, size)
        share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
        for lo in range(0, BT, most):
            hi = min(BT, lo + most)
            n, x = hi - lo, inp[lo:hi]
            part, pairs = logits[: n * V].reshape(n, V), words[: n * W].reshape(n, W)
            linear_bf16(part, x, weight, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue, rows)
            dlogits = halves(pairs)
            gradient_block(part, dlogits, losses[lo:hi], share, targets[lo:hi], ignore_index)
            if dinp.shape[0] > 0:
                linear_input(dinp[lo:hi], dinp_add, pairs, weight, work[: threads * INPUT_SCRATCH], parts, queue)
            if to[0].shape[0] > 0:
                weight_of(again(to, lo > 0), dlogits, x, panels, work[: threads * size], queue)
        loss[0] = sum_in_order(losses) / count(targets, ignore_index)

    return classifier_backward
