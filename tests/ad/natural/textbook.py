"""A hundred kernels of textbooks, in the plain subset."""

import math
from math import cos, exp, log, sin, sqrt, tanh

import numpy as np
from numba import prange

from cpuopt.ops.declaration import BT, HS, NH, OC, B, C, N, T, V, index, inp, out, scalar

from .table import declared

ALPHA = np.float32(0.2)
ROOT2 = 1.4142135
BIG = -1e9


X, Y, W = inp("x", N), out("y", N), inp("w", C)
elementwise = declared(Y, X)
pairs = declared(Y, X, inp("t", N))
rows = declared(out("y", BT, C), inp("x", BT, C))
loss_of_rows = declared(out("loss", BT), inp("x", BT, C), inp("t", BT, C))

# Activations --------------------------------------------------------------------------------------------------------


@elementwise
def relu(y, x):
    for i in prange(x.shape[0]):
        y[i] = max(x[i], 0.0)


@elementwise
def leaky_relu(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] if x[i] > 0 else ALPHA * x[i]


@elementwise
def elu(y, x):
    for i in prange(x.shape[0]):
        if x[i] > 0:
            y[i] = x[i]
        else:
            y[i] = math.exp(x[i]) - 1.0


@elementwise
def selu(y, x):
    for i in prange(len(x)):
        v = x[i]
        y[i] = 1.0507 * (v if v > 0.0 else 1.67326 * np.expm1(v))


@elementwise
def gelu_tanh(y, x):
    for i in prange(x.shape[0]):
        y[i] = 0.5 * x[i] * (1.0 + math.tanh(0.7978845608 * (x[i] + 0.044715 * x[i] ** 3)))


@elementwise
def gelu_quick(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] / (1.0 + math.exp(-1.702 * x[i]))


@elementwise
def silu(y, x):
    for i in prange(x.shape[0]):
        s = 1 / (1 + np.exp(-x[i]))
        y[i] = x[i] * s


@elementwise
def mish(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] * tanh(np.log1p(exp(x[i])))


@elementwise
def softplus(y, x):
    for i in prange(x.shape[0]):
        y[i] = max(x[i], 0.0) + math.log1p(math.exp(-abs(x[i])))


@elementwise
def softplus_threshold(y, x):
    for i in prange(x.shape[0]):
        if x[i] > 20.0:
            y[i] = x[i]
        else:
            y[i] = math.log(1.0 + math.exp(x[i]))


@elementwise
def softsign(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] / (1.0 + abs(x[i]))


@elementwise
def tanhshrink(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] - np.tanh(x[i])


@elementwise
def softshrink(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] - 0.5 if x[i] > 0.5 else (x[i] + 0.5 if x[i] < -0.5 else 0.0)


@elementwise
def hardtanh(y, x):
    for i in prange(x.shape[0]):
        y[i] = min(max(x[i], -1.0), 1.0)


@elementwise
def hardsigmoid(y, x):
    for i in prange(x.shape[0]):
        y[i] = np.minimum(np.maximum(x[i] / 6.0 + 0.5, 0.0), 1.0)


@elementwise
def hardswish(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] * min(max(x[i] + 3.0, 0.0), 6.0) / 6.0


@elementwise
def sigmoid_stable(y, x):
    for i in prange(x.shape[0]):
        if x[i] >= 0:
            y[i] = 1.0 / (1.0 + exp(-x[i]))
        else:
            e = exp(x[i])
            y[i] = e / (1.0 + e)


@elementwise
def log_sigmoid(y, x):
    for i in prange(x.shape[0]):
        y[i] = min(0.0, x[i]) - np.log1p(np.exp(-abs(x[i])))


@elementwise
def squareplus(y, x):
    for i in prange(x.shape[0]):
        y[i] = 0.5 * (x[i] + math.sqrt(x[i] * x[i] + 4.0))


@elementwise
def relu_squared(y, x):
    for i in prange(x.shape[0]):
        r = max(x[i], 0.0)
        y[i] = r * r


@declared(Y, X, scalar("beta"))
def snake(y, x, beta):
    for i in prange(x.shape[0]):
        y[i] = x[i] + sin(beta * x[i]) ** 2 / beta


@declared(out("y", BT, C), inp("x", BT, C), W)
def prelu(y, x, w):
    for i in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[i, c] = max(0.0, x[i, c]) + w[c] * min(0.0, x[i, c])


