"""The classifier on vectors: the three products of ``matmul`` on a block of logits, which become their own gradient.

If a target is ignored, the rows of the tokens that count are gathered first: no others have logits. A gradient of less
precision than the logits is rounded for the two products with it.
"""

import numpy as np
from numba import prange

from ... import ops
from ...ops.classifier import BLOCK
from ..compile.jit import helper, kernel
from ..toolkit.blocks import ceil
from ..toolkit.constants import ZERO
from ..toolkit.micro.blocking import LINE, SHARED
from ..toolkit.pairs import is_half, narrow
from ..toolkit.queue import QUEUE, for_each_thread
from ..toolkit.rules import by_epilogue
from ..toolkit.simd import NR
from .cross_entropy import backward_row, count, shifted_sum, sum_in_order
from .matmul import FORWARD_SCRATCH, PRODUCTS, share_floats, up, weight_floats_by, weight_parts


def block(sizes):
    """Tokens of a block."""
    return min(BLOCK, sizes["BT"])


def every(sizes):
    """All tokens."""
    return sizes["BT"]


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


@helper()
def row_floats(V):
    """Size a row of logits: each begins a cache line, and so does that of its gradient in bfloat16."""
    return ceil(V, 2 * LINE) * 2 * LINE


@helper(parallel=True)
def loss_block(logits, V, losses, targets, ignore_index, rows):
    """Compute the losses of some tokens."""
    for t in prange(logits.shape[0]):
        first = np.int64(t) * logits.shape[1]
        total, top = shifted_sum(logits, first, first + V)
        target = targets[rows[t]]
        losses[rows[t]] = np.log(total) + (top - logits[t, target]) if target != ignore_index else ZERO


@helper()
def gradient_row(logits, V, losses, share, targets, ignore_index, t, bt):
    """Compute the loss of a token, and turn its logits into their gradient."""
    lo = t * logits.shape[1]
    hi = lo + V
    if targets[bt] != ignore_index:
        total, top = shifted_sum(logits, lo, hi)
        losses[bt] = np.log(total) + (top - logits[t, targets[bt]])
        backward_row(logits, False, logits, top, share / total, lo, hi)
        logits[t, targets[bt]] -= share  # loss = sum(lse - logits[target]) / n
    else:
        for v in range(V):
            logits[t, v] = ZERO


@helper(parallel=True)
def gradient_block(logits, gradient, V, losses, share, targets, ignore_index, rows):
    """Compute the losses of some tokens, and turn the logits into their gradient, which is rounded if need be."""
    W = gradient.shape[1]
    for t in prange(logits.shape[0]):
        row = np.int64(t)
        gradient_row(logits, V, losses, share, targets, ignore_index, row, rows[t])
        if is_half(gradient):
            narrow(gradient, row * W, logits, row * logits.shape[1], V, False)
            if W > V:
                gradient[t, V] = 0  # the other half of a word


