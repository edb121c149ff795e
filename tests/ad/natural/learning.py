"""Kernels of machine learning as first written."""

import math

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, C, N, T, inp, out

from .table import declared


@njit
def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


@njit
def stable_sigmoid(x):
    if x >= 0:
        return 1.0 / (1.0 + np.exp(-x))
    e = np.exp(x)
    return e / (1.0 + e)


@njit
def softmax_in_place(row, n):
    top = row[0]
    for j in range(1, n):
        if row[j] > top:
            top = row[j]
    total = 0.0
    for j in range(n):
        row[j] = math.exp(row[j] - top)
        total += row[j]
    for j in range(n):
        row[j] /= total


@njit
def dot(a, b):
    s = 0.0
    for k in range(a.shape[0]):
        s += a[k] * b[k]
    return s


@declared(out("h", B, C), out("c", B, C), inp("gates", B, 4 * C), inp("c0", B, C))
def lstm_cell(h, c, gates, c0):
    n = c0.shape[1]
    for b in prange(gates.shape[0]):
        g = gates[b]
        for j in range(n):
            i, f, o = sigmoid(g[j]), sigmoid(g[n + j]), sigmoid(g[2 * n + j])
            u = math.tanh(g[3 * n + j])
            c[b, j] = f * c0[b, j] + i * u
            h[b, j] = o * math.tanh(c[b, j])


@declared(out("hs", T, C), inp("x", T, C), inp("w", C, C), inp("h0", C))
def rnn_scan(hs, x, w, h0):
    n = h0.shape[0]
    h = np.zeros(n)
    for j in range(n):
        h[j] = h0[j]
    for t in range(x.shape[0]):
        new = np.zeros(n)
        for j in range(n):
            s = x[t, j]
            for k in range(n):
                s += w[j, k] * h[k]
            new[j] = np.tanh(s)
        for j in range(n):
            h[j] = new[j]
            hs[t, j] = h[j]


@declared(out("h", B, C), inp("x", B, 3 * C), inp("u", B, 3 * C), inp("h0", B, C))
def gru_cell(h, x, u, h0):
    B, C = h0.shape
    for b in prange(B):
        for j in range(C):
            r = stable_sigmoid(x[b, j] + u[b, j])
            z = stable_sigmoid(x[b, C + j] + u[b, C + j])
            n = math.tanh(x[b, 2 * C + j] + r * u[b, 2 * C + j])
            h[b, j] = (1 - z) * n + z * h0[b, j]


@declared(out("y", T, C), inp("q", T, C), inp("k", T, C), inp("v", T, C))
def attention_with_scratch(y, q, k, v):
    T, C = q.shape
    scale = 1.0 / math.sqrt(C)
    for t in prange(T):
        scores = np.zeros(T)
        for s in range(T):
            if s > t:
                scores[s] = -1e9
                continue
            scores[s] = dot(q[t], k[s]) * scale
        softmax_in_place(scores, T)
        for c in range(C):
            acc = 0.0
            for s in range(T):
                acc += scores[s] * v[s, c]
            y[t, c] = acc


@declared(out("y", N), inp("x", N))
def gelu_erf(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] * 0.5 * (1.0 + math.erf(x[i] / math.sqrt(2.0)))


@declared(out("y", N), inp("x", N))
def hard_swish_clip(y, x):
    for i in prange(x.size):
        y[i] = x[i] * np.clip(x[i] + 3.0, 0.0, 6.0) / 6.0


@declared(out("loss", BT), inp("logp", BT, C), inp("pi", BT, C))
def mixture_density(loss, logp, pi):
    for i in prange(logp.shape[0]):
        n = logp.shape[1]
        m1 = -math.inf
        m2 = -math.inf
        for k in range(n):
            m1 = max(m1, pi[i, k] + logp[i, k])
            m2 = max(m2, pi[i, k])
        s1, s2 = 0.0, 0.0
        for k in range(n):
            s1 += math.exp(pi[i, k] + logp[i, k] - m1)
            s2 += math.exp(pi[i, k] - m2)
        loss[i] = -(math.log(s1) + m1) + (math.log(s2) + m2)


@declared(out("z", B), inp("emit", B, T, C), inp("trans", C, C))
def crf_forward(z, emit, trans):
    C = emit.shape[2]
    for b in prange(emit.shape[0]):
        alpha = np.zeros(C)
        new = np.zeros(C)
        for j in range(C):
            alpha[j] = emit[b, 0, j]
        for t in range(1, emit.shape[1]):
            for j in range(C):
                s = 0.0
                for i in range(C):
                    s += math.exp(alpha[i] + trans[i, j])
                new[j] = math.log(s) + emit[b, t, j]
            for j in range(C):
                alpha[j] = new[j]
        s = 0.0
        for j in range(C):
            s += math.exp(alpha[j])
        z[b] = math.log(s)


@declared(out("y", BT, C), inp("x", BT, C))
def batchnorm_scratch(y, x):
    n, c = x.shape
    mean = np.zeros(c)
    var = np.zeros(c)
    for i in range(n):
        for j in range(c):
            mean[j] += x[i, j] / n
    for i in range(n):
        for j in range(c):
            var[j] += (x[i, j] - mean[j]) ** 2 / n
    for i in prange(n):
        for j in range(c):
            y[i, j] = (x[i, j] - mean[j]) / np.sqrt(var[j] + 1e-5)


@declared(out("y", B, T, C), inp("x", B, T, C), inp("a", C), inp("bc", B, T))
def selective_scan(y, x, a, bc):
    for b in prange(x.shape[0]):
        for c in range(x.shape[2]):
            h = 0.0
            decay = math.exp(-math.exp(a[c]))
            for t in range(x.shape[1]):
                h = decay * h + bc[b, t] * x[b, t, c]
                y[b, t, c] = h * bc[b, t]


@declared(out("y", BT, C), inp("x", BT, C))
def softmax_rows_numpy(y, x):
    for i in prange(x.shape[0]):
        e = np.exp(x[i] - np.max(x[i]))
        y[i] = e / np.sum(e)