@elementwise
def erf_series(y, x):
    for i in prange(x.shape[0]):
        t = 1.0 / (1.0 + 0.3275911 * abs(x[i]))
        poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        e = 1.0 - poly * exp(-x[i] * x[i])
        y[i] = e if x[i] >= 0 else -e


@declared(out("y", BT, C), inp("x", BT, 2 * C))
def swiglu(y, x):
    for i in prange(y.shape[0]):
        half = x.shape[1] // 2
        for j in range(half):
            g = x[i, j]
            y[i, j] = g / (1.0 + exp(-g)) * x[i, half + j]


# Normalization ------------------------------------------------------------------------------------------------------


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


@rows
def layernorm_one_pass(y, x):
    n = x.shape[1]
    for i in prange(x.shape[0]):
        s, q = 0.0, 0.0
        for j in range(n):
            s += x[i, j]
            q += x[i, j] * x[i, j]
        mean = s / n
        var = max(q / n - mean * mean, 0.0)
        for j in range(n):
            y[i, j] = (x[i, j] - mean) / math.sqrt(var + 1e-5)


@declared(out("y", BT, C), inp("x", BT, C), W, scalar("eps"))
def rmsnorm_eps(y, x, w, eps):
    for i in prange(x.shape[0]):
        ss = 0.0
        for j in range(x.shape[1]):
            ss += x[i, j] ** 2
        scale = (ss / x.shape[1] + eps) ** -0.5
        for j in range(x.shape[1]):
            y[i, j] = w[j] * x[i, j] * scale


@rows
def l2_normalize(y, x):
    for i in prange(x.shape[0]):
        s = 0.0
        for j in range(x.shape[1]):
            s += x[i, j] * x[i, j]
        norm = max(sqrt(s), 1e-12)
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] / norm


@declared(out("y", BT, NH, HS), inp("x", BT, NH, HS))
def group_norm(y, x):
    for i in prange(x.shape[0]):
        for g in range(x.shape[1]):
            m = 0.0
            for j in range(x.shape[2]):
                m += x[i, g, j] / x.shape[2]
            v = 0.0
            for j in range(x.shape[2]):
                v += (x[i, g, j] - m) ** 2 / x.shape[2]
            for j in range(x.shape[2]):
                y[i, g, j] = (x[i, g, j] - m) / sqrt(v + 1e-5)


@rows
def batch_norm(y, x):
    for c in prange(x.shape[1]):
        m = 0.0
        for i in range(x.shape[0]):
            m += x[i, c]
        m = m / x.shape[0]
        v = 0.0
        for i in range(x.shape[0]):
            v += (x[i, c] - m) * (x[i, c] - m)
        v = v / x.shape[0]
        for i in range(x.shape[0]):
            y[i, c] = (x[i, c] - m) / np.sqrt(v + 1e-5)


@rows
def min_max_norm(y, x):
    for i in prange(x.shape[0]):
        lo = x[i, 0]
        hi = x[i, 0]
        for j in range(1, x.shape[1]):
            lo = min(lo, x[i, j])
            hi = max(hi, x[i, j])
        for j in range(x.shape[1]):
            y[i, j] = (x[i, j] - lo) / (hi - lo + 1e-6)


@elementwise
def max_abs_norm(y, x):
    top = 0.0
    for i in prange(x.shape[0]):
        top = max(top, abs(x[i]))
    for i in prange(x.shape[0]):
        y[i] = x[i] / top


# Softmax ------------------------------------------------------------------------------------------------------------


@rows
def softmax(y, x):
    for i in prange(x.shape[0]):
        top = -np.inf
        for j in range(x.shape[1]):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(x.shape[1]):
            y[i, j] = math.exp(x[i, j] - top)
            total += y[i, j]
        for j in range(x.shape[1]):
            y[i, j] /= total


@rows
def softmax_plain(y, x):
    for i in prange(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            total += exp(x[i, j])
        for j in range(x.shape[1]):
            y[i, j] = exp(x[i, j]) / total


@rows
def log_softmax(y, x):
    for i in prange(x.shape[0]):
        top = x[i, 0]
        for j in range(x.shape[1]):
            if x[i, j] > top:
                top = x[i, j]
        total = 0.0
        for j in range(x.shape[1]):
            total += exp(x[i, j] - top)
        lse = top + log(total)
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] - lse


