"""Recurrences, scans and filters as a researcher first writes them: no `inputs=`, and sizes at which they may grow."""

import math

import numpy as np
from numba import prange

from cpuopt.ops.declaration import C, T, index, inp, out, scalar, symbols

from .table import declared

D, K, L, M = symbols("D K L M")


def softplus(v):
    return max(v, 0.0) + math.log1p(math.exp(-abs(v)))


def logaddexp(a, b):
    top = max(a, b)
    return top + math.log(math.exp(a - top) + math.exp(b - top))


@declared(out("h", T, C), inp("x", T, C), inp("a", C), inp("b", C))
def linear_recurrence(h, x, a, b):
    for c in range(x.shape[1]):
        prev = 0.0
        for t in range(x.shape[0]):
            h[t, c] = a[c] * prev + b[c] * x[t, c]
            prev = h[t, c]


@declared(
    out("y", T, D), inp("x", T, D), inp("delta", T, D), inp("a", D, M), inp("b", T, M), inp("c", T, M), inp("skip", D)
)
def selective_scan(y, x, delta, a, b, c, skip):
    for d in prange(x.shape[1]):
        h = np.zeros(a.shape[1])
        for t in range(x.shape[0]):
            dt = softplus(delta[t, d])
            s = 0.0
            for n in range(a.shape[1]):
                h[n] = math.exp(dt * a[d, n]) * h[n] + dt * b[t, n] * x[t, d]
                s += h[n] * c[t, n]
            y[t, d] = s + skip[d] * x[t, d]


@declared(out("y", T, C), inp("k", T, C), inp("v", T, C), inp("w", C), inp("u", C))
def wkv(y, k, v, w, u):
    for c in range(k.shape[1]):
        num, den, top = 0.0, 0.0, -np.inf
        for t in range(k.shape[0]):
            m = max(top, u[c] + k[t, c])
            e1, e2 = math.exp(top - m), math.exp(u[c] + k[t, c] - m)
            y[t, c] = (e1 * num + e2 * v[t, c]) / (e1 * den + e2)
            m = max(top - math.exp(w[c]), k[t, c])
            e1, e2 = math.exp(top - math.exp(w[c]) - m), math.exp(k[t, c] - m)
            num = e1 * num + e2 * v[t, c]
            den = e1 * den + e2
            top = m


@declared(out("y", T), inp("x0", 1), inp("r", 1))
def logistic_map(y, x0, r):
    x = x0[0]
    for t in range(y.shape[0]):
        x = r[0] * x * (1.0 - x)
        y[t] = x


@declared(out("p", T, 3), inp("p0", 3), inp("k", 3), scalar("dt"))
def lorenz(p, p0, k, dt):
    x, y, z = p0
    for t in range(p.shape[0]):
        dx, dy, dz = k[0] * (y - x), x * (k[1] - z) - y, x * y - k[2] * z
        x, y, z = x + dt * dx, y + dt * dy, z + dt * dz
        p[t, 0], p[t, 1], p[t, 2] = x, y, z


@declared(out("loss", 1), out("alpha", T, 2 * L + 1), inp("logp", T, C), index("labels", L, below=C))
def ctc(loss, alpha, logp, labels):
    n, S = alpha.shape
    alpha[:] = -1e5
    alpha[0, 0] = logp[0, 0]
    alpha[0, 1] = logp[0, labels[0]]
    for t in range(1, n):
        for s in range(S):
            k = labels[s // 2] if s % 2 == 1 else 0
            a = alpha[t - 1, s]
            if s > 0:
                a = logaddexp(a, alpha[t - 1, s - 1])
            if s > 1 and s % 2 == 1 and labels[s // 2] != labels[s // 2 - 1]:
                a = logaddexp(a, alpha[t - 1, s - 2])
            alpha[t, s] = a + logp[t, k]
    loss[0] = -logaddexp(alpha[n - 1, S - 1], alpha[n - 1, S - 2])


@declared(out("ll", 1), inp("start", K), inp("trans", K, K), inp("emit", T, K))
def hidden_markov(ll, start, trans, emit):
    n = start.shape[0]
    alpha, new = np.zeros(n), np.zeros(n)
    for j in range(n):
        alpha[j] = start[j] + emit[0, j]
    for t in range(1, emit.shape[0]):
        for j in range(n):
            top = -np.inf
            for i in range(n):
                top = max(top, alpha[i] + trans[i, j])
            s = 0.0
            for i in range(n):
                s += math.exp(alpha[i] + trans[i, j] - top)
            new[j] = top + math.log(s) + emit[t, j]
        for j in range(n):
            alpha[j] = new[j]
    top = alpha[0]
    for j in range(n):
        top = max(top, alpha[j])
    s = 0.0
    for j in range(n):
        s += math.exp(alpha[j] - top)
    ll[0] = top + math.log(s)


@declared(out("x", T), inp("lower", T), inp("diag", T), inp("upper", T), inp("rhs", T))
def thomas(x, lower, diag, upper, rhs):
    n = rhs.shape[0]
    c, d = np.zeros(n), np.zeros(n)
    c[0], d[0] = upper[0] / diag[0], rhs[0] / diag[0]
    for i in range(1, n):
        m = diag[i] - lower[i] * c[i - 1]
        c[i] = upper[i] / m
        d[i] = (rhs[i] - lower[i] * d[i - 1]) / m
    x[n - 1] = d[n - 1]
    for i in reversed(range(n - 1)):
        x[i] = d[i] - c[i] * x[i + 1]


@declared(out("w", C), inp("w0", C), inp("curvature", C), inp("lr", 1), scalar("beta1"), scalar("step", integer=True))
def unrolled_momentum(w, w0, curvature, lr, beta1, step):
    for c in range(w0.shape[0]):
        p, m = w0[c], 0.0
        for _ in range(10 + step):
            m = beta1 * m + curvature[c] * p
            p -= lr[0] * m
        w[c] = p
