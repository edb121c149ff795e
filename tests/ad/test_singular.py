"""Gradients where a slope is infinite, and the adjoint that multiplies it is 0: 0 stays 0."""

import numpy as np
import programs
import pytest
from numba import prange

from cpuopt import differentiable
from cpuopt.ad import differentiate, finite
from cpuopt.check import dual, worker
from cpuopt.errors import UserError
from cpuopt.kernels.compile import jit
from cpuopt.ops.declaration import N, inp, out

X = np.array([0.0, 0.25, 0.5, 0.0, 0.75])
AT_ZERO = {
    "sqrt": "np.sqrt(x[i])",
    "sqrt of a square": "np.sqrt(x[i] * x[i])",
    "rsqrt": "1.0 / np.sqrt(x[i])",
    "log": "np.log(x[i])",
    "log2": "np.log2(x[i])",
    "log10": "np.log10(x[i])",
    "log1p": "np.log1p(x[i] - 1.0)",
    "asin": "np.arcsin(1.0 - x[i])",
    "acos": "np.arccos(1.0 - x[i])",
    "acosh": "np.arccosh(1.0 + x[i])",
    "atanh": "np.arctanh(1.0 - x[i])",
    "atan2": "np.arctan2(x[i], 2.0 * x[i])",
    "hypot": "np.hypot(x[i], x[i])",
    "cube root": "x[i] ** (1.0 / 3.0)",
    "power": "x[i] ** -1.5",
    "active exponent": "x[i] ** (x[i] - 0.5)",
    "quotient": "(x[i] + 1.0) / x[i]",
    "quotient of zeros": "x[i] / (2.0 * x[i])",
    "remainder": "(x[i] + 1.0) % (1.5 * x[i])",
    "product with a reciprocal": "x[i] * (1.0 / x[i])",
    "power of a reciprocal": "(1.0 / x[i]) ** 2",
    "sine of a reciprocal": "np.sin(1.0 / x[i]) + np.tanh(1.0 / x[i])",
}
OVERFLOWS = {
    "sigmoid": "1.0 / (1.0 + np.exp(x[i] * 4000.0))",
    "softplus": "np.log1p(np.exp(x[i] * 4000.0)) if x[i] < 0.2 else x[i]",
    "softplus, from outside": "e if x[i] < 0.2 else x[i]",
    "tanh": "np.tanh(np.exp(x[i] * 4000.0))",
    "doubly exponential": "np.exp(-np.exp(x[i] * 4000.0))",
    "powers of two": "1.0 / (1.0 + np.exp2(x[i] * 4000.0))",
    "hyperbolic": "1.0 / np.cosh(x[i] * 4000.0)",
}


def left_out(value):
    """A kernel that leaves a value out where x is 0."""
    line = f"v = {value}\n        w = v * v\n        y[i] = w + v if x[i] > 0.0 else 3.0 * x[i]"
    return programs.compiled(f"def f(x, y):\n    for i in prange(x.shape[0]):\n        {line}\n")


def overflowing(value):
    """A kernel in which a number on the way is infinite."""
    line = f"e = np.log(1.0 + np.exp(x[i] * 4000.0))\n        y[i] = {value}"
    return programs.compiled(f"def f(x, y):\n    for i in prange(x.shape[0]):\n        {line}\n")


def gradient(f, record_all=False):
    dx = np.zeros_like(X)
    with np.errstate(all="ignore"):
        programs.plain(differentiate(f, ["x"], ["y"], record_all=record_all))(X, np.zeros_like(X), np.ones_like(X), dx)
    return dx


KERNELS = {n: left_out(value) for n, value in AT_ZERO.items()} | {n: overflowing(v) for n, v in OVERFLOWS.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_an_adjoint_of_zero_stays_zero(name):
    f = KERNELS[name]
    for record_all in (False, True):
        got = gradient(f, record_all)
        assert np.isfinite(got).all()
        for i, direction in enumerate(np.eye(len(X))):
            want, size = dual.slope(f, {"x": X, "y": np.zeros_like(X)}, {"x": direction}, {"y": np.ones_like(X)})
            assert abs(got[i] - want) <= 1e-12 * size, i
    assert name in OVERFLOWS or got[0] == got[3] == 3


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - {"hypot", "softplus"}))
def test_without_the_guards_it_is_not_a_number(name, monkeypatch):
    monkeypatch.setattr(finite, "spared", lambda e, seed: e)
    assert not np.isfinite(gradient(KERNELS[name])).all()


def clamped(s, x, y):
    for i in prange(x.shape[0]):
        rho = np.sqrt(x[i] * x[i] + y[i] * y[i])
        s[i] = rho if rho > 1e-6 else 1e-6


def distance(s, x, y):
    for i in prange(x.shape[0]):
        s[i] = np.sqrt(x[i] * x[i] + y[i] * y[i])


def test_a_gradient_that_is_not_a_number_where_the_forward_has_a_slope_is_refused(uncompiled, monkeypatch):
    declared = out("s", N), inp("x", N), inp("y", N)
    differentiable(*declared)(distance).judge()  # has none at 0
    differentiable(*declared)(clamped).judge()
    monkeypatch.setattr(finite, "spared", lambda e, seed: e)

    def clamped_again(s, x, y):
        for i in prange(x.shape[0]):
            rho = np.sqrt(x[i] * x[i] + y[i] * y[i])
            s[i] = rho if rho > 1e-6 else 1e-6

    op = differentiable(*declared)(clamped_again)
    asked = {
        "op": op.backward.name,
        "variant": "generated",
        "case": {"sizes": {"N": 8}},
        "threads": [1],
        "seed": 0,
    }
    with pytest.raises(UserError, match="disagrees with the slope of its forward"):
        op.judge()
    with pytest.raises(UserError, match="disagrees with the slope of its forward"):
        worker.check(asked, print)  # what `cpuopt check` does


def test_compiled_in_float32_a_sigmoid_has_a_gradient_everywhere():
    def sigmoid(x, y):
        for i in prange(x.shape[0]):
            y[i] = 1 / (1 + np.exp(-x[i]))

    x = np.float32([-1e30, -100, 0, 100, 1e30])
    dx = np.zeros_like(x)
    jit.helper(parallel=True)(differentiate(sigmoid, ["x"], ["y"]).function)(x, np.zeros_like(x), np.ones_like(x), dx)
    assert np.allclose(dx, [0, 0, 0.25, 0, 0], rtol=0, atol=1e-40)
