"""Kernels of finance and statistics as first written."""

import math
from math import erf, exp, log, sqrt

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, C, N, T, V, inp, out, scalar, state

from .table import declared


@njit
def norm_cdf(x):
    return 0.5 * (1.0 + erf(x / sqrt(2.0)))


@njit
def norm_pdf(x):
    return exp(-0.5 * x * x) / sqrt(2.0 * math.pi)


def market(a):
    return {n: 0.2 + abs(x) for n, x in a.items()}


@declared(out("price", N), inp("S", N), inp("K", N), inp("sigma", N), inp("tau", N), scalar("r"), inputs=market)
def black_scholes(price, S, K, sigma, tau, r):
    for i in prange(S.shape[0]):
        d1 = (log(S[i] / K[i]) + (r + 0.5 * sigma[i] ** 2) * tau[i]) / (sigma[i] * sqrt(tau[i]))
        d2 = d1 - sigma[i] * sqrt(tau[i])
        price[i] = S[i] * norm_cdf(d1) - K[i] * exp(-r * tau[i]) * norm_cdf(d2)


@declared(out("vega", N), inp("S", N), inp("K", N), inp("sigma", N), inputs=market)
def vega(vega, S, K, sigma):
    for i in prange(len(S)):
        d1 = np.log(S[i] / K[i]) / sigma[i] + 0.5 * sigma[i]
        vega[i] = S[i] * norm_pdf(d1)


@declared(out("price", N), inp("F", N), inp("K", N), inp("vol", N))
def bachelier(price, F, K, vol):
    for i in prange(F.shape[0]):
        s = 0.1 + abs(vol[i])
        d = (F[i] - K[i]) / s
        price[i] = (F[i] - K[i]) * norm_cdf(d) + s * norm_pdf(d)


@declared(out("price", BT), inp("S0", BT), inp("vol", BT))
def binomial_tree(price, S0, vol):
    steps = 6
    for p in prange(S0.shape[0]):
        u = math.exp(0.1 * (0.5 + abs(vol[p])))
        d = 1.0 / u
        q = (1.001 - d) / (u - d)
        v = np.zeros(steps + 1)
        for k in range(steps + 1):
            v[k] = max(S0[p] * u ** (2 * k - steps) - 1.0, 0.0)
        for n in range(steps, 0, -1):
            for k in range(n):
                v[k] = (q * v[k + 1] + (1.0 - q) * v[k]) / 1.001
        price[p] = v[0]


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


@declared(out("payoff", BT), inp("z", BT, T), inp("sigma", 1))
def asian_option(payoff, z, sigma):
    dt = 1.0 / z.shape[1]
    for p in prange(z.shape[0]):
        s = 1.0
        mean = 0.0
        for t in range(z.shape[1]):
            s *= exp(-0.5 * sigma[0] * sigma[0] * dt + sigma[0] * sqrt(dt) * z[p, t])
            mean += s
        payoff[p] = max(mean / z.shape[1] - 1.0, 0.0)


@declared(out("payoff", BT), inp("z", BT, T), inp("sigma", 1))
def barrier_option(payoff, z, sigma):
    for p in prange(z.shape[0]):
        s = 1.0
        alive = True
        for t in range(z.shape[1]):
            s = s * exp(0.3 * sigma[0] * z[p, t])
            if s > 1.5:
                alive = False
                break
        if alive:
            payoff[p] = max(s - 0.9, 0.0)
        else:
            payoff[p] = 0.1 * s


@declared(out("end", BT, 2), inp("z1", BT, T), inp("z2", BT, T), inp("theta", 4))
def heston_path(end, z1, z2, theta):
    kappa, mean, xi, rho = theta[0], theta[1], theta[2], theta[3]
    for p in prange(z1.shape[0]):
        s, v = 0.0, 0.3
        for t in range(z1.shape[1]):
            vp = max(v, 0.0)
            w = math.tanh(rho) * z1[p, t] + sqrt(1 - math.tanh(rho) ** 2) * z2[p, t]
            s, v = s - 0.5 * vp * 0.1 + sqrt(vp * 0.1 + 1e-6) * z1[p, t], v + kappa * (mean - vp) * 0.1 + xi * 0.1 * w
        end[p, 0] = s
        end[p, 1] = v


@declared(out("price", BT), inp("coupon", BT), inp("y", BT))
def bond_price(price, coupon, y):
    for i in prange(y.shape[0]):
        rate = 0.05 * np.abs(y[i])
        price[i] = 0.0
        for t in range(1, 11):
            price[i] += coupon[i] / (1.0 + rate) ** t
        price[i] += 1.0 / (1.0 + rate) ** 10


@declared(out("npv", BT), inp("cash", BT, T), inp("rate", BT), inp("times", T), inputs=market)
def npv_irregular(npv, cash, rate, times):
    for i in prange(cash.shape[0]):
        total = 0.0
        for k in range(cash.shape[1]):
            total += cash[i, k] * (1.0 + rate[i]) ** (-times[k])
        npv[i] = total


