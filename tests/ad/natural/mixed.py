"""Kernels of dynamics, credit, statistics and learning as first written, after the others were accepted."""

import numpy as np
from numba import prange

from cpuopt.ops.declaration import B, T, inp, out

from .table import declared


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


@declared(out("var", B), inp("r", B, T))
def value_at_risk(var, r):
    for b in prange(r.shape[0]):
        s = np.sort(r[b])
        k = int(0.05 * r.shape[1])
        var[b] = -s[k]


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
