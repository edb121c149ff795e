"""Embedding and attention behind a cache, naive: a row of scores at a time."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import NH, B, S
from ..compile.jit import kernel


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
            out[b, t, i] = wte[tokens[b, t], i]
            if wpe.shape[0] > 0:
                out[b, t, i] += wpe[place, i]


@kernel(ops.attention_decode, "vanilla", scratch=[("att", B * NH * S)])
def attention_decode(out, keys, values, qkv, position, window, cap, att):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and head; each owns its channels of `out`, its part of the cache, and a slice of `att`.
    Memory: one row of attention weights a head.
    Bound: memory.
    """
    B, T, C = out.shape
    NH, S, HS = keys.shape[1:]
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    for bh in prange(B * NH):
        b, h, a = bh // NH, bh % NH, bh * S
        # pass 1: the cache
        for t in range(T):
            for i in range(HS):
                keys[b, h, position + t, i] = qkv[b, t, C + h * HS + i]
                values[b, h, position + t, i] = qkv[b, t, 2 * C + h * HS + i]
        for t in range(T):
            low = max(position + t - window + 1, 0) if window > 0 else 0
            # pass 2: q . k, and the maximum
            top = np.float32(-np.inf)
            for t2 in range(low, position + t + 1):
                score = np.float32(0)
                for i in range(HS):
                    score += qkv[b, t, h * HS + i] * keys[b, h, t2, i]
                score *= scale
                if cap > 0:
                    score = np.float32(cap) * np.tanh(score / np.float32(cap))
                top = max(top, score)
                att[a + t2] = score
            # pass 3: exp, and the sum
            total = np.float32(0)
            for t2 in range(low, position + t + 1):
                e = np.exp(att[a + t2] - top)
                total += e
                att[a + t2] = e
            # pass 4: gather the values
            for i in range(HS):
                val = np.float32(0)
                for t2 in range(low, position + t + 1):
                    val += att[a + t2] / total * values[b, h, t2, i]
                out[b, t, h * HS + i] = val
