"""Kernels as people write them, each with its declaration: `ALL`, by name.

Each reaches a step of the generator that no other test does; of some 250 that were tried, the others are left out.
"""

import math

import numpy as np
from numba import njit, prange

from cpuopt import differentiable
from cpuopt.ops.declaration import BT, B, C, N, T, inp, out, state

ALL = {}


def declared(*args):
    """Put a kernel into the table, as a function that makes its op."""

    def put(function):
        ALL[function.__name__] = lambda: differentiable(*args)(function)
        return function

    return put


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


@declared(out("y", B, T, C), inp("x", B, T, C), inp("a", C), inp("bc", B, T))
def selective_scan(y, x, a, bc):
    for b in prange(x.shape[0]):
        for c in range(x.shape[2]):
            h = 0.0
            decay = math.exp(-math.exp(a[c]))
            for t in range(x.shape[1]):
                h = decay * h + bc[b, t] * x[b, t, c]
                y[b, t, c] = h * bc[b, t]


@declared(out("loss", B), inp("a", B, T), inp("b", B, T))
def pearson(loss, a, b):
    for i in prange(a.shape[0]):
        ma, mb = np.mean(a[i]), np.mean(b[i])
        num = da = db = 0.0
        for x, y in zip(a[i], b[i]):  # noqa: B905
            num += (x - ma) * (y - mb)
            da += (x - ma) ** 2
            db += (y - mb) ** 2
        loss[i] = 1.0 - num / np.sqrt(da * db + 1e-6)


@declared(out("f", 3, C), inp("f0", 3, C), inp("tau", 1))
def lattice_boltzmann_1d(f, f0, tau):
    n = f0.shape[1]
    weight = np.zeros(3)
    weight[0] = 4.0 / 6.0
    weight[1] = weight[2] = 1.0 / 6.0
    omega = 1.0 / (0.6 + tau[0] ** 2)
    for i in range(n):
        rho = f0[0, i] + f0[1, i] + f0[2, i]
        for k in range(3):
            post = f0[k, i] + omega * (weight[k] * rho - f0[k, i])
            to = (i + (1 if k == 1 else -1 if k == 2 else 0)) % n
            f[k, to] = post


G = 9.81


@njit
def shallow_flux(h, hu):
    u = hu / h
    return hu, hu * u + 0.5 * G * h * h


@declared(state("h", C), state("hu", C))
def shallow_water_step(h, hu):
    n = h.shape[0]
    fh = np.zeros(n + 1)
    fu = np.zeros(n + 1)
    for i in range(1, n):
        hl, hr = 2.0 + math.tanh(h[i - 1]), 2.0 + math.tanh(h[i])
        a, b = shallow_flux(hl, hu[i - 1])
        c, d = shallow_flux(hr, hu[i])
        fh[i] = 0.5 * (a + c) - 0.5 * (hr - hl)
        fu[i] = 0.5 * (b + d) - 0.5 * (hu[i] - hu[i - 1])
    for i in range(n):
        h[i] -= 0.01 * (fh[i + 1] - fh[i])
        hu[i] -= 0.01 * (fu[i + 1] - fu[i])


@declared(out("polar", N, 2), inp("xy", N, 2))
def to_polar(polar, xy):
    for i in prange(xy.shape[0]):
        x, y = xy[i]
        polar[i, 0] = np.sqrt(x * x + y * y)
        polar[i, 1] = np.arctan2(y, x)


@njit
def gauss(d2, sigma):
    return math.exp(-d2 / (2 * sigma * sigma))


@declared(out("y", T, C), inp("img", T, C), inp("sigma", 2))
def bilateral_filter(y, img, sigma):
    h, w = img.shape
    ss, sr = 0.5 + abs(sigma[0]), 0.5 + abs(sigma[1])
    for i in prange(h):
        for j in range(w):
            total = 0.0
            norm = 0.0
            for di in range(-1, 2):
                for dj in range(-1, 2):
                    ii, jj = i + di, j + dj
                    if ii < 0 or ii >= h or jj < 0 or jj >= w:
                        continue
                    g = gauss(di * di + dj * dj, ss) * gauss((img[ii, jj] - img[i, j]) ** 2, sr)
                    total += g * img[ii, jj]
                    norm += g
            y[i, j] = total / norm
