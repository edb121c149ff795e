"""Kernels of physics and numerics as first written."""

import math

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import C, N, T, inp, out, state

from .table import declared

G = 9.81


@declared(out("u", T, C), inp("u0", C), inp("alpha", 1))
def heat_explicit(u, u0, alpha):
    nt, nx = u.shape
    for i in range(nx):
        u[0, i] = u0[i]
    for t in range(nt - 1):
        u[t + 1, 0] = 0.0
        u[t + 1, nx - 1] = 0.0
        for i in range(1, nx - 1):
            u[t + 1, i] = u[t, i] + alpha[0] * (u[t, i + 1] - 2 * u[t, i] + u[t, i - 1])


@declared(out("end", 2), inp("u0", C), inp("c", 1))
def wave_equation(end, u0, c):
    n = len(u0)
    prev = np.zeros(n)
    cur = np.zeros(n)
    for i in range(n):
        prev[i] = u0[i]
        cur[i] = u0[i]
    for t in range(4):
        for i in range(1, n - 1):
            nxt = 2 * cur[i] - prev[i] + (0.1 * c[0]) ** 2 * (cur[i + 1] - 2 * cur[i] + cur[i - 1])
            prev[i] = nxt
        for i in range(n):
            cur[i], prev[i] = prev[i], cur[i]
    end[0] = cur[n // 2]
    end[1] = prev[1]


@declared(out("E", N), inp("M", N))
def kepler_while(E, M):
    for i in prange(M.shape[0]):
        x = M[i]
        err = 1.0
        while err > 1e-12:
            step = (x - 0.3 * np.sin(x) - M[i]) / (1.0 - 0.3 * np.cos(x))
            x -= step
            err = abs(step)
        E[i] = x


def positive_definite(a):
    return {"a": a["a"] @ a["a"].swapaxes(-1, -2) + len(a["a"]) * np.eye(a["a"].shape[-1])}


@declared(out("x", C), inp("a", C, C), inp("b", C), inputs=positive_definite)
def gauss_elimination(x, a, b):
    n = b.shape[0]
    m = np.zeros((n, n + 1))
    for i in range(n):
        for j in range(n):
            m[i, j] = a[i, j]
        m[i, n] = b[i]
    for k in range(n):
        for i in range(k + 1, n):
            f = m[i, k] / m[k, k]
            for j in range(k, n + 1):
                m[i, j] -= f * m[k, j]
    for i in range(n - 1, -1, -1):
        s = m[i, n]
        for j in range(i + 1, n):
            s -= m[i, j] * x[j]
        x[i] = s / m[i, i]


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
