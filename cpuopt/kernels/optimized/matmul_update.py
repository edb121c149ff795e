"""Weight gradient and update in one: a strip of the gradient stays in the cache until its weights are updated."""

from functools import cache

import numpy as np
from numba import prange

from ...ops.declaration import OC
from ..compile.jit import helper
from ..toolkit.queue import QUEUE, deal, for_each_thread, take
from ..toolkit.rules import by_rule
from ..toolkit.simd import MR, NR
from .matmul import (
    BY_FLOATS,
    OUTPUTS,
    WEIGHT_BLOCK,
    WEIGHT_SCRATCH,
    ceil,
    even,
    largest,
    piece,
    pieces,
    up,
)

ONE = np.float32(1)
STRIP = 65536  # floats of gradient in a strip: half of a 512 KB L2


def strips(sizes):
    """Scratch of the threads: that of ``weight_chunk``, and a strip of the gradient."""
    return for_each_thread(WEIGHT_SCRATCH + max(STRIP, MR * sizes["C"]))(sizes)


@helper()
def squares(x):
    """Sum the squares of a row."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@helper()
def copy_row(to, x):
    """Copy a row."""
    for i in range(x.shape[0]):
        to[i] = x[i]


@cache
def update_linear(rule, pack_panel, weight_chunk, block_tokens, per):
    """Make the function that packs the columns of the tokens, and then strip by strip makes the gradient and updates.

    Row n is not updated where `slot` is there and slot[n] >= 0: its gradient goes to that row of `held`. The other
    parameters are those of `weight_by`.
    """
    rows, update = rule.rows, rule.update

    @helper(parallel=True)
    def update_linear(
        weight, bias, weight_numbers, bias_numbers, held, slot, sumsq, dout, inp, panels, blocks, partial, queue
    ):
        M, C = inp.shape
        N = weight[0].shape[0]
        depth = even(M, block_tokens, per)
        for i in prange(ceil(C, NR) * ceil(M, depth)):
            pack_panel(i, panels, inp, depth)
        size = WEIGHT_SCRATCH + max(STRIP, MR * C)
        threads = blocks.shape[0] // size
        fits = max(MR, STRIP // C)
        chunks = pieces(N, min(OUTPUTS, fits), 1, 1, threads)
        tall = largest(chunks, N, 1)
        deal(queue, chunks)
        for t in prange(threads):
            mine = blocks[t * size : (t + 1) * size]
            block, spare = mine[:WEIGHT_BLOCK], mine[WEIGHT_BLOCK:WEIGHT_SCRATCH]
            grad = mine[WEIGHT_SCRATCH : WEIGHT_SCRATCH + tall * C].reshape(tall, C)
            chunk = take(queue, t)
            while chunk >= 0:
                n0, n1 = piece(chunk, chunks, N, 1), piece(chunk + 1, chunks, N, 1)
                weight_chunk(grad, 0, False, dout, panels, block, spare, n0, n1, tall, depth)
                for i in range(n1 - n0):
                    n = n0 + i
                    if slot.shape[0] > 0 and slot[n] >= 0:
                        copy_row(held[slot[n]], grad[i])
                        partial[n] = np.float32(0)
                    else:
                        update(rows(weight, n), grad[i], ONE, weight_numbers)
                        partial[n] = squares(grad[i])
                if bias[0].shape[0] > 0:
                    db = spare[: n1 - n0]
                    update(rows(bias, slice(n0, n1)), db, ONE, bias_numbers)
                    for i in range(n1 - n0):
                        partial[n0 + i] += db[i] * db[i]
                chunk = take(queue, t)
        total = np.float32(0)
        for n in range(N):
            total += partial[n]
        sumsq[0] = total

    return update_linear


SCRATCH = [("panels", lambda s: s["BT"] * up(s["C"], NR)), ("blocks", strips), ("partial", OC), QUEUE]
"""Scratch of a linear layer's update."""


@cache
def update_layer(rule, *parts):
    """Make the kernel of a linear layer's update."""
    update = update_linear(rule, *parts)

    @helper()
    def matmul_update(
        weight, bias, weight_numbers, bias_numbers, sumsq, dout, inp, panels, blocks, partial, queue
    ):  # fmt: skip
        none = weight[0][:0], queue[:0]
        update(
            weight, bias, weight_numbers, bias_numbers, *none, sumsq, dout, inp, panels, blocks, partial, queue
        )  # fmt: skip

    return matmul_update


@by_rule("optimized", "matmul_update", "weight", "bias", scratch=SCRATCH)
def matmul_update(rule):
    """Pack the columns of the tokens, then strip by strip: the gradient, then the step.

    Parallel: packing by panel; then chunks by ticket, each owns rows of the weight and its states.
    Memory: the packed tokens; a strip of dout and one of the gradient for each thread.
    Bound: compute; for few tokens, the memory of weight and states.
    """
    return update_layer(rule, *BY_FLOATS)
