"""Embedding on vectors: rows are copied; backward each row of a gradient has one owner, so equal tokens never race."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel

OWNERS = 32  # token id and position modulo this: more than threads, few enough that all may read through the tokens
ROWS = 64  # of a gradient to zero at a time: 196 KB at 768 channels
ZERO = np.float32(0)


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


@kernel(ops.embedding_forward, "optimized")
def embedding_forward(out, tokens, wte, wpe):
    """Copy the row of each token, and add the row of its position.

    Parallel: the tokens; each owns a row of `out`.
    Bound: memory.
    """
    B, T, _ = out.shape
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        gather(out[b, t], wte[tokens[b, t]], wpe[t])  # of no channels if it is absent


@kernel(ops.embedding_backward, "optimized", skips=["dwte"])
def embedding_backward(dwte, dwte_add, dwpe, dwpe_add, dout, tokens):
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
                    add(dwte[tokens[b, t]], dout[b, t])  # out[b, t] = wte[tokens[b, t]] + wpe[t]
        for t in range(owner, maxT, OWNERS):
            if not dwpe_add:
                zero(dwpe[t : t + 1])
            for b in range(B if t < T else 0):
                add(dwpe[t], dout[b, t])
