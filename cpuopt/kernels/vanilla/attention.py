"""Causal attention, naive: a row of scores at a time; backward through the whole softmax Jacobian."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import NH, B, C, T
from ..compile.jit import helper, kernel

ONE = np.float32(1)


@helper()
def first_key(starts, window, b, t):
    """Return the first key that token t reads."""
    low = max(t - window + 1, 0) if window > 0 else 0
    return max(low, starts[b, t]) if starts.shape[0] > 0 else low


@kernel(ops.attention_forward, "vanilla", scratch=[("att", B * NH * T)])
def attention_forward(out, lse, qkv, starts, window, cap, att):
    """Scores of one query, their softmax, the weighted sum of the values.

    Parallel: batch and head; each owns a slice of `out`, of `lse` and of `att`.
    Memory: one row of attention weights a head.
    Bound: compute.
    """
    B, T, C = out.shape
    NH = lse.shape[1]
    HS = C // NH
    heads = qkv.reshape(B, T, 3, NH, HS)  # q, k, v
    values = out.reshape(B, T, NH, HS)
    rows = att.reshape(B * NH, T)
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    for bh in prange(B * NH):
        b, h = bh // NH, bh % NH
        for t in range(T):
            low = first_key(starts, window, b, t)
            # pass 1: q . k, and the maximum
            top = np.float32(-np.inf)
            for t2 in range(low, t + 1):
                score = np.float32(0)
                for i in range(HS):
                    score += heads[b, t, 0, h, i] * heads[b, t2, 1, h, i]
                score *= scale
                if cap > 0:
                    score = np.float32(cap) * np.tanh(score / np.float32(cap))
                top = max(top, score)
                rows[bh, t2] = score
            # pass 2: exp, and the sum
            total = np.float32(0)
            for t2 in range(low, t + 1):
                e = np.exp(rows[bh, t2] - top)
                total += e
                rows[bh, t2] = e
            lse[b, h, t] = np.log(total) + top
            # pass 3: normalize, and gather the values
            for i in range(HS):
                val = np.float32(0)
                for t2 in range(low, t + 1):
                    val += rows[bh, t2] / total * heads[b, t2, 2, h, i]
                values[b, t, h, i] = val


BACKWARD_SCRATCH = [("att", B * NH * T), ("datt", B * NH * T), ("slope", B * NH * T), ("sums", 3 * B * T * C)]


@kernel(ops.attention_backward, "vanilla", scratch=BACKWARD_SCRATCH)
def attention_backward(dqkv, dqkv_add, dout, qkv, out, lse, starts, window, cap, att, datt, slope, sums):
    """Per query: its weights again, their adjoints, the softmax Jacobian in full, then q, k and v.

    The Jacobian makes it O(T^3), as in ``train_gpt2.c``.

    Parallel: batch and head; each owns a slice of `dqkv` and of the scratch.
    Memory: three rows a head; the sums in float32.
    Bound: compute.
    """
    B, T, C = dout.shape
    NH = lse.shape[1]
    HS = C // NH
    scale = np.float32(1) / np.sqrt(np.float32(HS))
    grad = sums.reshape(B, T, 3 * C)
    for bh in prange(B * NH):
        b, q0 = bh // NH, (bh % NH) * HS
        k0, v0, a = q0 + C, q0 + 2 * C, bh * T
        for t in range(T):
            for i in range(HS):
                grad[b, t, q0 + i] = dqkv[b, t, q0 + i] if dqkv_add else 0
                grad[b, t, k0 + i] = dqkv[b, t, k0 + i] if dqkv_add else 0
                grad[b, t, v0 + i] = dqkv[b, t, v0 + i] if dqkv_add else 0
        for t in range(T):
            low = first_key(starts, window, b, t)
            # pass 1: the weights again
            for t2 in range(low, t + 1):
                score = np.float32(0)
                for i in range(HS):
                    score += qkv[b, t, q0 + i] * qkv[b, t2, k0 + i]
                score *= scale
                slope[a + t2] = ONE
                if cap > 0:
                    share = np.tanh(score / np.float32(cap))
                    score = np.float32(cap) * share
                    slope[a + t2] = ONE - share * share
                att[a + t2] = np.exp(score - lse[b, bh % NH, t])
            # pass 2: out[t] += att[t2] * v[t2]
            for t2 in range(low, t + 1):
                d = np.float32(0)
                for i in range(HS):
                    d += qkv[b, t2, v0 + i] * dout[b, t, q0 + i]
                    grad[b, t2, v0 + i] += att[a + t2] * dout[b, t, q0 + i]
                datt[a + t2] = d
            # pass 3: att = softmax(score), score = cap * tanh(score / cap), then score[t2] = scale * q[t] . k[t2]
            for t3 in range(low, t + 1):
                dscore = np.float32(0)
                for t2 in range(low, t + 1):
                    same = np.float32(1) if t2 == t3 else np.float32(0)
                    dscore += att[a + t2] * (same - att[a + t3]) * datt[a + t2]
                dscore *= slope[a + t3]
                for i in range(HS):
                    grad[b, t, q0 + i] += qkv[b, t3, k0 + i] * dscore * scale
                    grad[b, t3, k0 + i] += qkv[b, t, q0 + i] * dscore * scale
        for t in range(T):
            for i in range(HS):
                dqkv[b, t, q0 + i] = grad[b, t, q0 + i]
                dqkv[b, t, k0 + i] = grad[b, t, k0 + i]
                dqkv[b, t, v0 + i] = grad[b, t, v0 + i]
