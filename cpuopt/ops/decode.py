"""Embedding and causal attention of new tokens behind others, whose keys and values a cache holds.

With p = position, the number of tokens before; keys and values have room for S tokens, a head after the other, and q, k
and v are the thirds of qkv, each NH heads of HS channels::

    out[b, t]          = wte[tokens[b, t]] + wpe[min(p + t, maxT - 1)]              embedding_decode

    keys[b, h, p + t]  = k[b, t, h];  values[b, h, p + t] = v[b, t, h]              attention_decode
    score[t, t2]       = s * q[t] . keys[t2]           for low <= t2 <= p + t, s = 1/sqrt(HS)
    out[t]             = sum over low <= t2 <= p + t of softmax(score[t])[t2] * values[t2]

where low is max(0, p + t - window + 1), or 0 if window is 0, and scores are capped as in ``attention_forward``.

What is computed is what ``embedding_forward`` and ``attention_forward`` compute for the last tokens of a sequence.
Source: Vaswani et al. 2017; the cache as in Pope et al. 2022 (arXiv 2211.05102).
"""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np

from .attention import CAP, WINDOW, W, heads, rows, scored
from .declaration import HALF, HS, NH, B, C, Dim, Op, S, T, V, index, inp, maxT, operand, out, scalar, state

SOURCE = "Vaswani et al. 2017, with the keys and values kept as in Pope et al. 2022"


def reference_embedding(tokens, wte, wpe, position):
    if wpe is None:
        return {"out": wte[tokens]}
    places = np.minimum(position + np.arange(tokens.shape[1]), len(wpe) - 1)
    return {"out": wte[tokens] + wpe[places]}


def behind(keys, values, q, k, v, position, window, cap):
    """Put heads of new keys and values behind those of a cache, and attend to them from heads of new queries."""
    known, group = position + q.shape[2], q.shape[1] // k.shape[1]
    keys, values = keys.copy(), values.copy()
    keys[:, :, position:known], values[:, :, position:known] = k, v
    k, v = (np.repeat(x[:, :, :known], group, axis=1) for x in (keys, values))
    score, *_ = scored(q @ k.transpose(0, 1, 3, 2) / sqrt(q.shape[-1]), None, window, cap)
    att = np.exp(score - score.max(axis=-1, keepdims=True))
    att = operand(att / att.sum(axis=-1, keepdims=True))
    return {"out": rows(att @ v), "keys": keys, "values": values}


def reference_attention(keys, values, qkv, position, window=0, cap=0):
    q, k, v = (heads(x, keys.shape[1]) for x in np.split(qkv, 3, axis=-1))
    return behind(keys, values, q, k, v, position, window, cap)


def cached(NKV: Dim) -> dict[str, Any]:
    """Count what attention behind a full cache does, and moves: a cache that is not yet full asks for less.

    Parameters
    ----------
    NKV : the heads of keys and values.
    """
    moved = B * W * NKV * HS + B * T * NKV * HS
    return {
        "flops": 4 * B * T * S * NH * HS,
        "without": {WINDOW.name: 4 * B * T * (S - W) * NH * HS},
        "moves": dict.fromkeys(("keys", "values"), moved),
    }


embedding_decode = Op(
    "embedding_decode",
    out("out", B, T, C),
    index("tokens", B, T, below=V),
    inp("wte", V, C, types=HALF, operand=False),
    inp("wpe", maxT, C, optional=True),
    scalar("position", integer=True, low=0, high=maxT),
    label="Encoder Decode",
    flops=B * T * C,
    moves={"wte": B * T * C, "wpe": B * T * C},
    reference=reference_embedding,
    source=SOURCE,
)

attention_decode = Op(
    "attention_decode",
    out("out", B, T, NH * HS, reduces=S + HS, types=HALF),
    state("keys", B, NH, S, HS, types=HALF),
    state("values", B, NH, S, HS, types=HALF),
    inp("qkv", B, T, 3 * NH * HS, types=HALF),
    scalar("position", integer=True, low=0, high=S - T),
    replace(WINDOW, high=S),
    CAP,
    label="Attention Decode",
    **cached(NH),
    reference=reference_attention,
    source=SOURCE,
)
