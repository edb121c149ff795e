"""Embedding gradient and its optimizer's step in one, naive: a row of the gradient at a time."""

import numpy as np
from numba import prange

from ...ops.declaration import B, C, T
from ..compile.jit import helper
from ..toolkit.rules import by_rule


@helper()
def is_first(tokens, bt):
    """Return whether no earlier token is the same."""
    T = tokens.shape[1]
    for i in range(bt):
        if tokens[i // T, i % T] == tokens[bt // T, bt % T]:
            return False
    return True


@by_rule("vanilla", "embedding_update", "wte", scratch=[("row", B * T * C), ("partial", B * T)])
def embedding_update(rule):
    """The first of equal tokens sums the gradient of their row, and takes its step.

    Parallel: the tokens; then the positions. The squares are summed in the order of the tokens.
    Bound: memory.
    """
    rows, update = rule.rows, rule.update

    @helper(parallel=True)
    def embedding_update(wte, wte_numbers, dwpe, dwpe_add, sumsq, held, dout, tokens, row, partial):
        B, T, C = dout.shape
        for bt in prange(B * T):
            v = tokens[bt // T, bt % T]
            total = np.float32(0)
            if is_first(tokens, bt):
                g = row[bt * C : bt * C + C]
                for i in range(C):
                    g[i] = 0
                for other in range(bt, B * T):
                    b, t = other // T, other % T
                    if tokens[b, t] == v:
                        for i in range(C):
                            g[i] += held[b, t, i] + dout[b, t, i]
                update(rows(wte, v), g, np.float32(1), wte_numbers)
                for i in range(C):
                    total += g[i] * g[i]
            partial[bt] = total
        for t in prange(dwpe.shape[0]):
            for i in range(C):
                d = dwpe[t, i] if dwpe_add else np.float32(0)
                for b in range(B if t < T else 0):
                    d += dout[b, t, i]
                dwpe[t, i] = d
        total = np.float32(0)
        for bt in range(B * T):
            total += partial[bt]
        sumsq[0] = total

    return embedding_update
