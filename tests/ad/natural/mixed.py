"""Kernels of dynamics, credit, statistics and learning as first written, after the others were accepted."""

import math
from math import cos, exp, log, sin, sqrt, tanh

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, C, N, T, inp, out, scalar

from .table import declared


@njit
def van_der_pol(x, v, mu):
    return v, mu * (1 - x * x) * v - x


@declared(out("x1", N), inp("x0", N), inp("v0", N), scalar("mu"))
def oscillator(x1, x0, v0, mu):
    dt = 0.05
    for i in prange(x0.shape[0]):
        x, v = x0[i], v0[i]
        for _ in range(8):
            dx, dv = van_der_pol(x, v, mu)
            ex, ev = van_der_pol(x + dt * dx, v + dt * dv, mu)
            x += 0.5 * dt * (dx + ex)
            v += 0.5 * dt * (dv + ev)
        x1[i] = x


@declared(out("m", N), inp("h", N), inp("J", N))
def mean_field_ising(m, h, J):
    for i in prange(h.shape[0]):
        s = 0.1
        for it in range(20):
            new = tanh(h[i] + 0.3 * J[i] * s)
            if abs(new - s) < 1e-12:
                break
            s = new
        m[i] = s


@declared(out("rate", B, T), inp("theta", B, T), scalar("k"))
def kuramoto(rate, theta, k):
    batch, n = theta.shape
    for b in prange(batch):
        for i in range(n):
            pull = 0.0
            for j in range(n):
                if j == i:
                    continue
                pull += sin(theta[b, j] - theta[b, i])
            rate[b, i] = k / n * pull


def positive(a):
    return {n: 0.2 + abs(x) for n, x in a.items()}


@declared(out("price", BT), inp("r0", BT), inp("z", BT, C), scalar("kappa"), inputs=positive)
def cir_bond(price, r0, z, kappa):
    for p in prange(z.shape[0]):
        r = r0[p]
        integral = 0.0
        for t in range(z.shape[1]):
            integral += r * 0.1
            r = max(r + kappa * (0.05 - r) * 0.1 + 0.1 * sqrt(max(r, 0.0)) * z[p, t], 1e-6)
        price[p] = exp(-integral)


@declared(out("dd", N), inp("E", N), inp("D", N), inp("sig", N), inputs=positive)
def distance_to_default(dd, E, D, sig):
    for i in prange(E.shape[0]):
        V_ = E[i] + D[i]
        for _ in range(5):
            s = sig[i] * E[i] / V_
            d1 = (log(V_ / D[i]) + 0.5 * s**2) / s
            nd1 = 0.5 * math.erfc(-d1 / sqrt(2))
            nd2 = 0.5 * math.erfc(-(d1 - s) / sqrt(2))
            f = V_ * nd1 - D[i] * nd2 - E[i]
            V_ -= f / max(nd1, 1e-3)
        dd[i] = log(V_ / D[i]) / sig[i]


@declared(out("lrv", B), inp("x", B, T))
def newey_west(lrv, x):
    n = x.shape[1]
    for b in prange(x.shape[0]):
        mu = x[b].mean()
        total = 0.0
        for lag in range(min(4, n)):
            gamma = 0.0
            for t in range(lag, n):
                gamma += (x[b, t] - mu) * (x[b, t - lag] - mu)
            w = 1.0 if lag == 0 else 2.0 * (1 - lag / 4)
            total += w * gamma / n
        lrv[b] = total


@declared(out("P", BT, C), inp("cost", BT, C))
def sinkhorn_rows(P, cost):
    rows, n = cost.shape
    for b in range(rows):
        for j in range(n):
            P[b, j] = np.exp(-cost[b, j])
    for it in range(3):
        for b in range(rows):
            s = 0.0
            for j in range(n):
                s += P[b, j]
            for j in range(n):
                P[b, j] /= s
        for j in range(n):
            s = 0.0
            for b in range(rows):
                s += P[b, j]
            for b in range(rows):
                P[b, j] /= s


