"""The classifier over a weight in int8: products of integers give a block of logits, which become their own gradient.

If a target is ignored, the rows of the tokens that count are gathered first: no others have logits.
"""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ..compile.jit import helper, kernel
from ..toolkit.pairs import is_half, narrow
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_epilogue
from .classifier import block, clear, find_rows, gather, gradient_row, loss_block
from .cross_entropy import count, sum_in_order
from .matmul import PRODUCTS
from .matmul_int8 import WORD, multiply_outputs, row_words, thread_words, to_nearest

SCRATCH = [
    ("logits", lambda s: block(s) * s["V"]),
    ("some", lambda s: block(s) * s["C"]),
    ("counted", lambda s: s["BT"], "int32"),
    ("q", lambda s: block(s) * row_words.py_func(s["C"]), "int32"),
    ("steps", block),
    ("offsets", block, "int32"),
    ("panels", for_each_thread(lambda s: thread_words(-(-s["C"] // WORD)))),
    QUEUE,
]


@helper()
def block_logits(lo, hi, n, inp, weight, scales, *scratch):
    """Compute the logits of the tokens lo to hi of those that count."""
    (BT, C), V = inp.shape, weight.shape[0]
    logits, some, counted, q, steps, offsets, panels, queue = scratch
    part, none = logits[: (hi - lo) * V].reshape(hi - lo, V), scales[:0]
    if n < BT:
        x = some[: (hi - lo) * C].reshape(hi - lo, C)
        gather(x, inp, counted[lo:hi])
        to_nearest(q, steps, offsets, x, scales, 0)
    else:
        to_nearest(q, steps, offsets, inp[lo:hi], scales, 0)
    multiply_outputs(part, False, q, steps, offsets, C, weight, scales, none, panels, queue)
    return part


@helper(parallel=True)
def gradient_block(logits, dlogits, losses, share, targets, ignore_index, rows):
    """Compute the losses of some tokens, and write the gradient of their logits."""
    V = logits.shape[1]
    flat = dlogits.reshape(dlogits.size)
    for t in prange(logits.shape[0]):
        gradient_row(logits, V, losses, share, targets, ignore_index, t, rows[t])
        if is_half(dlogits):
            narrow(flat, rows[t] * V, logits, t * V, V, False)
        else:
            for v in range(V):
                dlogits[rows[t], v] = logits[t, v]


@kernel(ops.classifier_int8_forward, "optimized", scratch=SCRATCH, parallel=False)
def classifier_int8_forward(
    loss, losses, inp, weight, scales, targets, ignore_index,
    logits, some, counted, q, steps, offsets, panels, queue,
):  # fmt: skip
    """Block by block of the tokens that count: the logits, and each row's loss.

    Parallel: as the product; then the tokens of a block. The mean is serial, in the order of the tokens.
    Memory: a block of logits.
    Bound: compute.
    """
    n = find_rows(counted, losses, targets, ignore_index)
    for lo in range(0, n, BLOCK):
        hi = min(n, lo + BLOCK)
        part = block_logits(lo, hi, n, inp, weight, scales, logits, some, counted, q, steps, offsets, panels, queue)
        loss_block(part, part.shape[1], losses, targets, ignore_index, counted[lo:hi])
    loss[0] = sum_in_order(losses) / count(targets, ignore_index)


@kernel(ops.classifier_int8_backward, "optimized", scratch=SCRATCH, parallel=False)
def classifier_int8_backward(
    loss, losses, dlogits, dloss, inp, weight, scales, targets, ignore_index,
    logits, some, counted, q, steps, offsets, panels, queue,
):  # fmt: skip
    """Block by block of the tokens that count: the logits, and each row's loss and gradient.

    Parallel: as the product; then the tokens of a block. The mean is serial, in the order of the tokens.
    Memory: a block of logits.
    Bound: compute.
    """
    n, counts = find_rows(counted, losses, targets, ignore_index), count(targets, ignore_index)
    share = dloss[0] / np.float32(max(counts, 1))
    if n < inp.shape[0]:
        clear(dlogits, targets, ignore_index)
    for lo in range(0, n, BLOCK):
        hi = min(n, lo + BLOCK)
        part = block_logits(lo, hi, n, inp, weight, scales, logits, some, counted, q, steps, offsets, panels, queue)
        gradient_block(part, dlogits, losses, share, targets, ignore_index, counted[lo:hi])
    loss[0] = sum_in_order(losses) / counts


def register(products):
    """Register the weight's gradient of a storage type."""

    @by_epilogue(ops.head_backward_weight, "optimized", of=products.micro.storage, scratch=products.weight_scratch)
    def head_backward_weight(epilogue):
        """Pack the columns of the tokens, then strips of dout's columns times all panels, as of a linear layer.

        Parallel: packing by panel; then chunks by ticket, each owns rows of the gradient, or of the weight and its
        states.
        Memory: the packed tokens; for each thread a strip of dout, and one of the gradient if a step is taken from it.
        Bound: compute; for few tokens, the memory of the gradient, or of weight and states.
        """
        return products.backward_weight(epilogue)


for products in PRODUCTS:
    register(products)
