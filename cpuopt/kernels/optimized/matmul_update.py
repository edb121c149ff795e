"""Weight gradient and AdamW step in one: a strip of the gradient stays in the cache until its weights are updated."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import OC
from ..compile.jit import helper, kernel
from ..toolkit.simd import MR, NR, ticket
from .adamw import update
from .matmul import (
    LINE,
    TALL,
    WEIGHT_BLOCK,
    WEIGHT_DEPTH,
    WEIGHT_SCRATCH,
    ceil,
    chunk_size,
    pack_all_columns,
    up,
    weight_chunk,
)
from .matmul import each as for_each_thread

STRIP = 65536  # floats of gradient in a strip: half of a 512 KB L2


def strips(sizes):
    """Scratch of the threads: what ``weight_chunk`` needs, and a strip of the gradient."""
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


@helper(parallel=True)
def update_linear(
    weight, weight_m, weight_v, bias, bias_m, bias_v, held, slot, sumsq, dout, inp, lr, beta1, beta2, eps,
    weight_decay, bias_decay, step, panels, blocks, partial, queue,
):  # fmt: skip
    """Pack the columns of the tokens, then strip by strip: the gradient, then the step.

    Row n takes no step where `slot` is there and slot[n] >= 0: its gradient goes to that row of `held`.
    """
    M, C = inp.shape
    N = dout.shape[1]
    queue[0] = 0
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    rate, root = np.float32(lr / (1 - beta1**step)), np.float32(1 / np.sqrt(1 - beta2**step))
    small, one = np.float32(eps), np.float32(1)
    decay, decay_bias = np.float32(lr * weight_decay), np.float32(lr * bias_decay)
    depth = min(M, WEIGHT_DEPTH)
    for i in prange(ceil(C, NR) * ceil(M, depth)):
        pack_all_columns(i, panels, inp, depth)
    size = WEIGHT_SCRATCH + max(STRIP, MR * C)
    threads = blocks.shape[0] // size
    fits = max(MR, STRIP // C // MR * MR)
    tall = min(fits, chunk_size(N, TALL, MR, 1, threads))
    chunks = ceil(N, tall)
    for t in prange(threads):
        mine = blocks[t * size : (t + 1) * size]
        block, spare = mine[:WEIGHT_BLOCK], mine[WEIGHT_BLOCK:WEIGHT_SCRATCH]
        grad = mine[WEIGHT_SCRATCH : WEIGHT_SCRATCH + tall * C].reshape(tall, C)
        chunk = ticket(queue)
        while chunk < chunks:
            n0, n1 = chunk * tall, min(N, chunk * tall + tall)
            weight_chunk(grad, 0, False, dout, panels, block, spare, n0, n1, tall, depth)
            for i in range(n1 - n0):
                n = n0 + i
                if slot.shape[0] > 0 and slot[n] >= 0:
                    copy_row(held[np.int64(slot[n])], grad[i])
                    partial[n] = np.float32(0)
                else:
                    update(weight[n], weight_m[n], weight_v[n], grad[i], b1, c1, b2, c2, rate, root, small, decay, one)
                    partial[n] = squares(grad[i])
            if bias.shape[0] > 0:
                db = spare[: n1 - n0]
                b, m, v = bias[n0:n1], bias_m[n0:n1], bias_v[n0:n1]
                update(b, m, v, db, b1, c1, b2, c2, rate, root, small, decay_bias, one)
                for i in range(n1 - n0):
                    partial[n0 + i] += db[i] * db[i]
            chunk = ticket(queue)
    total = np.float32(0)
    for n in range(N):
        total += partial[n]
    sumsq[0] = total


@kernel(
    ops.matmul_update,
    "optimized",
    scratch=[
        ("panels", lambda s: s["BT"] * up(s["C"], NR)),
        ("blocks", strips),
        ("partial", OC),
        ("queue", LINE, "int32"),
    ],
    parallel=False,
)
def matmul_update(
    weight, weight_m, weight_v, bias, bias_m, bias_v, sumsq, dout, inp, lr, beta1, beta2, eps, weight_decay, bias_decay,
    step, panels, blocks, partial, queue,
):  # fmt: skip
    """Pack the columns of the tokens, then strip by strip: the gradient, then the step.

    Parallel: packing by panel; then chunks by ticket, each owns rows of the weight and its moments.
    Memory: the packed tokens; a strip of dout and one of the gradient for each thread.
    Bound: compute; for few tokens, the memory of weight and moments.
    """
    update_linear(
        weight, weight_m, weight_v, bias, bias_m, bias_v, weight[:0], bias[:0], sumsq, dout, inp, lr, beta1, beta2,
        eps, weight_decay, bias_decay, step, panels, blocks, partial, queue,
    )  # fmt: skip
