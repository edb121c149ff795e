"""Kernels of signals and images as first written."""

import math

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, C, N, T, inp, out, scalar, state

from .table import declared

SMOOTH = np.array([-3.0, 12.0, 17.0, 12.0, -3.0]) / 35.0


@declared(out("y", B, T), inp("x", B, T), inp("h", 4))
def fir_filter(y, x, h):
    for b in prange(x.shape[0]):
        for n in range(x.shape[1]):
            y[b, n] = 0.0
            for k in range(h.shape[0]):
                if n - k < 0:
                    continue
                y[b, n] += h[k] * x[b, n - k]


@declared(out("y", B, T), inp("x", B, T), inp("c", 5))
def biquad(y, x, c):
    b0, b1, b2, a1, a2 = c[0], c[1], c[2], 0.3 * np.tanh(c[3]), 0.3 * np.tanh(c[4])
    for b in prange(x.shape[0]):
        x1 = x2 = y1 = y2 = 0.0
        for n in range(x.shape[1]):
            v = b0 * x[b, n] + b1 * x1 + b2 * x2 - a1 * y1 - a2 * y2
            x2, x1 = x1, x[b, n]
            y2, y1 = y1, v
            y[b, n] = v


@declared(out("mag", C), out("phase", C), inp("x", C))
def dft(mag, phase, x):
    n = x.shape[0]
    for k in prange(n):
        re = 0.0
        im = 0.0
        for t in range(n):
            a = -2.0 * np.pi * k * t / n
            re += x[t] * np.cos(a)
            im += x[t] * np.sin(a)
        mag[k] = np.hypot(re, im)
        phase[k] = math.atan2(im, re)


@declared(out("power", B), inp("x", B, T), inp("freq", 1))
def goertzel(power, x, freq):
    w = 2 * math.cos(freq[0])
    for b in prange(x.shape[0]):
        s1, s2 = 0.0, 0.0
        for v in range(x.shape[1]):
            s1, s2 = x[b, v] + w * s1 - s2, s1
        power[b] = s1**2 + s2**2 - w * s1 * s2


@declared(out("y", T + 3), inp("x", T), inp("h", 4))
def convolve_full(y, x, h):
    for i in range(len(y)):
        y[i] = 0.0
    for i in range(len(x)):
        for j in range(len(h)):
            y[i + j] += x[i] * h[j]


@declared(out("y", T), inp("x", T + 2))
def median_of_three(y, x):
    for i in prange(y.shape[0]):
        a, b, c = x[i], x[i + 1], x[i + 2]
        y[i] = max(min(a, b), min(max(a, b), c))


@declared(out("y", B, T), inp("x", B, T), scalar("ratio"))
def compressor(y, x, ratio):
    for b in prange(x.shape[0]):
        env = 0.0
        for t in range(x.shape[1]):
            level = abs(x[b, t])
            coeff = 0.4 if level > env else 0.05
            env += coeff * (level - env)
            db = 20.0 * math.log10(env + 1e-6)
            over = db + 12.0
            if over <= 0.0:
                y[b, t] = x[b, t]
                continue
            y[b, t] = x[b, t] * 10.0 ** (-over * (1.0 - ratio) / 20.0)


@declared(out("y", N), inp("x", C), inp("pos", N))
def resample_linear(y, x, pos):
    n = x.shape[0]
    for i in prange(pos.shape[0]):
        p = min(max(pos[i] * 2 + 3, 0.0), n - 1.5)
        k = int(np.floor(p))
        frac = p - np.floor(p)
        y[i] = (1.0 - frac) * x[k] + frac * x[k + 1]


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


@declared(out("y", B, C), inp("x", B, C))
def dct_2(y, x):
    n = x.shape[1]
    for b in prange(x.shape[0]):
        for k in range(n):
            s = 0.0
            for i in range(n):
                s += x[b, i] * math.cos(math.pi / n * (i + 0.5) * k)
            y[b, k] = s * (math.sqrt(1.0 / n) if k == 0 else math.sqrt(2.0 / n))


@declared(out("err", T), inp("x", T), inp("d", T), inp("mu", 1))
def lms_filter(err, x, d, mu):
    taps = 3
    w = np.zeros(taps)
    for n in range(x.shape[0]):
        y = 0.0
        for k in range(taps):
            if n >= k:
                y += w[k] * x[n - k]
        e = d[n] - y
        err[n] = e
        for k in range(taps):
            if n >= k:
                w[k] += 0.1 * mu[0] * e * x[n - k]


