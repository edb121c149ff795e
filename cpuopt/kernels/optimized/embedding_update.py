"""Embedding gradient and AdamW step in one: the first of equal tokens owns their row."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import B, C, T
from ..compile.jit import helper, kernel
from .adamw import update
from .embedding import add, zero
from .matmul_update import squares


@helper()
def first_of(tokens, bt):
    """Whether no earlier token is the same."""
    for i in range(bt):
        if tokens[i] == tokens[bt]:
            return False
    return True


@helper()
def gradient(row, held, dout, tokens, bt):
    """Sum the rows of all tokens like this one, in order; none before it is like it."""
    for i in range(row.shape[0]):
        row[i] = 0
    for other in range(bt, tokens.shape[0]):
        if tokens[other] == tokens[bt]:
            add(row, held[other])
            add(row, dout[other])


@kernel(ops.embedding_update, "optimized", scratch=[("rows", B * T * C), ("partial", B * T)])
def embedding_update(
    wte, wte_m, wte_v, dwpe, dwpe_add, sumsq, held, dout, tokens, lr, beta1, beta2, eps, weight_decay, step, rows,
    partial,
):  # fmt: skip
    """Sum the gradient of each row that is named, and take its step; then the positions' gradient.

    Parallel: the tokens; then the positions. The squares are summed in the order of the tokens.
    Bound: memory.
    """
    B, T, C = dout.shape
    b1, c1, b2, c2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    rate, root = np.float32(lr / (1 - beta1**step)), np.float32(1 / np.sqrt(1 - beta2**step))
    small, decay, one = np.float32(eps), np.float32(lr * weight_decay), np.float32(1)
    ids = tokens.reshape(B * T)
    held, flat = held.reshape(B * T, C), dout.reshape(B * T, C)
    for bt in prange(B * T):
        partial[bt] = np.float32(0)
        if first_of(ids, bt):
            v, row = ids[bt], rows[np.int64(bt) * C : np.int64(bt) * C + C]
            gradient(row, held, flat, ids, bt)
            update(wte[v], wte_m[v], wte_v[v], row, b1, c1, b2, c2, rate, root, small, decay, one)
            partial[bt] = squares(row)
    for t in prange(dwpe.shape[0]):
        if not dwpe_add:
            zero(dwpe[t : t + 1])
        for b in range(B if t < T else 0):
            add(dwpe[t], dout[b, t])
    total = np.float32(0)
    for bt in range(B * T):
        total += partial[bt]
    sumsq[0] = total
