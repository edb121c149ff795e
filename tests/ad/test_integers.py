"""Integers of kernels are Python's: the variable of a prange is signed, and what int64 does not hold is an error."""

import math

import numpy as np
import pytest
from numba import prange

from cpuopt import differentiable, kernel, ops
from cpuopt.check.check import check
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.ops.declaration import N, index, inp, out, symbols

R, K = symbols("R K")


def negated(v):
    return -v


def every_operator(s, x, t):
    for i in prange(x.shape[0]):
        k = i
        s[i, 0] = x[i, 0] * (-i) + x[-i, 0] + t[-k] + negated(i) + (i - i * i) + abs(-i) % 7
        for j in prange(x.shape[1]):
            s[i, j] = x[i, j] * (i - j) + (0.0 if j else s[i, 0])


def test_an_index_of_a_parallel_loop_is_signed_in_both_kernels():
    op = differentiable(out("s", R, K), inp("x", R, K), inp("t", R))(every_operator)
    assert {r.verdict for r in op.check()} == {"right"}


def test_so_it_is_in_a_kernel_that_is_no_differentiable_op():
    def helped(out, inp):
        for i in prange(inp.shape[0]):
            out[i] = max(inp[i] if -i + 1 < 2 else np.float32(7), np.float32(0))

    compiled = kernel(ops.relu_forward, "signed")(helped)
    assert compiled._compiler.pipeline_class is jit.PythonIntegers
    result = check(registry.KERNELS["relu_forward", "signed"], {"N": 37})
    assert result.verdict == "right", result.reason


def mirrored(s, x):
    for i in prange(x.shape[0]):
        s[i] = x[i] * (-i)


def test_the_compiled_kernels_are_compared_with_their_text_before_the_first_use(monkeypatch):
    """The mutant: numba's own integers, with which the forward is 1.8e19 times its input, and the gradient right."""
    monkeypatch.setattr(jit, "PYTHON_INTEGERS", {})
    monkeypatch.setattr(jit, "integers", lambda function: {})
    op = differentiable(out("s", N), inp("x", N))(mirrored)
    with pytest.raises(UserError, match=r"mirrored_forward\[vanilla\]: compiled, it disagrees with its text in Python"):
        op.judge()
    assert not op.judged


def hashed(s, x):
    for i in prange(x.shape[0]):
        s[i] = x[i] * (((i + 7) * 6364136223846793005) % 1000)


def grown(s, x):
    for i in range(x.shape[0]):
        h = 1
        for k in reversed(range(4)):
            h *= 10 ** (5 + k)
        s[i] = x[i] * h


def looked_up(s, x, n):
    for i in prange(x.shape[0]):
        s[i] = x[i] * (n[i] * 4000037 * 1000003 // 7)


def shifted(s, x):
    for i in range(x.shape[0]):
        s[i] = x[i] * (1 << (i + 60))


def in_range(s, x, n):
    for i in prange(x.shape[0]):
        bits = (np.uint64(i) * np.uint64(11400714819323198485)) >> np.uint64(40)
        s[i] = x[i] * (n[i] * 40037 * 1003 % 17) + np.float32(bits) + math.floor(x[i]) * (i - n[i]) // 5


INDEX = index("n", N, below=9_000_000)


@pytest.mark.parametrize("function", [hashed, grown, looked_up, shifted])
def test_an_integer_beyond_int64_is_refused_with_its_line(uncompiled, function):
    given = [out("s", N), inp("x", N), INDEX][: function.__code__.co_argcount]
    with pytest.raises(UserError, match=r"test_integers.py:\d+: '.*[*<].*': an integer is .*, beyond int64; .*uint64"):
        differentiable(*given)(function).judge()


def test_integers_that_int64_holds_are_right():
    op = differentiable(out("s", N), inp("x", N), INDEX)(in_range)
    assert {r.verdict for r in op.check()} == {"right"}