@declared(out("y", BT, C), inp("x", BT, C), inp("mask", BT, C))
def masked_softmax(y, x, mask):
    for i in prange(x.shape[0]):
        top = -1e30
        for j in range(x.shape[1]):
            s = x[i, j] if mask[i, j] > 0 else BIG
            top = max(top, s)
        total = 0.0
        for j in range(x.shape[1]):
            s = x[i, j] if mask[i, j] > 0 else BIG
            total += exp(s - top)
        for j in range(x.shape[1]):
            s = x[i, j] if mask[i, j] > 0 else BIG
            y[i, j] = exp(s - top) / total


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


@rows
def online_softmax(y, x):
    for i in prange(x.shape[0]):
        top = x[i, 0]
        total = 1.0
        for j in range(1, x.shape[1]):
            new = max(top, x[i, j])
            total = total * exp(top - new) + exp(x[i, j] - new)
            top = new
        for j in range(x.shape[1]):
            y[i, j] = exp(x[i, j] - top) / total


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


@declared(out("y", BT), inp("x", BT, C))
def logsumexp(y, x):
    for i in prange(x.shape[0]):
        top = -1e30
        for j in range(x.shape[1]):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(x.shape[1]):
            total += exp(x[i, j] - top)
        y[i] = log(total) + top


