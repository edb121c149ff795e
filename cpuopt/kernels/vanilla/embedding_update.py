"""Embedding gradient and AdamW step in one, naive: a row of the gradient at a time."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import B, C, T
from ..compile.jit import helper, kernel


@helper()
def is_first(tokens, bt):
    """Whether no earlier token is the same."""
    T = tokens.shape[1]
    for i in range(bt):
        if tokens[i // T, i % T] == tokens[bt // T, bt % T]:
            return False
    return True


@kernel(ops.embedding_update, "vanilla", scratch=[("row", B * T * C), ("partial", B * T)])
def embedding_update(
    wte, wte_m, wte_v, dwpe, dwpe_add, sumsq, held, dout, tokens, lr, beta1, beta2, eps, weight_decay, step, row,
    partial,
):  # fmt: skip
    """The first of equal tokens sums the gradient of their row, and takes its step.

    Parallel: the tokens; then the positions. The squares are summed in the order of the tokens.
    Bound: memory.
    """
    B, T, C = dout.shape
    b1, b2 = np.float32(beta1), np.float32(beta2)
    c1, c2 = np.float32(1 - beta1), np.float32(1 - beta2)
    m_unbias = np.float32(1 / (1 - beta1**step))
    v_unbias = np.float32(1 / (1 - beta2**step))
    rate, small, decay = np.float32(lr), np.float32(eps), np.float32(lr * weight_decay)
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
            for i in range(C):
                mi = b1 * wte_m[v, i] + c1 * g[i]
                vi = b2 * wte_v[v, i] + c2 * g[i] * g[i]
                wte_m[v, i] = mi
                wte_v[v, i] = vi
                wte[v, i] -= rate * (mi * m_unbias) / (np.sqrt(vi * v_unbias) + small) + decay * wte[v, i]
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
