"""Causal multi-head self-attention from a fused qkv.

The last axis of ``qkv`` holds q, then k, then v, each NH heads of HS = C/NH.

A token t reads the keys from low[t] to t, in all attention ops::

    low[t] = max(starts[t], t - window + 1)

`starts` is where the example of a token starts in its row, for rows of several examples; absent, it is 0. `window` is
the number of tokens that a token reads, itself included; 0 stands for all.

Forward, for each b and head, with s = 1/sqrt(HS), and each sum over t2 from low[t] to t::

    score[t, t2] = s * q[t] . k[t2]            or cap * tanh(s * q[t] . k[t2] / cap), if cap > 0
    lse[t]       = log(sum of exp(score[t, t2]))
    att[t, t2]   = exp(score[t, t2] - lse[t])
    out[t]       = sum of att[t, t2] * v[t2]

Only ``out`` and ``lse`` are kept for the backward, which computes att again. The sums of dk and dv are over the t that
read t2::

    datt[t, t2]   = dout[t] . v[t2]
    dscore[t, t2] = att[t, t2] * (datt[t, t2] - sum over t3 of att[t, t3] * datt[t, t3])
                    where that sum also equals dout[t] . out[t]; times 1 - (score[t, t2] / cap)^2, if cap > 0
    dq[t]  += s * sum of dscore[t, t2] * k[t2]
    dk[t2] += s * sum of dscore[t, t2] * q[t]
    dv[t2] +=     sum of att[t, t2] * dout[t]

Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1; the saved lse follows Dao 2023 (arXiv 2307.08691);
``torch.nn.functional.scaled_dot_product_attention(is_causal=True)``; the window Beltagy et al. 2020 (arXiv 2004.05150);
the cap Gemma Team 2024 (arXiv 2408.00118).
"""

from math import sqrt
from typing import Any

import numpy as np

from .declaration import HALF, NH, B, C, Dim, Op, T, acc, index, inp, operand, out, rounded, scalar, spared, symbols

SOURCE = "Vaswani et al. 2017, equation 1; Dao 2023 for lse; torch scaled_dot_product_attention(is_causal=True)"


def heads(x, NH):
    """Split (B, T, C) into (B, NH, T, HS)."""
    B, T, C = x.shape
    return x.reshape(B, T, NH, C // NH).transpose(0, 2, 1, 3)


def rows(x):
    """Join (B, NH, T, HS) into (B, T, C)."""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)


def scored(score, starts=None, window=0, cap=0):
    """Cap scores (..., T, K) of the last T of K tokens, and hide the keys that a token does not read.

    Returns
    -------
    The scores, minus infinity for a hidden key; the slope of the cap, 0 for a hidden key; and which keys are hidden.
    """
    T, K = score.shape[-2:]
    t, t2 = np.arange(K - T, K)[:, None], np.arange(K)
    hidden = (t2 > t) | ((t2 <= t - window) & (window > 0))
    if starts is not None:
        hidden = hidden | (t2 < starts[:, None, :, None])
    slope = np.ones_like(score)
    if cap > 0:
        share = rounded(np.tanh(score / cap))
        score, slope = cap * share, 1 - share**2
    return np.where(hidden, -np.inf, score), np.where(hidden, 0, slope), hidden


def attended(q, k, v, *limits):
    """Attend with as many heads (B, NH, T, HS) of queries as of keys; return the output and lse."""
    score, *_ = scored(q @ k.transpose(0, 1, 3, 2) / sqrt(q.shape[-1]), *limits)
    top = score.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(score - top).sum(axis=-1)) + top[..., 0]
    return operand(np.exp(score - lse[..., None])) @ v, lse


def adjoints(do, q, k, v, lse, limits, o=None):
    """Return the gradients of heads of queries, keys and values.

    `o` is the output as it is stored. If it is given, half of delta comes by way of it, so that the check's scale knows
    both ways.
    """
    root = sqrt(q.shape[-1])
    score, slope, hidden = scored(q @ k.transpose(0, 1, 3, 2) / root, *limits)
    att = rounded(spared(np.exp(score - lse[..., None]), hidden))
    datt, made = spared(do @ v.transpose(0, 1, 3, 2), hidden), att @ v
    apart = (do * (operand(made if o is None else o) - made)).sum(axis=-1, keepdims=True)
    delta = (att * datt).sum(axis=-1, keepdims=True)
    delta = delta + np.where(np.isfinite(apart), apart if o is None else apart / 2, 0)
    dscore = operand(spared(att * (datt - delta) * slope / root, hidden))
    return dscore @ k, dscore.transpose(0, 1, 3, 2) @ q, operand(att).transpose(0, 1, 3, 2) @ do


def reference_forward(qkv, lse, starts=None, window=0, cap=0):
    out, lse = attended(*(heads(x, lse.shape[1]) for x in np.split(qkv, 3, axis=-1)), starts, window, cap)
    return {"out": rows(out), "lse": lse}


def reference_backward(dout, qkv, lse, starts=None, window=0, cap=0):
    do, q, k, v = (heads(x, lse.shape[1]) for x in (dout, *np.split(qkv, 3, axis=-1)))
    return {"dqkv": np.concatenate([rows(x) for x in adjoints(do, q, k, v, lse, (starts, window, cap))], axis=-1)}


STARTS = index("starts", B, T, below=T, optional=True, rising=True, shown=False)
WINDOW = scalar("window", integer=True, low=0, high=T, usual=0, shown=False)
CAP = scalar("cap", low=0, high=60, usual=0, shown=False)
LIMITS = STARTS, WINDOW, CAP
"""What limits attention; each may be absent, and then a program's text does not name it."""
(W,) = symbols(WINDOW.name)
UNFIT = {"thousands": "lse is saved in float32, and of scores near 1e8 that leaves exp(score - lse) no digit"}


def pairs(twice: Dim) -> dict[str, Any]:
    """Count the FLOPs of all pairs of a token and a key that it reads in its window, from those of two pairs.

    `starts` are known only when a call runs, and each batch has others: they are in `asked`.
    """
    return {"flops": T * (T + 1) * twice, "without": {WINDOW.name: (T - W) * (T - W + 1) * twice}, "asked": asked}


def asked(starts, window):
    """Return the share of the pairs in the window that are in the examples of their tokens."""
    if not starts.size:
        return 1.0
    t = np.arange(starts.shape[-1])
    first = np.maximum(0, t - window + 1) if window > 0 else np.zeros_like(t)
    return float((t + 1 - np.maximum(first, starts)).sum() / ((t + 1 - first).sum() * (starts.size // t.size)))


attention_forward = Op(
    "attention_forward",
    out("out", B, T, C, reduces=T + C, types=HALF),
    out("lse", B, NH, T, reduces=T + C),
    inp("qkv", B, T, 3 * C, types=HALF),
    *LIMITS,
    label="Attention Forward",
    **pairs(2 * B * C + 2 * B * NH),
    reference=reference_forward,
    source=SOURCE,
)

attention_backward = Op(
    "attention_backward",
    acc("dqkv", B, T, 3 * C, reduces=T + C, types=HALF),
    inp("dout", B, T, C, types=HALF),
    inp("qkv", B, T, 3 * C, types=HALF),
    inp("out", B, T, C, types=HALF, operand=False),
    inp("lse", B, NH, T),
    *LIMITS,
    label="Attention Backward",
    **pairs(5 * B * C + 4 * B * NH),
    reference=reference_backward,
    source=SOURCE,
    inverts=attention_forward,
    unfit=UNFIT,
)
