"""What is accepted compiles: the forms that numba lacks are compiled as the plain loops that they were read as."""

import inspect
import math

import numpy as np
import pytest
from numba import njit, prange

from cpuopt import differentiable
from cpuopt.errors import UserError
from cpuopt.ops.declaration import N, inp, out, state, symbols

P, Q = symbols("P Q")


def halved(v):
    return 0.5 * v


def sigmoid(v):
    if v > 0.0:
        return 1.0 / (1.0 + math.exp(-v))
    return 1.0 - 1.0 / (1.0 + math.exp(v))


@njit
def through(v):
    return np.clip(halved(v), -0.7, 0.7)


def normalized(row, made):
    length = math.sqrt(np.dot(row, row) + 1e-3)
    for j in range(row.shape[0]):
        made[j] = row[j] / length


def every_form(y, x, w):
    n = x.shape[-1]
    for i in prange(x.shape[0]):
        unit, total = np.empty(n), np.zeros(n)
        normalized(x[i], unit)
        for j in reversed(range(1, n)):
            total[j - 1] = total[j] + through(unit[j]) * sigmoid(w[j])
        y[i] = 0.0
        for j in range(n):
            y[i, j] = total[j] * x[i].dot(w)


def test_forms_that_numba_lacks_compile_and_are_right():
    op = differentiable(out("y", P, Q), inp("x", P, Q), inp("w", Q))(every_form)
    op.judge()
    assert op.judged


def test_a_parallel_loop_makes_its_arrays_in_each_iteration_and_the_backward_quotes_what_was_written():
    op = differentiable(out("y", P, Q), inp("x", P, Q), inp("w", Q))(every_form)
    code = inspect.getsource(op.compiled)
    assert "    unit = np.empty(x.shape[1], np.float64)" in code
    assert "x.shape[0]," not in code
    assert "total[j - 1] = total[j] + through(unit[j]) * sigmoid(w[j])" in op.generated.text


def clipped(h, x):
    for i in range(x.shape[0]):
        h[i] = np.clip(0.5 * h[i] + x[i], -1.0, 1.0)


def test_so_does_an_update_in_place():
    op = differentiable(state("h", N), inp("x", N))(clipped)
    assert {r.verdict for r in op.check()} == {"right"}


def plain(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = inp[i] * inp[i]


def test_what_numba_takes_is_compiled_as_it_was_written():
    op = differentiable(out("out", N), inp("inp", N))(plain)
    assert op.compiled is plain


def another(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = inp[i] * inp[i] * inp[i]


def test_what_numba_refuses_is_an_error_with_its_line(monkeypatch):
    op = differentiable(out("out", N), inp("inp", N))(another)
    monkeypatch.setitem(op.compiled.__globals__, "prange", object())
    with pytest.raises(UserError, match=r"another_forward\[vanilla\] .* compile: .* \(line \d+: for i in prange"):
        op.judge()
    assert not op.judged


def column(y, x0):
    n = x0.shape[0]
    x = x0.copy()
    for i in range(n):
        for k in range(2):
            x[i, k] = x[i, k] * x[i, k]
        y[i] = x[i, 0] + x[i, 1]


def test_a_copy_has_the_axes_that_are_declared():
    op = differentiable(out("y", P), inp("x0", P, 2))(column)
    assert {r.verdict for r in op.check()} == {"right"}