@declared(out("y", BT), inp("x", BT, C))
def entropy_of_softmax(y, x):
    for i in prange(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            total += exp(x[i, j])
        h = 0.0
        for j in range(x.shape[1]):
            p = exp(x[i, j]) / total
            h -= p * log(p)
        y[i] = h


# Losses -------------------------------------------------------------------------------------------------------------


@loss_of_rows
def mse(loss, x, t):
    for i in prange(x.shape[0]):
        s = 0.0
        for j in range(x.shape[1]):
            s += (x[i, j] - t[i, j]) ** 2
        loss[i] = s / x.shape[1]


@loss_of_rows
def mae(loss, x, t):
    for i in prange(x.shape[0]):
        loss[i] = 0.0
        for j in range(x.shape[1]):
            loss[i] += abs(x[i, j] - t[i, j]) / x.shape[1]


@pairs
def huber(y, x, t):
    for i in prange(x.shape[0]):
        d = abs(x[i] - t[i])
        if d <= 1.0:
            y[i] = 0.5 * d * d
        else:
            y[i] = d - 0.5


@pairs
def log_cosh(y, x, t):
    for i in prange(x.shape[0]):
        d = x[i] - t[i]
        y[i] = abs(d) + np.log1p(exp(-2.0 * abs(d))) - log(2.0)


@pairs
def binary_cross_entropy(y, x, t):
    for i in prange(x.shape[0]):
        y[i] = -(t[i] * log(x[i]) + (1.0 - t[i]) * log(1.0 - x[i]))


@pairs
def bce_clipped(y, x, t):
    for i in prange(x.shape[0]):
        p = min(max(x[i], 1e-7), 1.0 - 1e-7)
        y[i] = -(t[i] * log(p) + (1.0 - t[i]) * log(1.0 - p))


@pairs
def bce_with_logits(y, x, t):
    for i in prange(x.shape[0]):
        y[i] = max(x[i], 0.0) - x[i] * t[i] + np.log1p(np.exp(-abs(x[i])))


@declared(out("loss", BT), inp("x", BT, V), index("ids", BT, below=V))
def cross_entropy_ids(loss, x, ids):
    for i in prange(x.shape[0]):
        top = x[i, 0]
        for j in range(1, x.shape[1]):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(x.shape[1]):
            total += exp(x[i, j] - top)
        loss[i] = log(total) + top - x[i, ids[i]]


@declared(out("loss", BT), inp("x", BT, V), index("ids", BT, below=V))
def nll(loss, x, ids):
    for i in prange(x.shape[0]):
        loss[i] = -math.log(x[i, ids[i]] + 1e-9)


@pairs
def kl_divergence(y, x, t):
    for i in prange(x.shape[0]):
        y[i] = t[i] * (log(t[i]) - log(x[i]))


@pairs
def hinge(y, x, t):
    for i in prange(x.shape[0]):
        y[i] = max(0.0, 1.0 - t[i] * x[i])


@pairs
def focal(y, x, t):
    for i in prange(x.shape[0]):
        p = 1.0 / (1.0 + exp(-x[i]))
        y[i] = -t[i] * (1.0 - p) ** 2 * log(p + 1e-8)


@loss_of_rows
def dice(loss, x, t):
    for i in prange(x.shape[0]):
        both, total = 0.0, 0.0
        for j in range(x.shape[1]):
            both += x[i, j] * t[i, j]
            total += x[i, j] ** 2 + t[i, j] ** 2
        loss[i] = 1.0 - 2.0 * both / (total + 1.0)


@pairs
def poisson_nll(y, x, t):
    for i in prange(x.shape[0]):
        y[i] = exp(x[i]) - t[i] * x[i]


@declared(Y, X, inp("t", N), inp("var", N))
def gaussian_nll(y, x, t, var):
    for i in prange(x.shape[0]):
        y[i] = 0.5 * (log(var[i]) + (x[i] - t[i]) ** 2 / var[i])


@pairs
def quantile_loss(y, x, t):
    for i in prange(x.shape[0]):
        e = t[i] - x[i]
        y[i] = max(0.9 * e, -0.1 * e)


@declared(out("loss", BT), inp("a", BT, C), inp("p", BT, C), inp("q", BT, C))
def triplet(loss, a, p, q):
    for i in prange(a.shape[0]):
        near, far = 0.0, 0.0
        for j in range(a.shape[1]):
            near += (a[i, j] - p[i, j]) ** 2
            far += (a[i, j] - q[i, j]) ** 2
        loss[i] = max(sqrt(near) - sqrt(far) + 1.0, 0.0)


# Distances ----------------------------------------------------------------------------------------------------------


@loss_of_rows
def cosine_similarity(loss, x, t):
    for i in prange(x.shape[0]):
        dot, a, b = 0.0, 0.0, 0.0
        for j in range(x.shape[1]):
            dot += x[i, j] * t[i, j]
            a += x[i, j] * x[i, j]
            b += t[i, j] * t[i, j]
        loss[i] = dot / (sqrt(a) * sqrt(b) + 1e-8)


@declared(out("d", T, OC), inp("x", T, C), inp("z", OC, C))
def pairwise_euclidean(d, x, z):
    for i in prange(x.shape[0]):
        for k in range(z.shape[0]):
            s = 0.0
            for j in range(x.shape[1]):
                s += (x[i, j] - z[k, j]) ** 2
            d[i, k] = math.sqrt(s)


@loss_of_rows
def chebyshev(loss, x, t):
    for i in prange(x.shape[0]):
        m = 0.0
        for j in range(x.shape[1]):
            m = max(m, abs(x[i, j] - t[i, j]))
        loss[i] = m


@loss_of_rows
def minkowski(loss, x, t):
    for i in prange(x.shape[0]):
        s = 0.0
        for j in range(x.shape[1]):
            s += abs(x[i, j] - t[i, j]) ** 3
        loss[i] = s ** (1.0 / 3.0)


@declared(out("k", T, OC), inp("x", T, C), inp("z", OC, C), scalar("gamma"))
def rbf_kernel(k, x, z, gamma):
    for i in prange(x.shape[0]):
        for m in range(z.shape[0]):
            s = 0.0
            for j in range(x.shape[1]):
                d = x[i, j] - z[m, j]
                s += d * d
            k[i, m] = exp(-gamma * s)


@loss_of_rows
def canberra(loss, x, t):
    for i in prange(x.shape[0]):
        s = 0.0
        for j in range(x.shape[1]):
            s += abs(x[i, j] - t[i, j]) / (abs(x[i, j]) + abs(t[i, j]))
        loss[i] = s


# Convolutions and pooling -------------------------------------------------------------------------------------------


@declared(out("y", B, C), inp("x", B, C + 2), inp("f", 3))
def conv1d(y, x, f):
    for b in prange(y.shape[0]):
        for i in range(y.shape[1]):
            s = 0.0
            for k in range(f.shape[0]):
                s += x[b, i + k] * f[k]
            y[b, i] = s


@declared(out("y", B, C), inp("x", B, C), inp("f", 3))
def conv1d_same(y, x, f):
    n = x.shape[1]
    for b in prange(x.shape[0]):
        for i in range(n):
            s = 0.0
            for k in range(3):
                j = i + k - 1
                if j >= 0 and j < n:
                    s += x[b, j] * f[k]
            y[b, i] = s


@declared(out("y", B, T, C), inp("x", B, T, C), inp("f", C, 4))
def causal_depthwise_conv(y, x, f):
    for b in prange(x.shape[0]):
        for t in range(x.shape[1]):
            for c in range(x.shape[2]):
                s = 0.0
                for k in range(min(f.shape[1], t + 1)):
                    s += f[c, k] * x[b, t - k, c]
                y[b, t, c] = s


@declared(out("y", OC, T, T), inp("x", B, T + 2, T + 2), inp("f", OC, B, 3, 3))
def conv2d(y, x, f):
    for o in prange(y.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                s = 0.0
                for c in range(x.shape[0]):
                    for p in range(3):
                        for q in range(3):
                            s += x[c, i + p, j + q] * f[o, c, p, q]
                y[o, i, j] = s


@declared(out("y", C + 2), inp("x", C), inp("f", 3))
def transposed_conv(y, x, f):
    for i in range(y.shape[0]):
        y[i] = 0.0
    for i in range(x.shape[0]):
        for k in range(3):
            y[i + k] += x[i] * f[k]


@declared(out("y", B, C), inp("x", B, 2 * C))
def max_pool(y, x):
    for b in prange(y.shape[0]):
        for i in range(y.shape[1]):
            m = x[b, 2 * i]
            if x[b, 2 * i + 1] > m:
                m = x[b, 2 * i + 1]
            y[b, i] = m


@declared(out("y", B, C), inp("x", B, 2 * C))
def avg_pool(y, x):
    for b in prange(y.shape[0]):
        for i in range(y.shape[1]):
            y[b, i] = 0.5 * (x[b, 2 * i] + x[b, 2 * i + 1])


@declared(out("y", B, 2 * C), inp("x", B, C))
def upsample_linear(y, x):
    n = x.shape[1]
    for b in prange(x.shape[0]):
        for i in range(n):
            y[b, 2 * i] = x[b, i]
            y[b, 2 * i + 1] = 0.5 * (x[b, i] + x[b, min(i + 1, n - 1)])


@declared(out("y", B), inp("x", B, C))
def global_lp_pool(y, x):
    for b in prange(x.shape[0]):
        s = 0.0
        for i in range(x.shape[1]):
            s += x[b, i] ** 2
        y[b] = math.sqrt(s / x.shape[1])


# Recurrences and polynomials ----------------------------------------------------------------------------------------

sequence = declared(out("y", B, T), inp("x", B, T))


@declared(out("y", B, T), inp("x", B, T), inp("u", 2))
def rnn(y, x, u):
    for b in prange(x.shape[0]):
        h = 0.0
        for t in range(x.shape[1]):
            h = tanh(u[0] * h + u[1] * x[b, t])
            y[b, t] = h


@declared(out("y", B, T), inp("x", B, T), inp("u", 3))
def gru(y, x, u):
    for b in prange(x.shape[0]):
        h = 0.0
        for t in range(x.shape[1]):
            z = 1.0 / (1.0 + exp(-(u[0] * x[b, t] + h)))
            r = 1.0 / (1.0 + exp(-(u[1] * x[b, t] - h)))
            n = tanh(u[2] * x[b, t] + r * h)
            h = (1.0 - z) * n + z * h
            y[b, t] = h


@declared(out("y", B, T), inp("x", B, T), inp("u", 4))
def lstm(y, x, u):
    for b in prange(x.shape[0]):
        h, c = 0.0, 0.0
        for t in range(x.shape[1]):
            f = 1.0 / (1.0 + exp(-(u[0] * x[b, t] + h)))
            i = 1.0 / (1.0 + exp(-(u[1] * x[b, t] + h)))
            o = 1.0 / (1.0 + exp(-(u[2] * x[b, t] + h)))
            c = f * c + i * tanh(u[3] * x[b, t] + h)
            h = o * tanh(c)
            y[b, t] = h


@sequence
def moving_average(y, x):
    for b in prange(x.shape[0]):
        y[b, 0] = x[b, 0]
        for t in range(1, x.shape[1]):
            y[b, t] = 0.9 * y[b, t - 1] + 0.1 * x[b, t]


@sequence
def cumulative_sum(y, x):
    for b in prange(x.shape[0]):
        s = 0.0
        for t in range(x.shape[1]):
            s += x[b, t]
            y[b, t] = s


@sequence
def cumulative_product(y, x):
    for b in prange(x.shape[0]):
        p = 1.0
        for t in range(x.shape[1]):
            p *= x[b, t]
            y[b, t] = p


@sequence
def reversed_returns(y, x):
    for b in prange(x.shape[0]):
        g = 0.0
        for t in range(x.shape[1] - 1, -1, -1):
            g = x[b, t] + 0.99 * g
            y[b, t] = g


@declared(out("y", B, T), inp("x", B, T), inp("a", B, T))
def gated_scan(y, x, a):
    for b in prange(x.shape[0]):
        state = 0.0
        for t in range(x.shape[1]):
            decay = exp(-abs(a[b, t]))
            state = decay * state + (1.0 - decay) * x[b, t]
            y[b, t] = state


@elementwise
def logistic_map(y, x):
    for i in prange(x.shape[0]):
        v = 1.0 / (1.0 + exp(-x[i]))
        for _ in range(3):
            v = 2.5 * v * (1.0 - v)
        y[i] = v


@declared(Y, X, inp("a", 4))
def horner(y, x, a):
    for i in prange(x.shape[0]):
        s = a[3]
        for k in range(2, -1, -1):
            s = s * x[i] + a[k]
        y[i] = s


@declared(Y, X, inp("a", 4))
def power_series(y, x, a):
    for i in prange(x.shape[0]):
        y[i] = 0.0
        for k in range(a.shape[0]):
            y[i] += a[k] * x[i] ** k


@elementwise
def chebyshev_polynomial(y, x):
    for i in prange(x.shape[0]):
        before, now = 1.0, x[i]
        for _ in range(4):
            after = 2.0 * x[i] * now - before
            before = now
            now = after
        y[i] = now


@elementwise
def newton_square_root(y, x):
    for i in prange(x.shape[0]):
        r = 1.0 + x[i] * x[i]
        for _ in range(5):
            r = 0.5 * (r + (1.0 + x[i] * x[i]) / r)
        y[i] = r


# Products, attention, embeddings ------------------------------------------------------------------------------------


@declared(out("y", BT, OC), inp("x", BT, C), inp("w", OC, C), inp("b", OC))
def linear(y, x, w, b):
    for i in prange(x.shape[0]):
        for o in range(w.shape[0]):
            s = b[o]
            for c in range(w.shape[1]):
                s += x[i, c] * w[o, c]
            y[i, o] = s


@declared(out("y", T, T), inp("x", T, C), inp("z", T, C))
def bilinear_scores(y, x, z):
    scale = 1.0 / np.sqrt(x.shape[1])
    for i in prange(x.shape[0]):
        for j in range(z.shape[0]):
            s = 0.0
            for c in range(x.shape[1]):
                s += x[i, c] * z[j, c]
            y[i, j] = s * scale if j <= i else BIG


@declared(out("y", T, HS), inp("q", T, HS), inp("k", T, HS), inp("v", T, HS), out("p", T, T))
def causal_attention(y, q, k, v, p):
    for t in prange(q.shape[0]):
        top = -1e30
        for s in range(t + 1):
            d = 0.0
            for c in range(q.shape[1]):
                d += q[t, c] * k[s, c]
            top = max(top, d)
        total = 0.0
        for s in range(t + 1):
            d = 0.0
            for c in range(q.shape[1]):
                d += q[t, c] * k[s, c]
            total += exp(d - top)
        for c in range(q.shape[1]):
            y[t, c] = 0.0
        for s in range(q.shape[0]):
            p[t, s] = 0.0
        for s in range(t + 1):
            d = 0.0
            for c in range(q.shape[1]):
                d += q[t, c] * k[s, c]
            p[t, s] = exp(d - top) / total
            for c in range(q.shape[1]):
                y[t, c] += exp(d - top) / total * v[s, c]


@declared(out("y", T, HS), inp("q", T, HS), inp("k", T, HS), inp("v", T, HS))
def linear_attention(y, q, k, v):
    for t in prange(q.shape[0]):
        for c in range(v.shape[1]):
            y[t, c] = 0.0
        norm = 1e-6
        for s in range(t + 1):
            d = 0.0
            for c in range(q.shape[1]):
                d += max(q[t, c], 0.0) * max(k[s, c], 0.0)
            norm += d
            for c in range(v.shape[1]):
                y[t, c] += d * v[s, c]
        for c in range(v.shape[1]):
            y[t, c] /= norm


@declared(out("y", T, T), inp("x", T, T))
def alibi_window(y, x):
    for t in prange(x.shape[0]):
        for s in range(x.shape[1]):
            if s > t or t - s > 2:
                y[t, s] = -1e9
            else:
                y[t, s] = x[t, s] - 0.5 * (t - s)


@declared(out("y", BT, C), inp("table", V, C), index("ids", BT, below=V))
def embedding_scaled(y, table, ids):
    for i in prange(ids.shape[0]):
        for c in range(table.shape[1]):
            y[i, c] = table[ids[i], c] * sqrt(table.shape[1])


@declared(out("y", V, C), inp("x", BT, C), index("ids", BT, below=V))
def scatter_add(y, x, ids):
    for v in range(y.shape[0]):
        for c in range(y.shape[1]):
            y[v, c] = 0.0
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            y[ids[i], c] += x[i, c]


@declared(out("y", BT, 2 * C), inp("x", BT, 2 * C))
def rotate(y, x):
    half = x.shape[1] // 2
    for t in prange(x.shape[0]):
        for j in range(half):
            angle = t * 10000.0 ** (-j / half)
            a, b = x[t, j], x[t, j + half]
            y[t, j] = a * cos(angle) - b * sin(angle)
            y[t, j + half] = a * sin(angle) + b * cos(angle)


@declared(Y, X, inp("keep", N))
def dropout(y, x, keep):
    for i in prange(x.shape[0]):
        y[i] = x[i] * ROOT2 if keep[i] > 0.0 else 0.0


# Steps of simulations -----------------------------------------------------------------------------------------------


@declared(out("y", C), inp("x", C))
def heat(y, x):
    n = x.shape[0]
    y[0] = x[0]
    y[n - 1] = x[n - 1]
    for i in prange(1, n - 1):
        y[i] = x[i] + 0.1 * (x[i - 1] - 2.0 * x[i] + x[i + 1])


@declared(out("y", T, C), inp("x", T, C))
def heat_periodic(y, x):
    n, m = x.shape
    for i in prange(n):
        for j in range(m):
            around = x[i - 1, j] + x[(i + 1) % n, j] + x[i, j - 1] + x[i, (j + 1) % m]
            y[i, j] = x[i, j] + 0.2 * (around - 4.0 * x[i, j])


@declared(out("y", C), inp("x", C))
def burgers(y, x):
    n = x.shape[0]
    for i in prange(n):
        left, right = x[(i + n - 1) % n], x[(i + 1) % n]
        y[i] = x[i] - 0.05 * x[i] * (right - left) + 0.1 * (right - 2.0 * x[i] + left)


@declared(out("y", C), inp("x", C))
def upwind(y, x):
    for i in prange(x.shape[0]):
        if x[i] > 0:
            y[i] = x[i] - 0.1 * x[i] * (x[i] - x[i - 1])
        else:
            y[i] = x[i] - 0.1 * x[i] * (x[(i + 1) % x.shape[0]] - x[i])


@declared(out("f", T, 3), inp("pos", T, 3))
def gravity(f, pos):
    for i in prange(pos.shape[0]):
        for k in range(3):
            f[i, k] = 0.0
        for j in range(pos.shape[0]):
            if j != i:
                r2 = 1e-3
                for k in range(3):
                    r2 += (pos[j, k] - pos[i, k]) ** 2
                inv = r2**-1.5
                for k in range(3):
                    f[i, k] += (pos[j, k] - pos[i, k]) * inv


@declared(out("e", T), inp("pos", T, 3))
def lennard_jones(e, pos):
    for i in prange(pos.shape[0]):
        s = 0.0
        for j in range(pos.shape[0]):
            if j != i:
                r2 = 0.1
                for k in range(3):
                    d = pos[i, k] - pos[j, k]
                    r2 = r2 + d * d
                s6 = 1.0 / (r2 * r2 * r2)
                s += 4.0 * (s6 * s6 - s6)
        e[i] = s


@declared(out("y", N, 2), inp("x", N, 2))
def pendulum(y, x):
    for i in prange(x.shape[0]):
        angle, speed = x[i, 0], x[i, 1]
        for _ in range(4):
            speed = speed - 0.1 * sin(angle)
            angle = angle + 0.1 * speed
        y[i, 0] = angle
        y[i, 1] = speed


@declared(out("y", N, 2), inp("x", N, 2))
def predator_prey(y, x):
    for i in prange(x.shape[0]):
        a, b = x[i, 0], x[i, 1]
        for _ in range(3):
            da = a * (1.1 - 0.4 * b)
            db = b * (0.1 * a - 0.4)
            a += 0.05 * da
            b += 0.05 * db
        y[i, 0] = a
        y[i, 1] = b
