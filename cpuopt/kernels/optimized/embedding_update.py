"""Embedding gradient and its optimizer's step in one: the first of equal tokens owns their row."""

import numpy as np
from numba import prange

from ...ops.declaration import B, C, T
from ..compile.jit import helper
from ..toolkit.rules import by_rule
from .embedding import add, zero
from .matmul_update import ONE, squares


@helper()
def first_of(tokens, bt):
    """Return whether no earlier token is the same."""
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


@by_rule("optimized", "embedding_update", "wte", scratch=[("rows", B * T * C), ("partial", B * T)])
def embedding_update(rule):
    """Sum the gradient of each row that is named, and take its step; then the positions' gradient.

    Parallel: the tokens; then the positions. The squares are summed in the order of the tokens.
    Bound: memory.
    """
    rows_of, update = rule.rows, rule.update

    @helper(parallel=True)
    def embedding_update(wte, wte_numbers, dwpe, dwpe_add, sumsq, held, dout, tokens, rows, partial):
        B, T, C = dout.shape
        ids = tokens.reshape(B * T)
        held_rows, flat = held.reshape(B * T, C), dout.reshape(B * T, C)
        for bt in prange(B * T):
            partial[bt] = np.float32(0)
            if first_of(ids, bt):
                row = rows[np.int64(bt) * C : np.int64(bt) * C + C]
                gradient(row, held_rows, flat, ids, bt)
                update(rows_of(wte, ids[bt]), row, ONE, wte_numbers)
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

    return embedding_update
