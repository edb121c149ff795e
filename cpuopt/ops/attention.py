"""Causal multi-head self-attention from a fused qkv.

The last axis of ``qkv`` holds q, then k, then v, each NH heads of HS = C/NH.

Forward, for each b and head, with s = 1/sqrt(HS)::

    score[t, t2] = s * q[t] . k[t2]            for t2 <= t
    lse[t]       = log(sum over t2 <= t of exp(score[t, t2]))
    att[t, t2]   = exp(score[t, t2] - lse[t])
    out[t]       = sum over t2 <= t of att[t, t2] * v[t2]

Only ``out`` and ``lse`` are kept for the backward, which computes att again::

    datt[t, t2]   = dout[t] . v[t2]
    dscore[t, t2] = att[t, t2] * (datt[t, t2] - sum over t3 <= t of att[t, t3] * datt[t, t3])
                    where that sum also equals dout[t] . out[t]
    dq[t]  += s * sum over t2 <= t of dscore[t, t2] * k[t2]
    dk[t2] += s * sum over t >= t2 of dscore[t, t2] * q[t]
    dv[t2] +=     sum over t >= t2 of att[t, t2] * dout[t]

Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1; the saved lse follows Dao 2023 (arXiv 2307.08691);
``torch.nn.functional.scaled_dot_product_attention(is_causal=True)``.
"""

from math import sqrt

import numpy as np

from .declaration import HALF, NH, B, C, Op, T, acc, inp, operand, out, rounded

SOURCE = "Vaswani et al. 2017, equation 1; Dao 2023 for lse; torch scaled_dot_product_attention(is_causal=True)"


def heads(x, NH):
    """Split (B, T, C) into (B, NH, T, HS)."""
    B, T, C = x.shape
    return x.reshape(B, T, NH, C // NH).transpose(0, 2, 1, 3)


def rows(x):
    """Join (B, NH, T, HS) into (B, T, C)."""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)


def scores(qkv, NH):
    q, k, v = (heads(x, NH) for x in np.split(qkv, 3, axis=-1))
    scale = 1 / sqrt(q.shape[-1])
    score = scale * q @ k.transpose(0, 1, 3, 2)
    future = np.triu(np.ones(score.shape[-2:], dtype=bool), 1)
    return q, k, v, scale, np.where(future, -np.inf, score)


def reference_forward(qkv, lse):
    _, _, v, _, score = scores(qkv, lse.shape[1])
    top = score.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(score - top).sum(axis=-1)) + top[..., 0]
    att = operand(np.exp(score - lse[..., None]))
    return {"out": rows(att @ v), "lse": lse}


def reference_backward(dout, qkv, lse):
    NH = lse.shape[1]
    q, k, v, scale, score = scores(qkv, NH)
    att = rounded(np.exp(score - lse[..., None]))
    do = heads(dout, NH)
    datt = do @ v.transpose(0, 1, 3, 2)
    dscore = operand(att * (datt - (att * datt).sum(axis=-1, keepdims=True)))
    dq, dk = scale * dscore @ k, scale * dscore.transpose(0, 1, 3, 2) @ q
    dv = operand(att).transpose(0, 1, 3, 2) @ do
    return {"dqkv": np.concatenate([rows(dq), rows(dk), rows(dv)], axis=-1)}


attention_forward = Op(
    "attention_forward",
    out("out", B, T, C, reduces=T + C, types=HALF),
    out("lse", B, NH, T, reduces=T + C),
    inp("qkv", B, T, 3 * C, types=HALF),
    label="Attention Forward",
    flops=2 * B * T * (T + 1) * C + 2 * B * NH * T * (T + 1),
    reference=reference_forward,
    source=SOURCE,
)

attention_backward = Op(
    "attention_backward",
    acc("dqkv", B, T, 3 * C, reduces=T + C, types=HALF),
    inp("dout", B, T, C, types=HALF),
    inp("qkv", B, T, 3 * C, types=HALF),
    inp("out", B, T, C),
    inp("lse", B, NH, T),
    label="Attention Backward",
    flops=5 * B * T * (T + 1) * C + 4 * B * NH * T * (T + 1),
    reference=reference_backward,
    source=SOURCE,
    inverts=attention_forward,
    unfit={"thousands": "lse is saved in float32, and of scores near 1e8 that leaves exp(score - lse) no digit"},
)
