"""Kernels of textbooks, in the plain subset."""

from math import exp, sqrt

from numba import prange

from cpuopt.ops.declaration import BT, B, C, N, T, inp, out, scalar

from .table import declared

X, Y, W = inp("x", N), out("y", N), inp("w", C)


@declared(out("y", BT, C), inp("x", BT, C), W)
def prelu(y, x, w):
    for i in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[i, c] = max(0.0, x[i, c]) + w[c] * min(0.0, x[i, c])


@declared(out("y", BT, C), out("mean", BT), out("rstd", BT), inp("x", BT, C), W, inp("b", C))
def layernorm_two_passes(y, mean, rstd, x, w, b):
    n = x.shape[1]
    for i in prange(x.shape[0]):
        m = 0.0
        for j in range(n):
            m += x[i, j]
        m /= n
        v = 0.0
        for j in range(n):
            d = x[i, j] - m
            v += d * d
        r = 1.0 / sqrt(v / n + 1e-5)
        for j in range(n):
            y[i, j] = (x[i, j] - m) * r * w[j] + b[j]
        mean[i] = m
        rstd[i] = r


@declared(out("y", B, T, T), inp("x", B, T, T))
def causal_softmax(y, x):
    for b in prange(x.shape[0]):
        for t in range(x.shape[1]):
            top = -1e9
            for s in range(t + 1):
                top = max(top, x[b, t, s])
            total = 0.0
            for s in range(t + 1):
                total += exp(x[b, t, s] - top)
            for s in range(x.shape[2]):
                y[b, t, s] = exp(x[b, t, s] - top) / total if s <= t else 0.0


@declared(out("y", BT, C), inp("x", BT, C), scalar("temperature"))
def softmax_temperature(y, x, temperature):
    for i in prange(x.shape[0]):
        top = -1e30
        for j in range(x.shape[1]):
            top = max(top, x[i, j] / temperature)
        total = 0.0
        for j in range(x.shape[1]):
            e = exp(x[i, j] / temperature - top)
            total += e
            y[i, j] = e
        for j in range(x.shape[1]):
            y[i, j] = y[i, j] / total


@declared(out("y", C), inp("x", C))
def heat(y, x):
    n = x.shape[0]
    y[0] = x[0]
    y[n - 1] = x[n - 1]
    for i in prange(1, n - 1):
        y[i] = x[i] + 0.1 * (x[i - 1] - 2.0 * x[i] + x[i + 1])
