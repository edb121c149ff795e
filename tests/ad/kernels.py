"""Kernels of the subset, float64 or float32, that no op of the package has."""

from math import exp, log, sqrt, tanh

from numba import prange


def rmsnorm(x, w, y):
    C = x.shape[1]
    for i in prange(x.shape[0]):
        v = 0.0
        for j in range(C):
            v += x[i, j] * x[i, j]
        r = 1.0 / sqrt(v / C + 1e-5)
        for j in range(C):
            y[i, j] = x[i, j] * r * w[j]


def swiglu(x, w, y):
    for i in prange(x.shape[0]):
        for j in range(x.shape[1]):
            z = w[j] * x[i, j]
            s = 1.0 / (1.0 + exp(-z))
            y[i, j] = x[i, j] * z * s


def rope(x, w, y):
    for t in prange(x.shape[0]):
        for j in range(x.shape[1] // 2):
            a, b = x[t, 2 * j], x[t, 2 * j + 1]
            y[t, 2 * j] = a * w[2 * j] - b * w[2 * j + 1]
            y[t, 2 * j + 1] = a * w[2 * j + 1] + b * w[2 * j]


def relu2(x, w, y):
    for i in prange(x.shape[0]):
        for j in range(x.shape[1]):
            if x[i, j] > 0.0:
                y[i, j] = x[i, j] * x[i, j] * w[j]
            else:
                y[i, j] = 0.0


def softmax(x, w, y):
    for i in prange(x.shape[0]):
        top = -1e30
        for j in range(x.shape[1]):
            top = max(top, x[i, j] * w[j])
        total = 0.0
        for j in range(x.shape[1]):
            e = exp(x[i, j] * w[j] - top)
            total += e
            y[i, j] = e
        for j in range(x.shape[1]):
            y[i, j] /= total


def neighbours(x, w, y):
    for i in prange(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * x[(i + x.shape[0] - 1) % x.shape[0], j] * w[j]


def recurrence(x, w, y):
    for i in range(x.shape[0]):
        h = 0.1
        for j in range(x.shape[1]):
            h = tanh(w[j] * h + x[i, j])
            y[i, j] = h


def in_place(x, w, y):
    for i in prange(x.shape[0]):
        s = 0.5
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] + w[j]
        for j in range(x.shape[1]):
            y[i, j] *= y[i, j] * s
            s = s + log(1.0 + y[i, j] * y[i, j])
        for j in range(x.shape[1]):
            y[i, j] += s * w[j]


ALL = {f.__name__: f for f in (rmsnorm, swiglu, rope, relu2, softmax, neighbours, recurrence, in_place)}