@declared(
    out("R", N), inp("theta", N), inp("ratio", N), inputs=lambda a: {n: 0.3 + 0.3 * np.tanh(x) for n, x in a.items()}
)
def fresnel(R, theta, ratio):
    for i in prange(theta.shape[0]):
        c = cos(theta[i])
        s = sin(theta[i]) * ratio[i]
        if s >= 1.0:
            R[i] = 1.0
            continue
        t = math.sqrt(1 - s * s)
        rs = (c - ratio[i] * t) / (c + ratio[i] * t)
        rp = (ratio[i] * c - t) / (ratio[i] * c + t)
        R[i] = 0.5 * (rs**2 + rp**2)


@declared(out("y", N), inp("dose", N), inp("ec50", N), inp("hill", N), inputs=positive)
def hill(y, dose, ec50, hill):
    for i in prange(len(dose)):
        num = dose[i] ** hill[i]
        y[i] = num / (ec50[i] ** hill[i] + num)


@declared(out("out", BT), inp("x", BT), inp("coef", BT, C))
def legendre(out, x, coef):
    n = coef.shape[1]
    for b in prange(x.shape[0]):
        t = math.tanh(x[b])
        P = np.zeros(n + 2)
        P[0] = 1.0
        P[1] = t
        for k in range(1, n):
            P[k + 1] = ((2 * k + 1) * t * P[k] - k * P[k - 1]) / (k + 1)
        acc = 0.0
        for k in range(n):
            acc += coef[b, k] * P[k]
        out[b] = acc


@declared(out("p", BT), inp("x", BT, C), inp("leaf", BT, C))
def soft_tree(p, x, leaf):
    for b in prange(x.shape[0]):
        total = 0.0
        for k in range(x.shape[1]):
            weight = 1.0
            node = 1
            for level in range(3):
                g = 1.0 / (1.0 + exp(-x[b, node % x.shape[1]]))
                right = (k >> level) & 1
                weight *= g if right else 1.0 - g
                node = 2 * node + right
            total += weight * leaf[b, k]
        p[b] = total


@njit
def alpha_n(v):
    return 0.01 * (v + 55.0) / (1.0 - exp(-(v + 55.0) / 10.0))


@njit
def beta_n(v):
    return 0.125 * exp(-(v + 65) / 80)


@declared(out("v1", N), inp("dv", N), inp("n0", N), scalar("current"))
def hodgkin_huxley(v1, dv, n0, current):
    for i in prange(dv.shape[0]):
        v = -65.0 + dv[i]
        n = 1.0 / (1.0 + math.exp(-n0[i]))
        for step in range(10):
            n += 0.05 * (alpha_n(v) * (1 - n) - beta_n(v) * n)
            v += 0.05 * (current - 36.0 * n**4 * (v + 77.0) - 0.3 * (v + 54.4))
        v1[i] = v / 65.0


@declared(
    out("out", BT, C),
    inp("logits", BT, C),
    inp("noise", BT, C),
    scalar("tau"),
    inputs=lambda a: {"logits": a["logits"], "noise": 1 / (1 + np.exp(-a["noise"]))},
)
def gumbel_softmax(out, logits, noise, tau):
    for b in prange(logits.shape[0]):
        y = np.empty(logits.shape[1])
        for j in range(logits.shape[1]):
            y[j] = (logits[b, j] - log(-log(noise[b, j]))) / (0.5 + abs(tau))
        m = np.max(y)
        z = 0.0
        for j in range(len(y)):
            y[j] = exp(y[j] - m)
            z += y[j]
        for j in range(len(y)):
            out[b, j] = y[j] / z


@declared(out("var", B), inp("r", B, T))
def value_at_risk(var, r):
    for b in prange(r.shape[0]):
        s = np.sort(r[b])
        k = int(0.05 * r.shape[1])
        var[b] = -s[k]


@declared(out("f", BT, C), inp("x", BT, C), inp("q", C))
def coulomb_1d(f, x, q):
    eps = 1e-2
    for b in prange(x.shape[0]):
        f[b, :] = 0.0
        for i in range(x.shape[1]):
            for j in range(i + 1, x.shape[1]):
                d = x[b, i] - x[b, j]
                w = q[i] * q[j] * d / (d * d + eps) ** 1.5
                f[b, i] += w
                f[b, j] -= w


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
