"""Embedding on vectors: rows are copied; backward each row of a gradient has one owner, so equal tokens never race."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import B, C, T
from ..compile.jit import helper, kernel
from ..toolkit.constants import ZERO
from ..toolkit.rules import by_epilogue

OWNERS = 32  # token id and position modulo this: more than threads, few enough that all may read through the tokens
ROWS = 64  # of a gradient to zero at a time: 196 KB at 768 channels


@helper(forceinline=True)
def gather(out, row, position):
    """Copy a row, or add the row of its position."""
    if position.shape[0] > 0:
        for i in range(out.shape[0]):
            out[i] = row[i] + position[i]
    else:
        for i in range(out.shape[0]):
            out[i] = row[i]


@helper()
def add(grad, dout):
    """Add a row."""
    for i in range(grad.shape[0]):
        grad[i] += dout[i]


@helper()
def zero(grad):
    """Zero some rows."""
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            grad[i, j] = ZERO


@helper()
def sum_position(dwpe, dwpe_add, dout, starts, p):
    """Sum the rows of the tokens at one position, row by row of the batch, or add them to what is there."""
    B, T, _ = dout.shape
    if not dwpe_add:
        zero(dwpe[p : p + 1])
    for b in range(B):
        if starts.shape[0] > 0:
            for t in range(p, T):
                if starts[b, t] == t - p:
                    add(dwpe[p], dout[b, t])
        elif p < T:
            add(dwpe[p], dout[b, p])


@kernel(ops.embedding_forward, "optimized")
def embedding_forward(out, tokens, wte, wpe, starts):
    """Copy the row of each token, and add the row of its position.

    Parallel: the tokens; each owns a row of `out`.
    Bound: memory.
    """
    B, T, _ = out.shape
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        p = t - starts[b, t] if starts.shape[0] > 0 else t
        gather(out[b, t], wte[tokens[b, t]], wpe[p])  # of no channels if it is absent


@kernel(ops.embedding_backward, "optimized", skips=["dwte"])
def embedding_backward(dwte, dwte_add, dwpe, dwpe_add, dout, tokens, starts):
    """Each owner adds its tokens' rows of `dout` in their order, then sums its positions.

    Parallel: blocks of rows to be zeroed, if `dwte` is overwritten; then owners of rows of `dwte` and of `dwpe`.
    Bound: memory.
    """
    B, T, _ = dout.shape
    V, maxT = dwte.shape[0], dwpe.shape[0]
    for block in prange(0 if dwte_add else (V + ROWS - 1) // ROWS):
        zero(dwte[block * ROWS : min(block * ROWS + ROWS, V)])
    for owner in prange(OWNERS):
        for b in range(B):
            for t in range(T):
                if V > 0 and tokens[b, t] % OWNERS == owner:
                    add(dwte[tokens[b, t]], dout[b, t])  # out[b, t] = wte[tokens[b, t]] + wpe[p]
        for p in range(owner, maxT, OWNERS):
            sum_position(dwpe, dwpe_add, dout, starts, p)


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


def token_rows(steps):
    """List the scratch of the update: a row of the gradient for each token, and its squares."""
    return [("rows", B * T * C), ("partial", B * T)]


@by_epilogue(ops.embedding_backward, "optimized", scratch=token_rows, stored=False)
def embedding_update(epilogue):
    """Sum the gradient of each row that is named, and take its step; then the positions' gradient.

    Parallel: the tokens, of which the first of equal ones owns their row; then the positions.
    Bound: memory.
    """
    begin, step_row, end = epilogue.begin, epilogue.row, epilogue.end

    @helper(parallel=True)
    def embedding_update(to, dwpe, dwpe_add, held, dout, tokens, starts, rows):
        B, T, C = dout.shape
        ids = tokens.reshape(B * T)
        begin(to)
        held_rows, flat = held.reshape(B * T, C), dout.reshape(B * T, C)
        for bt in prange(B * T):
            if first_of(ids, bt):
                row = rows[np.int64(bt) * C : np.int64(bt) * C + C]
                gradient(row, held_rows, flat, ids, bt)
                step_row(to, ids[bt], row, bt)
        for p in prange(dwpe.shape[0]):
            sum_position(dwpe, dwpe_add, dout, starts, p)
        end(to, B * T)

    return embedding_update