@declared(out("irr", BT), inp("cash", BT, T), inputs=market)
def internal_rate_of_return(irr, cash):
    for i in prange(cash.shape[0]):
        r = 0.1
        for it in range(30):
            f = -3.0
            df = 0.0
            for k in range(cash.shape[1]):
                f += cash[i, k] / (1 + r) ** (k + 1)
                df -= (k + 1) * cash[i, k] / (1 + r) ** (k + 2)
            if abs(f) < 1e-14:
                break
            r -= f / df
        irr[i] = r


@declared(out("nll", BT), inp("ret", BT, T), inp("w", 3))
def garch_likelihood(nll, ret, w):
    omega, alpha, beta = 0.1 + w[0] ** 2, 0.1 * w[1] ** 2, 0.1 * w[2] ** 2
    for i in prange(ret.shape[0]):
        h = 1.0
        s = 0.0
        for t in range(ret.shape[1]):
            if t > 0:
                h = omega + alpha * ret[i, t - 1] ** 2 + beta * h
            s += 0.5 * (math.log(2 * np.pi * h) + ret[i, t] ** 2 / h)
        nll[i] = s


@declared(out("vol", B, T), inp("ret", B, T), inp("lam", 1))
def ewma_volatility(vol, ret, lam):
    L = 1.0 / (1.0 + np.exp(-lam[0]))
    for b in prange(ret.shape[0]):
        var = ret[b, 0] ** 2 + 1e-3
        for t in range(ret.shape[1]):
            r = ret[b, t]
            var = L * var + (1 - L) * r * r
            vol[b, t] = np.sqrt(var)


@declared(out("sharpe", BT), inp("ret", BT, T))
def sharpe_ratio(sharpe, ret):
    n = ret.shape[1]
    for i in prange(ret.shape[0]):
        r = ret[i]
        mean = 0.0
        for t in range(n):
            mean += r[t]
        mean /= n
        var = 0.0
        for t in range(n):
            var += (r[t] - mean) ** 2
        sharpe[i] = mean / math.sqrt(var / (n - 1) + 1e-8)


@declared(out("risk", BT), inp("w", BT, C), inp("cov", C, C))
def portfolio_variance(risk, w, cov):
    n = w.shape[1]
    for p in prange(w.shape[0]):
        row = w[p]
        total = 0.0
        for i in range(n):
            ci = cov[i]
            for j in range(n):
                total += row[i] * ci[j] * row[j]
        risk[p] = total


@declared(out("w", N), inp("k", N), inp("p", 5))
def svi_smile(w, k, p):
    a, b, rho, m, s = p[0], p[1], math.tanh(p[2]), p[3], p[4]
    for i in prange(k.shape[0]):
        x = k[i] - m
        w[i] = a + b * (rho * x + math.sqrt(x * x + s * s))


@declared(out("vol", N), inp("F", N), inp("K", N), inp("beta", 1), inputs=market)
def sabr_leading_order(vol, F, K, beta):
    nu, rho, alpha = 0.4, -0.3, 0.2
    for i in prange(F.shape[0]):
        mid = (F[i] * K[i]) ** ((1 - beta[0]) / 2)
        z = nu / alpha * mid * log(F[i] / K[i] + 1e-3)
        chi = log((sqrt(1 - 2 * rho * z + z * z) + z - rho) / (1 - rho))
        if abs(z) < 1e-8:
            vol[i] = alpha / mid
        else:
            vol[i] = alpha / mid * z / chi


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


@declared(out("dd", B), inp("ret", B, T))
def max_drawdown(dd, ret):
    for b in prange(ret.shape[0]):
        wealth = 1.0
        peak = 1.0
        worst = 0.0
        for t in range(ret.shape[1]):
            wealth *= 1.0 + 0.1 * ret[b, t]
            peak = max(peak, wealth)
            worst = max(worst, (peak - wealth) / peak)
        dd[b] = worst


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


@declared(state("weights", C), inp("returns", T, C))
def exponentiated_gradient(weights, returns):
    n = weights.shape[0]
    for t in range(returns.shape[0]):
        total = 0.0
        for i in range(n):
            weights[i] *= np.exp(0.05 * returns[t, i])
            total += weights[i] ** 2
        for i in range(n):
            weights[i] /= math.sqrt(total + 1e-3)


@declared(out("var", 1), inp("loss", V), inp("q", 1))
def cvar_objective(var, loss, q):
    tail = 0.0
    for i in range(loss.shape[0]):
        if loss[i] <= q[0]:
            continue
        tail += loss[i] - q[0]
    var[0] = q[0] + tail / (0.05 * loss.shape[0])


@declared(out("logpdf", N), inp("x", N), inp("nu", 1), inputs=market)
def student_t(logpdf, x, nu):
    n = 2.0 + nu[0]
    const = math.lgamma((n + 1) / 2) - math.lgamma(n / 2)
    for i in prange(x.shape[0]):
        logpdf[i] = const - 0.5 * log(n * math.pi) - (n + 1) / 2 * np.log1p(x[i] ** 2 / n)
