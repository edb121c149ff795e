"""Kernels of machine learning as first written."""

import math

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, NH, OC, B, C, N, T, V, index, inp, out, scalar, state

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


@declared(out("y", BT, C), inp("x", BT, C), inp("w", C), inp("b", C))
def layernorm_rows(y, x, w, b):
    n = x.shape[1]
    for i in prange(x.shape[0]):
        row = x[i]
        o = y[i]
        mean = 0.0
        for j in range(n):
            mean += row[j]
        mean /= n
        var = 0.0
        for j in range(n):
            var += (row[j] - mean) ** 2
        rstd = 1.0 / np.sqrt(var / n + 1e-5)
        for j in range(n):
            o[j] = (row[j] - mean) * rstd
            o[j] = o[j] * w[j] + b[j]


@declared(out("y", N), inp("x", N))
def gelu_erf(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] * 0.5 * (1.0 + math.erf(x[i] / math.sqrt(2.0)))


@declared(out("y", B, C), inp("x", B, C, 3))
def maxout(y, x):
    for b in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[b, c] = max(x[b, c, 0], x[b, c, 1], x[b, c, 2])


@declared(out("y", N), inp("x", N))
def hard_swish_clip(y, x):
    for i in prange(x.size):
        y[i] = x[i] * np.clip(x[i] + 3.0, 0.0, 6.0) / 6.0


def probabilities(a):
    return a | {"p": 1.0 / (1.0 + np.exp(-a["p"]))}


@declared(out("loss", N), inp("p", N), inp("gamma", 1), inputs=probabilities)
def focal_learned_gamma(loss, p, gamma):
    for i in prange(p.shape[0]):
        loss[i] = -((1.0 - p[i]) ** gamma[0]) * math.log(p[i])


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


@declared(out("cost", 1), inp("a", T), inp("b", C))
def soft_dtw(cost, a, b):
    n, m = len(a), len(b)
    r = np.full((n + 1, m + 1), 1e3)
    r[0, 0] = 0.0
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            x, y, z = r[i - 1, j - 1], r[i - 1, j], r[i, j - 1]
            low = min(x, y, z)
            s = math.exp(low - x) + math.exp(low - y) + math.exp(low - z)
            r[i, j] = (a[i - 1] - b[j - 1]) ** 2 + low - math.log(s)
    cost[0] = r[n, m]


@declared(out("loss", BT), inp("x", BT, C), inp("centers", OC, C))
def kmeans_loss(loss, x, centers):
    for i in prange(x.shape[0]):
        best = 1e30
        arg = 0
        for k in range(centers.shape[0]):
            d = 0.0
            for j in range(x.shape[1]):
                d += (x[i, j] - centers[k, j]) ** 2
            if d < best:
                best = d
                arg = k
        s = 0.0
        for j in range(x.shape[1]):
            s += abs(x[i, j] - centers[arg, j])
        loss[i] = best + s


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


@declared(out("y", B, C), index("ids", B, T, below=V), inp("table", V, C))
def embedding_bag(y, ids, table):
    for b in prange(ids.shape[0]):
        count = 0
        for c in range(table.shape[1]):
            y[b, c] = 0.0
        for t in range(ids.shape[1]):
            if ids[b, t] == 0:
                continue
            count += 1
            for c in range(table.shape[1]):
                y[b, c] += table[ids[b, t], c]
        if count > 0:
            for c in range(table.shape[1]):
                y[b, c] /= count


@declared(out("loss", T), inp("z", T, C))
def info_nce(loss, z):
    n, d = z.shape
    for i in prange(n):
        denom = 0.0
        pos = 0.0
        for j in range(n):
            if j == i:
                continue
            sim = 0.0
            for k in range(d):
                sim += z[i, k] * z[j, k]
            sim /= math.sqrt(d)
            if j == i ^ 1:
                pos = sim
            denom += math.exp(sim)
        loss[i] = math.log(denom) - pos


@declared(out("y", N), inp("x", N), inp("scale", 1))
def fake_quantize(y, x, scale):
    s = 0.05 + abs(scale[0])
    for i in prange(x.shape[0]):
        q = round(x[i] / s)
        q = min(max(q, -8), 7)
        y[i] = q * s + 0.1 * (x[i] - q * s) ** 2


@declared(out("y", B, T, C), inp("x", B, T, C), inp("a", C), inp("bc", B, T))
def selective_scan(y, x, a, bc):
    for b in prange(x.shape[0]):
        for c in range(x.shape[2]):
            h = 0.0
            decay = math.exp(-math.exp(a[c]))
            for t in range(x.shape[1]):
                h = decay * h + bc[b, t] * x[b, t, c]
                y[b, t, c] = h * bc[b, t]


