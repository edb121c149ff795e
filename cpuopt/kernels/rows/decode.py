"""Attention behind a cache for few queries, and their embedding: on one thread while there is little to read."""

import numpy as np
from numba import prange

from ... import ops
from ...op import NH, B, S
from ..jit import helper, kernel
from ..optimized.decode import put_away, query
from ..optimized.embedding import gather
from . import SMALL


@helper()
def head(out, keys, values, qkv, position, att, bh):
    """Do one head of one row of the batch."""
    T, C = out.shape[1:]
    NH, S, HS = keys.shape[1:]
    b, h = bh // NH, bh % NH
    cache, q, o = bh * S * HS, b * T * 3 * C + h * HS, b * T * C + h * HS
    put_away(keys, values, cache, qkv, q, position, T, C, HS)
    for t in range(T):
        query(out, o + t * C, keys, values, cache, qkv, q + t * 3 * C, position + t + 1, HS, att, bh * S)


@kernel(ops.attention_decode, "rows", scratch=[("att", B * NH * S)])
def attention_decode(out, keys, values, qkv, position, att):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and head; each owns its channels of `out`, its part of the cache, and a row of `att`.
    Memory: one row of attention weights a head.
    Bound: memory.
    """
    B, T, C = out.shape
    heads = B * keys.shape[1]
    if 8 * B * T * C * (position + T) < SMALL:
        for bh in range(heads):
            head(out, keys, values, qkv, position, att, bh)
    else:
        for bh in prange(heads):
            head(out, keys, values, qkv, position, att, np.int64(bh))


@kernel(ops.embedding_decode, "rows", parallel=False)
def embedding_decode(out, tokens, wte, wpe, position):
    """Copy the row of each token, and add the row of its position.

    Bound: memory.
    """
    B, T, _ = out.shape
    for b in range(B):
        for t in range(T):
            gather(out[b, t], wte[tokens[b, t]], wpe[min(position + t, wpe.shape[0] - 1)])
