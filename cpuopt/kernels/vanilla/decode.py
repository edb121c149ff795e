"""Embedding and attention behind a cache, naive: a row of scores at a time."""

import numpy as np
from numba import prange

from ... import ops
from ...op import NH, B, S
from ..jit import kernel


@kernel(ops.embedding_decode, "vanilla")
def embedding_decode(out, tokens, wte, wpe, position):
    """Copy the row of each token, and add the row of its position.

    Parallel: the tokens; each owns a row of `out`.
    Bound: memory.
    """
    B, T, C = out.shape
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        place = min(position + t, wpe.shape[0] - 1)
        for i in range(C):
            out[b, t, i] = wte[tokens[b, t], i] + wpe[place, i]


@kernel(ops.attention_decode, "vanilla", scratch=[("att", B * NH * S)])
def attention_decode(out, lse, keys, values, qkv, position, att):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and head; each owns its channels of `out`, of the cache, and a slice of `att`.
    Memory: one row of attention weights a head.
    Bound: memory.
    """
    B, T, C = out.shape
    NH, S = lse.shape[1], keys.shape[1]
    HS = C // NH
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    for bh in prange(B * NH):
        b, h0, a = bh // NH, (bh % NH) * HS, bh * S
        # pass 1: the cache
        for t in range(T):
            for i in range(h0, h0 + HS):
                keys[b, position + t, i] = qkv[b, t, C + i]
                values[b, position + t, i] = qkv[b, t, 2 * C + i]
        for t in range(T):
            # pass 2: q . k, and the maximum
            top = np.float32(-np.inf)
            for t2 in range(position + t + 1):
                score = np.float32(0)
                for i in range(h0, h0 + HS):
                    score += qkv[b, t, i] * keys[b, t2, i]
                score *= scale
                top = max(top, score)
                att[a + t2] = score
            # pass 3: exp, and the sum
            total = np.float32(0)
            for t2 in range(position + t + 1):
                e = np.exp(att[a + t2] - top)
                total += e
                att[a + t2] = e
            lse[b, bh % NH, t] = np.log(total) + top
            # pass 4: gather the values
            for i in range(h0, h0 + HS):
                out[b, t, i] = 0
            for t2 in range(position + t + 1):
                p = att[a + t2] / total
                for i in range(h0, h0 + HS):
                    out[b, t, i] += p * values[b, t2, i]
