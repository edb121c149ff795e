"""Embedding and causal attention of new tokens behind others, whose keys and values a cache holds.

With p = position, the number of tokens before; keys and values have room for S::

    out[b, t]       = wte[tokens[b, t]] + wpe[min(p + t, maxT - 1)]                 embedding_decode

    keys[b, p + t]  = k of qkv[b, t];  values[b, p + t] = v of qkv[b, t]            attention_decode
    score[t, t2]    = s * q[t] . keys[t2]           for t2 <= p + t, s = 1/sqrt(HS)
    lse[t]          = log(sum over t2 <= p + t of exp(score[t, t2]))
    out[t]          = sum over t2 <= p + t of exp(score[t, t2] - lse[t]) * values[t2]

What is computed is what ``embedding_forward`` and ``attention_forward`` compute for the last tokens of a sequence.
Source: Vaswani et al. 2017; the cache as in Pope et al. 2022 (arXiv 2211.05102).
"""

import numpy as np

from ..op import NH, B, C, Op, S, T, V, index, inp, maxT, out, scalar, state
from .attention import heads, rows

SOURCE = "Vaswani et al. 2017, with the keys and values kept as in Pope et al. 2022"


def reference_embedding(tokens, wte, wpe, position):
    places = np.minimum(position + np.arange(tokens.shape[1]), len(wpe) - 1)
    return {"out": wte[tokens] + wpe[places]}


def reference_attention(lse, keys, values, qkv, position):
    NH, new = lse.shape[1], qkv.shape[1]
    q, k, v = np.split(qkv, 3, axis=-1)
    keys, values = keys.copy(), values.copy()
    keys[:, position : position + new], values[:, position : position + new] = k, v
    known = position + new
    q, k, v = heads(q, NH), heads(keys[:, :known], NH), heads(values[:, :known], NH)
    score = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    score = np.where(np.triu(np.ones((new, known), dtype=bool), position + 1), -np.inf, score)
    top = score.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(score - top).sum(axis=-1)) + top[..., 0]
    return {"out": rows(np.exp(score - lse[..., None]) @ v), "lse": lse, "keys": keys, "values": values}


embedding_decode = Op(
    "embedding_decode",
    out("out", B, T, C),
    index("tokens", B, T, below=V),
    inp("wte", V, C),
    inp("wpe", maxT, C),
    scalar("position", integer=True),
    label="Encoder Decode",
    flops=B * T * C,
    nbytes=4 * (3 * B * T * C + B * T),
    reference=reference_embedding,
    source=SOURCE,
)

attention_decode = Op(
    "attention_decode",
    out("out", B, T, C, reduces=S + C),
    out("lse", B, NH, T, reduces=S + C),
    state("keys", B, S, C),
    state("values", B, S, C),
    inp("qkv", B, T, 3 * C),
    scalar("position", integer=True),
    label="Attention Decode",
    flops=4 * B * T * S * C,
    nbytes=4 * (2 * B * S * C + 6 * B * T * C),
    reference=reference_attention,
    source=SOURCE,
)
