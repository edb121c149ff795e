"""Causal grouped-query attention over separate q, k and v; and the same for tokens behind a cache.

NH query heads of HS channels read NKV heads of keys and values: query head h reads head g = h // (NH / NKV). With as
many of these as of those, it is multi-head attention. `starts`, `window` and `cap` are those of ``attention_forward``.

Forward, for each b and query head h, with s = 1/sqrt(HS), and each sum over t2 from low[t] to t::

    score[t, t2] = s * q[t, h] . k[t2, g]            or cap * tanh(s * q[t, h] . k[t2, g] / cap), if cap > 0
    lse[t]       = log(sum of exp(score[t, t2]))
    att[t, t2]   = exp(score[t, t2] - lse[t])
    out[t, h]    = sum of att[t, t2] * v[t2, g]

Backward, with att computed again; the sums of dk and dv are over the t that read t2, and over the query heads of a
group::

    datt[t, t2]   = dout[t, h] . v[t2, g]
    dscore[t, t2] = att[t, t2] * (datt[t, t2] - dout[t, h] . out[t, h])
                    where the product also equals the sum over t3 of att[t, t3] * datt[t, t3];
                    times 1 - (score[t, t2] / cap)^2, if cap > 0
    dq[t, h]  += s * sum of dscore[t, t2] * k[t2, g]
    dk[t2, g] += s * sum of dscore[t, t2] * q[t, h]
    dv[t2, g] +=     sum of att[t, t2] * dout[t, h]

``gqa_decode`` puts k and v behind the `position` tokens that a cache has, and reads those of them in the window.

Source: Ainslie et al. 2023 (arXiv 2305.13245); the saved lse follows Dao 2023 (arXiv 2307.08691); the cache Pope et al.
2022 (arXiv 2211.05102); ``torch.nn.functional.scaled_dot_product_attention(is_causal=True, enable_gqa=True)``.
"""

from dataclasses import replace

import numpy as np

from .attention import CAP, LIMITS, UNFIT, WINDOW, adjoints, attended, heads, pairs, rows
from .declaration import HALF, HS, NH, NKV, B, Op, S, T, acc, inp, out, scalar, state
from .decode import behind, cached

SOURCE = "Ainslie et al. 2023; Dao 2023 for lse; torch scaled_dot_product_attention(is_causal=True, enable_gqa=True)"


def spread(x, NH):
    """Repeat each head of keys or values for the query heads of its group."""
    return np.repeat(x, NH // x.shape[1], axis=1)


def gathered(x, NKV):
    """Sum over the query heads of each group."""
    B, NH, T, HS = x.shape
    return x.reshape(B, NKV, NH // NKV, T, HS).sum(axis=2)


def reference_forward(q, k, v, lse, starts=None, window=0, cap=0):
    NH = lse.shape[1]
    HS = q.shape[-1] // NH
    q, k, v = (heads(x, x.shape[-1] // HS) for x in (q, k, v))
    out, lse = attended(q, spread(k, NH), spread(v, NH), starts, window, cap)
    return {"out": rows(out), "lse": lse}


def reference_backward(dout, q, k, v, out, lse, starts=None, window=0, cap=0):
    NH = lse.shape[1]
    HS = q.shape[-1] // NH
    do, q, k, v, o = (heads(x, x.shape[-1] // HS) for x in (dout, q, k, v, out))
    dq, dk, dv = adjoints(do, q, spread(k, NH), spread(v, NH), lse, (starts, window, cap), o)
    return {"dq": rows(dq), "dk": rows(gathered(dk, k.shape[1])), "dv": rows(gathered(dv, k.shape[1]))}


def reference_decode(keys, values, q, k, v, position, window=0, cap=0):
    q, k, v = (heads(x, x.shape[-1] // keys.shape[-1]) for x in (q, k, v))
    return behind(keys, values, q, k, v, position, window, cap)


QUERIES, KEYS = (B, T, NH * HS), (B, T, NKV * HS)

gqa_forward = Op(
    "gqa_forward",
    out("out", *QUERIES, reduces=T + HS, types=HALF),
    out("lse", B, NH, T, reduces=T + HS),
    inp("q", *QUERIES, types=HALF),
    inp("k", *KEYS, types=HALF),
    inp("v", *KEYS, types=HALF),
    *LIMITS,
    label="GQA Forward",
    **pairs(2 * B * NH * HS + 2 * B * NH),
    reference=reference_forward,
    source=SOURCE,
)

gqa_backward = Op(
    "gqa_backward",
    acc("dq", *QUERIES, reduces=T + HS, types=HALF),
    acc("dk", *KEYS, reduces=NH * T, types=HALF),
    acc("dv", *KEYS, reduces=NH * T, types=HALF),
    inp("dout", *QUERIES, types=HALF),
    inp("q", *QUERIES, types=HALF),
    inp("k", *KEYS, types=HALF),
    inp("v", *KEYS, types=HALF),
    inp("out", *QUERIES, types=HALF, operand=False),
    inp("lse", B, NH, T),
    *LIMITS,
    label="GQA Backward",
    **pairs(5 * B * NH * HS + 4 * B * NH),
    reference=reference_backward,
    source=SOURCE,
    inverts=gqa_forward,
    unfit=UNFIT,
)

gqa_decode = Op(
    "gqa_decode",
    out("out", *QUERIES, reduces=S + HS, types=HALF),
    state("keys", B, NKV, S, HS, types=HALF),
    state("values", B, NKV, S, HS, types=HALF),
    inp("q", *QUERIES, types=HALF),
    inp("k", *KEYS, types=HALF),
    inp("v", *KEYS, types=HALF),
    scalar("position", integer=True, low=0, high=S - T),
    replace(WINDOW, high=S),
    CAP,
    label="GQA Decode",
    **cached(NKV),
    reference=reference_decode,
    source=SOURCE,
)