@declared(out("xs", B, T), inp("z", B, T), inp("q", 1), inp("r", 1))
def kalman_1d(xs, z, q, r):
    for b in prange(z.shape[0]):
        x, p = 0.0, 1.0
        for t in range(z.shape[1]):
            p = p + q[0] ** 2
            k = p / (p + r[0] ** 2 + 0.1)
            x = x + k * (z[b, t] - x)
            p = (1 - k) * p
            xs[b, t] = x


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


@declared(out("tv", 1), inp("img", T, C))
def total_variation(tv, img):
    h, w = img.shape
    tv[0] = 0.0
    for i in range(h - 1):
        for j in range(w - 1):
            dx = img[i + 1, j] - img[i, j]
            dy = img[i, j + 1] - img[i, j]
            tv[0] += math.sqrt(dx**2 + dy**2 + 1e-6)


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


@declared(out("edge", T, C), inp("img", T, C))
def sobel(edge, img):
    h, w = img.shape
    for i in prange(h):
        for j in range(w):
            edge[i, j] = 0.0
            if i == 0 or j == 0 or i == h - 1 or j == w - 1:
                continue
            gx = img[i - 1, j + 1] + 2 * img[i, j + 1] + img[i + 1, j + 1]
            gx -= img[i - 1, j - 1] + 2 * img[i, j - 1] + img[i + 1, j - 1]
            gy = img[i + 1, j - 1] + 2 * img[i + 1, j] + img[i + 1, j + 1]
            gy -= img[i - 1, j - 1] + 2 * img[i - 1, j] + img[i - 1, j + 1]
            edge[i, j] = math.hypot(gx, gy)


@declared(out("y", N), inp("x", N), inp("gamma", 1), inputs=lambda a: {n: 0.05 + abs(x) for n, x in a.items()})
def gamma_correction(y, x, gamma):
    for i in prange(x.shape[0]):
        y[i] = pow(x[i], 1.0 / gamma[0])


@declared(out("hsv", N, 2), inp("rgb", N, 3))
def saturation_and_value(hsv, rgb):
    for i in prange(rgb.shape[0]):
        r, g, b = abs(rgb[i, 0]), abs(rgb[i, 1]), abs(rgb[i, 2])
        hi = max(r, g, b)
        lo = min(r, g, b)
        hsv[i, 0] = (hi - lo) / hi if hi > 0 else 0.0
        hsv[i, 1] = hi


@declared(out("h", 8), inp("x", N), inp("width", 1))
def soft_histogram(h, x, width):
    bins = h.shape[0]
    h[:] = 0.0
    for i in range(x.shape[0]):
        for b in range(bins):
            d = (x[i] - (b - 3.5) * 0.5) / (0.3 + width[0] ** 2)
            h[b] += math.exp(-0.5 * d * d) / x.shape[0]


@declared(out("y", N), inp("x", N), inp("t", 1))
def soft_threshold(y, x, t):
    for i in prange(x.shape[0]):
        y[i] = np.sign(x[i]) * max(abs(x[i]) - abs(t[0]), 0.0)


@declared(out("y", B, T), inp("x", B, T), inp("g", 1))
def feedback_delay(y, x, g):
    delay = 3
    for b in prange(x.shape[0]):
        line = np.zeros(delay)
        for t in range(x.shape[1]):
            k = t % delay
            y[b, t] = x[b, t] + 0.5 * math.tanh(g[0]) * line[k]
            line[k] = y[b, t]


@declared(out("y", N), inp("x", N), inp("drive", 1))
def overdrive(y, x, drive):
    for i in prange(x.shape[0]):
        v = x[i] * (1 + drive[0] ** 2)
        if v > 1:
            y[i] = 2.0 / 3.0
        elif v < -1:
            y[i] = -2.0 / 3.0
        else:
            y[i] = v - v**3 / 3


@declared(out("y", N), inp("x", N), inp("k", 1))
def arctangent_distortion(y, x, k):
    for i in prange(x.shape[0]):
        y[i] = 2 / math.pi * math.atan(k[0] * x[i])


@declared(out("y", B, T), inp("x", B, T))
def moving_average(y, x):
    n = x.shape[1]
    w = 3
    for b in prange(x.shape[0]):
        run = 0.0
        for t in range(n):
            run += x[b, t]
            if t >= w:
                run -= x[b, t - w]
            y[b, t] = run / min(t + 1, w)


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


@declared(out("y", B, T), inp("x", B, T))
def wrap_phase(y, x):
    for b in prange(x.shape[0]):
        y[b, 0] = x[b, 0]
        for t in range(1, x.shape[1]):
            d = 3.0 * (x[b, t] - x[b, t - 1])
            d = d - 2 * math.pi * np.round(d / (2 * math.pi))
            y[b, t] = y[b, t - 1] + d
