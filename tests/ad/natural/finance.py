"""Kernels of finance and statistics as first written."""

import math
from math import exp, log, sqrt

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, N, T, inp, out

from .table import declared


@njit
def norm_pdf(x):
    return exp(-0.5 * x * x) / sqrt(2.0 * math.pi)


def market(a):
    return {n: 0.2 + abs(x) for n, x in a.items()}


@declared(out("vega", N), inp("S", N), inp("K", N), inp("sigma", N), inputs=market)
def vega(vega, S, K, sigma):
    for i in prange(len(S)):
        d1 = np.log(S[i] / K[i]) / sigma[i] + 0.5 * sigma[i]
        vega[i] = S[i] * norm_pdf(d1)


@declared(out("price", BT), inp("S0", BT), inp("vol", BT), inputs=market)
def american_put(price, S0, vol):
    steps = 5
    for p in prange(S0.shape[0]):
        u = math.exp(0.2 * vol[p])
        d = 1 / u
        q = (1.001 - d) / (u - d)
        v = np.empty(steps + 1)
        for k in range(steps + 1):
            v[k] = max(1.0 - S0[p] * u**k * d ** (steps - k), 0.0)
        for n in range(steps - 1, -1, -1):
            for k in range(n + 1):
                hold = (q * v[k + 1] + (1 - q) * v[k]) / 1.001
                exercise = 1.0 - S0[p] * u**k * d ** (n - k)
                v[k] = max(hold, exercise)
        price[p] = v[0]


@declared(out("npv", BT), inp("cash", BT, T), inp("rate", BT), inp("times", T), inputs=market)
def npv_irregular(npv, cash, rate, times):
    for i in prange(cash.shape[0]):
        total = 0.0
        for k in range(cash.shape[1]):
            total += cash[i, k] * (1.0 + rate[i]) ** (-times[k])
        npv[i] = total


@declared(out("df", N), inp("t", N), inp("times", 6), inp("rates", 6))
def curve_interpolation(df, t, times, rates):
    knots = times.shape[0]
    for i in prange(t.shape[0]):
        x = abs(t[i]) * 3.0
        k = 0
        for j in range(knots - 1):
            if x < j + 1:
                break
            k = j
        f = x - k
        r = rates[k] * (1 - f) + rates[k + 1] * f
        df[i] = math.exp(-r * x * 0.01)


@declared(out("pnl", B), inp("pos", B, T), inp("ret", B, T))
def pnl_with_costs(pnl, pos, ret):
    for b in prange(pos.shape[0]):
        pnl[b] = 0.0
        last = 0.0
        for t in range(pos.shape[1]):
            trade = pos[b, t] - last
            cost = 0.01 * np.sign(trade) * trade + 0.001 * math.fabs(trade) ** 1.5
            pnl[b] += last * ret[b, t] - cost
            last = pos[b, t]


@declared(out("logpdf", N), inp("x", N), inp("nu", 1), inputs=market)
def student_t(logpdf, x, nu):
    n = 2.0 + nu[0]
    const = math.lgamma((n + 1) / 2) - math.lgamma(n / 2)
    for i in prange(x.shape[0]):
        logpdf[i] = const - 0.5 * log(n * math.pi) - (n + 1) / 2 * np.log1p(x[i] ** 2 / n)