@declared(out("y", T, C), inp("k", T, C), inp("v", T, C), inp("w", C), inp("u", C))
def rwkv(y, k, v, w, u):
    T, C = k.shape
    for c in prange(C):
        num, den = 0.0, 0.0
        for t in range(T):
            e = math.exp(u[c] + k[t, c])
            y[t, c] = (num + e * v[t, c]) / (den + e)
            d = math.exp(-math.exp(w[c]))
            e = math.exp(k[t, c])
            num, den = d * num + e * v[t, c], d * den + e


@declared(out("y", T, C), inp("q", T, C), inp("k", T, C), inp("v", T, C))
def linear_attention(y, q, k, v):
    T, C = q.shape
    S = np.zeros((C, C))
    for t in range(T):
        for i in range(C):
            for j in range(C):
                S[i, j] += k[t, i] * v[t, j]
        for j in range(C):
            y[t, j] = 0
            for i in range(C):
                y[t, j] += q[t, i] * S[i, j]


@declared(state("x", B, T, 2 * C))
def rotary_in_place(x):
    half = x.shape[2] // 2
    for b in prange(x.shape[0]):
        for t in range(x.shape[1]):
            for j in range(half):
                angle = t / 10000.0 ** (j / half)
                s, c = math.sin(angle), math.cos(angle)
                x[b, t, j], x[b, t, half + j] = (
                    c * x[b, t, j] - s * x[b, t, half + j],
                    s * x[b, t, j] + c * x[b, t, half + j],
                )


@declared(out("y", N), inp("x", N), inp("c", 6))
def rational_activation(y, x, c):
    for i in prange(x.shape[0]):
        p = c[0] + x[i] * (c[1] + x[i] * (c[2] + x[i] * c[3]))
        q = 1.0 + abs(x[i] * (c[4] + x[i] * c[5]))
        y[i] = p / q


@declared(out("y", BT, OC), inp("x", BT, C), inp("coef", OC, C, 5))
def kan_layer(y, x, coef):
    for b in prange(x.shape[0]):
        for o in range(coef.shape[0]):
            s = 0.0
            for i in range(x.shape[1]):
                for g in range(5):
                    d = (x[b, i] - (g - 2)) / 0.8
                    if abs(d) > 1.0:
                        continue
                    s += coef[o, i, g] * (1 - d * d) ** 2
            y[b, o] = s


@declared(out("y", B, NH), inp("x", B, C), inp("w", NH, C))
def top_1_gate(y, x, w):
    n = w.shape[0]
    logits = np.zeros(n)
    for b in range(x.shape[0]):
        best = 0
        for e in range(n):
            logits[e] = 0.0
            for c in range(x.shape[1]):
                logits[e] += w[e, c] * x[b, c]
            if logits[e] > logits[best]:
                best = e
        total = 0.0
        for e in range(n):
            total += math.exp(logits[e] - logits[best])
        for e in range(n):
            y[b, e] = 0.0
        y[b, best] = 1.0 / total


@declared(out("loss", BT), inp("x", BT, C), inp("t", BT, C))
def wing_loss(loss, x, t):
    w, eps = 1.0, 0.5
    k = w - w * math.log(1 + w / eps)
    for i in prange(x.shape[0]):
        loss[i] = 0
        for j in range(x.shape[1]):
            d = abs(x[i, j] - t[i, j])
            loss[i] += w * math.log(1 + d / eps) if d < w else d - k


@declared(out("y", BT, C), inp("x", BT, C))
def softmax_rows_numpy(y, x):
    for i in prange(x.shape[0]):
        e = np.exp(x[i] - np.max(x[i]))
        y[i] = e / np.sum(e)


@declared(out("kl", BT), inp("mu", BT, C), inp("logvar", BT, C))
def vae_kl(kl, mu, logvar):
    for i in prange(mu.shape[0]):
        m, lv = mu[i], logvar[i]
        kl[i] = 0.0
        for j in range(m.shape[0]):
            kl[i] += -0.5 * (1 + lv[j] - m[j] ** 2 - np.exp(lv[j]))


@declared(
    out("ll", BT), inp("x", BT), inp("a", 1), inp("b", 1), inputs=lambda g: {n: 0.1 + abs(x) for n, x in g.items()}
)
def weibull(ll, x, a, b):
    for i in prange(x.shape[0]):
        k, lam = a[0], b[0]
        z = x[i] / lam
        ll[i] = math.log(k / lam) + (k - 1) * math.log(z) - z**k


@declared(out("adv", B, T), inp("r", B, T), inp("v", B, T), scalar("gamma"))
def gae(adv, r, v, gamma):
    B, T = r.shape
    for b in prange(B):
        last = 0.0
        for t in reversed(range(T)):
            nxt = v[b, t + 1] if t < T - 1 else 0.0
            delta = r[b, t] + gamma * nxt - v[b, t]
            last = delta + gamma * 0.95 * last
            adv[b, t] = last
