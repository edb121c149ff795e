"""Kernels of signals and images as first written."""

import math

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, C, N, T, inp, out, state

from .table import declared

SMOOTH = np.array([-3.0, 12.0, 17.0, 12.0, -3.0]) / 35.0


@declared(state("x", BT, 2 * C))
def haar_step(x):
    half = x.shape[1] // 2
    for b in prange(x.shape[0]):
        tmp = np.empty(2 * half)
        for i in range(half):
            a, d = x[b, 2 * i], x[b, 2 * i + 1]
            tmp[i] = (a + d) / math.sqrt(2)
            tmp[half + i] = (a - d) / math.sqrt(2)
        for i in range(2 * half):
            x[b, i] = tmp[i]


@njit
def matmul_2x2(a, b, c):
    for i in range(2):
        for j in range(2):
            c[i, j] = 0.0
            for k in range(2):
                c[i, j] += a[i, k] * b[k, j]


@declared(out("trace", T), inp("F", 2, 2), inp("P0", 2, 2))
def covariance_propagation(trace, F, P0):
    P = np.zeros((2, 2))
    FP = np.zeros((2, 2))
    Ft = np.zeros((2, 2))
    for i in range(2):
        for j in range(2):
            P[i, j] = P0[i, j]
            Ft[i, j] = F[j, i]
    for t in range(trace.shape[0]):
        matmul_2x2(F, P, FP)
        matmul_2x2(FP, Ft, P)
        trace[t] = P[0, 0] + P[1, 1]


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


@declared(out("hsv", N, 2), inp("rgb", N, 3))
def saturation_and_value(hsv, rgb):
    for i in prange(rgb.shape[0]):
        r, g, b = abs(rgb[i, 0]), abs(rgb[i, 1]), abs(rgb[i, 2])
        hi = max(r, g, b)
        lo = min(r, g, b)
        hsv[i, 0] = (hi - lo) / hi if hi > 0 else 0.0
        hsv[i, 1] = hi


@declared(out("y", B, T), inp("x", B, T), inp("g", 1))
def feedback_delay(y, x, g):
    delay = 3
    for b in prange(x.shape[0]):
        line = np.zeros(delay)
        for t in range(x.shape[1]):
            k = t % delay
            y[b, t] = x[b, t] + 0.5 * math.tanh(g[0]) * line[k]
            line[k] = y[b, t]


@declared(out("y", T), inp("x", T + 4))
def savitzky_golay(y, x):
    for i in prange(y.shape[0]):
        s = 0.0
        for k in range(5):
            s += SMOOTH[k] * x[i + k]
        y[i] = s


@declared(out("centroid", B), inp("mag", B, C))
def spectral_centroid(centroid, mag):
    for b in prange(mag.shape[0]):
        num = den = 0.0
        for k, m in enumerate(mag[b]):
            num += k * m * m
            den += m * m
        centroid[b] = num / (den + 1e-9)
