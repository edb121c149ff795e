"""Embedding, naive: rows copied forward, rows added backward."""

from numba import prange

from ... import ops
from ..compile.jit import kernel
from ..toolkit.rules import stepped


@kernel(ops.embedding_forward, "vanilla")
def embedding_forward(out, tokens, wte, wpe, starts):
    """Copy the row of each token, and add the row of its position.

    Parallel: the tokens; each owns a row of `out`.
    Bound: memory.
    """
    B, T, C = out.shape
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        p = t - starts[b, t] if starts.shape[0] > 0 else t
        for i in range(C):
            out[b, t, i] = wte[tokens[b, t], i]
            if wpe.shape[0] > 0:
                out[b, t, i] += wpe[p, i]


@stepped
@kernel(ops.embedding_backward, "vanilla", skips=["dwte"])
def embedding_backward(dwte, dwte_add, dwpe, dwpe_add, dout, tokens, starts):
    """Add each row of `dout` to the row of its token and of its position.

    Parallel: the channels; each owns a column of `dwte` and of `dwpe`, so two equal tokens never race.
    Bound: memory, one element of a row at a time.
    """
    B, T, C = dout.shape
    for i in prange(C):
        if not dwte_add:
            for v in range(dwte.shape[0]):
                dwte[v, i] = 0
        if not dwpe_add:
            for t in range(dwpe.shape[0]):
                dwpe[t, i] = 0
        for b in range(B):
            for t in range(T):
                d = dout[b, t, i]
                p = t - starts[b, t] if starts.shape[0] > 0 else t
                if dwte.shape[0] > 0:
                    dwte[tokens[b, t], i] += d  # out[b, t, i] = wte[tokens[b, t], i] + wpe[p, i]
                if dwpe.shape[0] > 0:
                    dwpe[p, i] += d