def scratch_of(products, tokens, per_thread, steps=False):
    """List the scratch of so many tokens.

    Behind the logits there are their gradient, if it is rounded, and packed words. The panels are those of forward and
    weight gradient in turn; `per_thread` is the scratch of a thread.
    """
    micro, floats = products.micro, weight_floats_by(products.micro, steps).py_func

    def logits(s):
        n, V, C = tokens(s), s["V"], s["C"]
        row = row_floats.py_func(V)
        return n * (row + (row // micro.group if micro.rounds else 0)) + micro.room((n, C), (V, C))

    def panels(s):
        n, C = tokens(s), s["C"]
        return max(products.forward_panels(n, C, s["V"]), (n // micro.group + 1) * up(C, NR) * micro.lines)

    return [
        ("logits", logits),
        ("panels", panels),
        QUEUE,
        ("work", for_each_thread(lambda s: max(per_thread, floats(s["C"])))),
        ("counted", lambda s: s["BT"], "int32"),
        ("some", lambda s: -(-tokens(s) * s["C"] // micro.group)),
    ]


def backward_scratch(products, per_thread, steps):
    """List the scratch of the backward: of all tokens at once if it takes an optimizer's step."""
    tokens = every if steps else block

    def parts(s):
        """Size the sums of dinp by shares, however many tokens count; without an update that follows there are none."""
        V, most = up(s["V"], products.micro.group), min(s["BT"], SHARED) if steps else 0
        return max((share_floats(n, s["C"], V) for n in range(1, most + 1)), default=0)

    made = ("parts", parts), ("dsome", lambda s: tokens(s) * s["C"])
    return [*scratch_of(products, tokens, per_thread, steps), *made]


def register(products):
    """Register the kernels of a storage type."""
    micro, forward, operands, input_floats = products.micro, products.forward, products.operands, products.input_floats
    words, elements, operand, weight_of = micro.words, micro.elements, micro.operand, micro.weight
    of, backward_input = micro.storage, products.backward_input
    per_thread = max(FORWARD_SCRATCH, input_floats, weight_parts(micro)[-1])

    @kernel(ops.classifier_forward, "optimized", of=of, scratch=scratch_of(products, block, per_thread), parallel=False)
    def classifier_forward(
        loss, losses, inp, weight, targets, ignore_index, logits, panels, queue, work, counted, some
    ):
        """Block by block of the tokens that count: the logits, and each row's loss.

        Parallel: as the product; then the tokens of a block. The mean is serial, in the order of the tokens.
        Memory: a block of logits.
        Bound: compute.
        """
        (BT, C), V, W = inp.shape, weight.shape[0], row_floats(weight.shape[0])
        threads, n = work.shape[0] // per_thread, find_rows(counted, losses, targets, ignore_index)
        for lo in range(0, n, BLOCK):
            hi = min(n, lo + BLOCK)
            part, x, rows = logits[: (hi - lo) * W].reshape(hi - lo, W), inp[lo:hi], counted[lo:hi]
            if n < BT:
                x = elements(some)[: (hi - lo) * C].reshape(hi - lo, C)
                gather(x, inp, rows)
            a, w = operands(x, weight, logits)
            forward(part, a, w, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
            loss_block(part, V, losses, targets, ignore_index, rows)
        loss[0] = sum_in_order(losses) / count(targets, ignore_index)

    @by_epilogue(
        ops.classifier_backward,
        "optimized",
        of=of,
        scratch=lambda steps: backward_scratch(products, per_thread, steps),
        skips=["dinp", "dweight"],
    )
    def classifier_backward(epilogue):
        """Block by block of the tokens that count: the logits, their gradient, and the two products with it.

        All of them are one block if an optimizer's step is taken.

        Parallel: as the products; between them the tokens of a block.
        Memory: a block of logits, and their gradient if it is rounded; a strip of the weight's gradient for each
        thread, if a step is taken from it.
        Bound: compute; for few tokens, the memory of weight and states.
        """
        backward_weight, again, steps = products.backward_weight(epilogue), epilogue.again, epilogue.steps
        count_floats = weight_floats_by(micro, steps)

        @helper()
        def classifier_backward(to, loss, losses, dinp, dinp_add, dloss, inp, weight, targets, ignore_index, *scratch):
            BT, C = inp.shape
            logits, panels, queue, work, counted, some, parts, dsome = scratch
            read = weight_of(to[0], weight)
            V, most, size = read.shape[0], BT if steps else BLOCK, count_floats(C)
            W = row_floats(V)
            threads = work.shape[0] // max(per_thread, size)
            share = dloss[0] / np.float32(max(count(targets, ignore_index), 1))
            n = find_rows(counted, losses, targets, ignore_index)
            if n < BT and not dinp_add:
                clear(dinp, targets, ignore_index)
            for lo in range(0, n, most):
                hi = min(n, lo + most)
                part, x, rows = logits[: (hi - lo) * W].reshape(hi - lo, W), inp[lo:hi], counted[lo:hi]
                if n < BT:
                    x = elements(some)[: (hi - lo) * C].reshape(hi - lo, C)
                    gather(x, inp, rows)
                a, w = operands(x, read, logits)
                forward(part, a, w, loss[:0], panels, work[: threads * FORWARD_SCRATCH], queue)
                dlogits, _ = operand(part, logits[part.size :])
                gradient_block(part, dlogits, V, losses, share, targets, ignore_index, rows)
                if dinp.shape[0] > 0:
                    d = dinp[lo:hi]
                    if n < BT:
                        d = dsome[: (hi - lo) * C].reshape(hi - lo, C)
                        if dinp_add:
                            gather(d, dinp, rows)
                    a, _ = words(dlogits, parts)
                    room = panels if hi - lo > SHARED else parts  # for those of the weight, or for the sums of shares
                    backward_input(d, dinp_add, a, read, work[: threads * input_floats], room, queue)
                    if n < BT:
                        scatter(dinp, d, rows)
                if to[0].shape[0] > 0:
                    backward_weight(again(to, lo > 0), dlogits, x, panels, work[: threads * size], queue)
            loss[0] = sum_in_order(losses) / count(targets, ignore_index)

        return classifier_backward


for products in PRODUCTS:
    register(products)
