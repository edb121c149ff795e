"""Grouped-query attention, naive: a row of scores at a time; backward through the whole softmax Jacobian."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import HS, NH, NKV, B, S, T
from ..compile.jit import kernel
from .attention import ONE, first_key


@kernel(ops.gqa_forward, "vanilla", scratch=[("att", B * NKV * T)])
def gqa_forward(out, lse, q, k, v, starts, window, cap, att):
    """For each query of a group: its scores, their softmax, the weighted sum of the values.

    Parallel: batch and key head, with all query heads of its group; each owns slices of `out`, `lse` and `att`.
    Memory: one row of attention weights a key head.
    Bound: compute.
    """
    B, T, C = out.shape
    NH = lse.shape[1]
    HS = C // NH
    NKV = k.shape[2] // HS
    group = NH // NKV
    queries = q.reshape(B, T, NKV, group, HS)
    keys = k.reshape(B, T, NKV, HS)
    values = v.reshape(B, T, NKV, HS)
    gathered = out.reshape(B, T, NKV, group, HS)
    logs = lse.reshape(B, NKV, group, T)
    rows = att.reshape(B * NKV, T)
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    for bg in prange(B * NKV):
        b, g = bg // NKV, bg % NKV
        for h in range(group):
            for t in range(T):
                low = first_key(starts, window, b, t)
                # pass 1: q . k, and the maximum
                top = np.float32(-np.inf)
                for t2 in range(low, t + 1):
                    score = np.float32(0)
                    for i in range(HS):
                        score += queries[b, t, g, h, i] * keys[b, t2, g, i]
                    score *= scale
                    if cap > 0:
                        score = np.float32(cap) * np.tanh(score / np.float32(cap))
                    top = max(top, score)
                    rows[bg, t2] = score
                # pass 2: exp, and the sum
                total = np.float32(0)
                for t2 in range(low, t + 1):
                    e = np.exp(rows[bg, t2] - top)
                    total += e
                    rows[bg, t2] = e
                logs[b, g, h, t] = np.log(total) + top
                # pass 3: normalize, and gather the values
                for i in range(HS):
                    val = np.float32(0)
                    for t2 in range(low, t + 1):
                        val += rows[bg, t2] / total * values[b, t2, g, i]
                    gathered[b, t, g, h, i] = val


SUMS = B * T * (NH + 2 * NKV) * HS


ROWS = [(name, B * NKV * T) for name in ("att", "datt", "slope")]


@kernel(ops.gqa_backward, "vanilla", scratch=[*ROWS, ("sums", SUMS)])
def gqa_backward(
    dq, dq_add, dk, dk_add, dv, dv_add, dout, q, k, v, out, lse, starts, window, cap, att, datt, slope, sums
):
    """Per query: its weights again, their adjoints, the softmax Jacobian in full, then q, k and v.

    Parallel: batch and key head, with all query heads of its group; each owns slices of `dq`, `dk`, `dv` and scratch.
    Memory: three rows a key head; the sums in float32.
    Bound: compute.
    """
    B, T, C = dout.shape
    NH = lse.shape[1]
    HS = C // NH
    NKV = k.shape[2] // HS
    group = NH // NKV
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    n, m = B * T * C, B * T * NKV * HS
    sq = sums[:n].reshape(B, T, C)
    sk = sums[n : n + m].reshape(B, T, NKV * HS)
    sv = sums[n + m : n + 2 * m].reshape(B, T, NKV * HS)
    for bg in prange(B * NKV):
        b, k0, a = bg // NKV, (bg % NKV) * HS, bg * T
        first = (bg % NKV) * group
        for t in range(T):
            for i in range(HS):
                sk[b, t, k0 + i] = dk[b, t, k0 + i] if dk_add else 0
                sv[b, t, k0 + i] = dv[b, t, k0 + i] if dv_add else 0
            for i in range(first * HS, (first + group) * HS):
                sq[b, t, i] = dq[b, t, i] if dq_add else 0
        for h in range(first, first + group):
            q0 = h * HS
            for t in range(T):
                low = first_key(starts, window, b, t)
                # pass 1: the weights again
                for t2 in range(low, t + 1):
                    score = np.float32(0)
                    for i in range(HS):
                        score += q[b, t, q0 + i] * k[b, t2, k0 + i]
                    score *= scale
                    slope[a + t2] = ONE
                    if cap > 0:
                        share = np.tanh(score / np.float32(cap))
                        score = np.float32(cap) * share
                        slope[a + t2] = ONE - share * share
                    att[a + t2] = np.exp(score - lse[b, h, t])
                # pass 2: out[t] += att[t2] * v[t2]
                for t2 in range(low, t + 1):
                    d = np.float32(0)
                    for i in range(HS):
                        d += v[b, t2, k0 + i] * dout[b, t, q0 + i]
                        sv[b, t2, k0 + i] += att[a + t2] * dout[b, t, q0 + i]
                    datt[a + t2] = d
                # pass 3: att = softmax(score), score = cap * tanh(score / cap), then score[t2] = scale * q[t] . k[t2]
                for t3 in range(low, t + 1):
                    dscore = np.float32(0)
                    for t2 in range(low, t + 1):
                        same = np.float32(1) if t2 == t3 else np.float32(0)
                        dscore += att[a + t2] * (same - att[a + t3]) * datt[a + t2]
                    dscore *= slope[a + t3]
                    for i in range(HS):
                        sq[b, t, q0 + i] += k[b, t3, k0 + i] * dscore * scale
                        sk[b, t3, k0 + i] += q[b, t, q0 + i] * dscore * scale
        for t in range(T):
            for i in range(HS):
                dk[b, t, k0 + i] = sk[b, t, k0 + i]
                dv[b, t, k0 + i] = sv[b, t, k0 + i]
            for i in range(first * HS, (first + group) * HS):
                dq[b, t, i] = sq[b, t, i]


@kernel(ops.gqa_decode, "vanilla", scratch=[("att", B * NKV * S)])
def gqa_decode(out, keys, values, q, k, v, position, window, cap, att):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and key head; each owns its channels of `out`, its part of the cache, and a slice of `att`.
    Memory: one row of attention weights a key head.
    Bound: memory.
    """
    B, T, C = out.shape
    NKV, S, HS = keys.shape[1:]
    group = C // HS // NKV
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    for bg in prange(B * NKV):
        b, g, a = bg // NKV, bg % NKV, bg * S
        # pass 1: the cache
        for t in range(T):
            for i in range(HS):
                keys[b, g, position + t, i] = k[b, t, g * HS + i]
                values[b, g, position + t, i] = v[b, t, g * HS + i]
        for h in range(g * group, g * group + group):
            for t in range(T):
                low = max(position + t - window + 1, 0) if window > 0 else 0
                # pass 2: q . k, and the maximum
                top = np.float32(-np.inf)
                for t2 in range(low, position + t + 1):
                    score = np.float32(0)
                    for i in range(HS):
                        score += q[b, t, h * HS + i] * keys[b, g, t2, i]
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
                        val += att[a + t2] / total * values[b, g, t2, i]
                    out[b, t, h * HS + i] = val
