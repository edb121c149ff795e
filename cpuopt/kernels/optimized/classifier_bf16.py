"""The classifier of bfloat16: as ``classifier``; the gradient of the logits is rounded for the two products with it."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ...ops.declaration import V
from ..compile.jit import helper, kernel
from ..toolkit.pairs import halves, narrow
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_rule
from ..toolkit.simd import MR, NR
from .classifier import block, gradient_row, loss_block, put_aside
from .cross_entropy import count, sum_in_order
from .matmul import FORWARD_SCRATCH, WEIGHT_SCRATCH, forward_panels, share_floats, up
from .matmul_bf16 import BY_PAIRS, HALF, INPUT_SCRATCH, linear_bf16, linear_input, linear_weight, odd_rows
from .matmul_update import STRIP, update_linear

PER_THREAD = max(FORWARD_SCRATCH, INPUT_SCRATCH, WEIGHT_SCRATCH)


def panels(tokens, sizes):
    """Floats of the panels of forward and weight gradient in turn, of blocks of at most so many tokens."""
    words = -(-sizes["C"] // 2)
    return max(forward_panels(tokens, words, sizes["V"]), (tokens // 2 + 1) * up(sizes["C"], NR))


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


BLOCKS = [*logits(block), ("work", for_each_thread(PER_THREAD))]


@kernel(ops.classifier_forward, "optimized", of=HALF, scratch=BLOCKS, parallel=False)
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


@kernel(ops.classifier_backward, "optimized", of=HALF, scratch=BLOCKS, skips=["dinp", "dweight"], parallel=False)
def classifier_backward(
    loss, losses, dinp, dinp_add, dweight, dweight_add, dloss, inp, weight, targets, ignore_index,
    logits, words, panels, rows, queue, work,
):  # fmt: skip
    """Block by block: the logits, their gradient in their place and rounded, and the two products with it.

    Parallel: as the products; between them the tokens of a block.
    Memory: a block of logits, and half of it.
    Bound: compute.
    """
    BT, V = inp.shape[0], weight.shape[0]
    W = (V + 1) // 2
    threads = work.shape[0] // PER_THREAD
    share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
    for lo in range(0, BT, BLOCK):
        hi = min(BT, lo + BLOCK)
        n, x, empty = hi - lo, inp[lo:hi], loss[:0]
        part, pairs = logits[: n * V].reshape(n, V), words[: n * W].reshape(n, W)
        linear_bf16(part, x, weight, empty, panels, work[: threads * FORWARD_SCRATCH], queue, rows)
        dlogits = halves(pairs)
        gradient_block(part, dlogits, losses[lo:hi], share, targets[lo:hi], ignore_index)
        if dinp.shape[0] > 0:
            linear_input(dinp[lo:hi], dinp_add, pairs, weight, work[: threads * INPUT_SCRATCH], empty, queue)
        blocks = work[: threads * WEIGHT_SCRATCH]
        if dweight.shape[0] > 0:
            linear_weight(dweight, dweight_add or lo > 0, empty, False, dlogits, x, panels, blocks, queue)
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


def work_floats(sizes):
    """Scratch of the threads: that of the products, and a strip of the weight's gradient."""
    return for_each_thread(max(PER_THREAD, WEIGHT_SCRATCH + max(STRIP, MR * sizes["C"])))(sizes)


@by_rule(
    "optimized",
    "classifier_update",
    "weight",
    of=HALF,
    scratch=[
        *logits(lambda s: s["BT"]),
        ("work", work_floats),
        ("parts", lambda s: share_floats(s["BT"], s["C"], up(s["V"], 2))),
        ("slot", V, "int32"),
        ("partial", V),
    ],
)
def classifier_update(rule):
    """All tokens are one block; the weight's gradient is applied strip by strip, or put aside.

    Parallel: as the products; between them the tokens.
    Memory: the logits, and half of them; for each thread a strip of their gradient and one of the weight's.
    Bound: compute; for few tokens, the memory of weight and states.
    """
    update, rows_of = update_linear(rule, *BY_PAIRS), rule.rows

    @helper()
    def classifier_update(
        weight, weight_numbers, loss, losses, dinp, dinp_add, held, sumsq, dloss, inp, copy, targets, tokens,
        ignore_index, logits, words, panels, rows, queue, work, parts, slot, partial,
    ):  # fmt: skip
        BT, C = inp.shape
        V = weight[0].shape[0]
        W, size = (V + 1) // 2, WEIGHT_SCRATCH + max(STRIP, MR * C)
        threads = work.shape[0] // max(PER_THREAD, size)
        share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
        slots = slot[: V if tokens.shape[0] > 0 else 0]
        put_aside(slots, held, tokens)
        part, pairs = logits.reshape(BT, V), words.reshape(BT, W)
        linear_bf16(part, inp, copy, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue, rows)
        dlogits = halves(pairs)
        gradient_block(part, dlogits, losses, share, targets, ignore_index)
        linear_input(dinp, dinp_add, pairs, copy, work[: threads * INPUT_SCRATCH], parts, queue)
        no_bias = rows_of(rows_of(weight, 0), slice(0, 0))
        update(
            weight, no_bias, weight_numbers, weight_numbers, held, slots, sumsq, dlogits, inp, panels,
            work[: threads * size], partial, queue,
        )  # fmt: skip
        loss[0] = sum_in_order(losses) / count(targets, ignore_index)

    return classifier_update
