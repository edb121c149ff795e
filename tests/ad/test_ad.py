"""Generated backward kernels: right, planned as they should be, refused where they must be."""

import json
import os
import re
from pathlib import Path

import kernels as user
import numpy as np
import programs
import pytest
from numba import prange

import cpuopt.kernels  # noqa: F401  (registers)
from cpuopt import ops
from cpuopt.ad import Interface, UnsupportedError, differentiate
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.generated.load import backward
from cpuopt.kernels.toolkit import threads as numba_threads

GOLDEN = Path(__file__).parent / "golden.json"
QUOTE = re.compile(r" *# \d+: .*")
B, N = 5, 6
GENERATED = [name for name, variant in registry.KERNELS if variant == "generated"]


def differences(f, x, w, y, dy, h=1e-6):
    """Central differences of sum(y * dy), element by element."""
    found = []
    for which in (0, 1):
        grad = np.zeros_like((x, w)[which])
        for i in np.ndindex(grad.shape):
            ends = []
            for sign in (1, -1):
                args = [x.copy(), w.copy()]
                args[which][i] += sign * h
                out = y.copy()
                f(*args, out)
                ends.append((out * dy).sum())
            grad[i] = (ends[0] - ends[1]) / (2 * h)
        found.append(grad)
    return found


def data(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s) for s in ((B, N), N, (B, N), (B, N))]


def run(function, x, w, y, dy):
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    function(x, w, y.copy(), dy, dx, dw)
    return dx, dw


@pytest.mark.parametrize("name", user.ALL)
def test_a_kernel_agrees_with_differences_planned_or_recorded(name):
    f, (x, w, y, dy) = user.ALL[name], data()
    want = differences(f, x, w, y, dy)
    plan = run(programs.plain(differentiate(f, ["x", "w"], ["y"])), x, w, y, dy)
    everything = run(programs.plain(differentiate(f, ["x", "w"], ["y"], record_all=True)), x, w, y, dy)
    for a, b, c in zip(plan, everything, want, strict=True):
        assert np.abs(a - b).max() <= 1e-12 * (1 + np.abs(b).max())
        assert np.abs(a - c).max() <= 1e-6 * (1 + np.abs(c).max())


def products(x, y):
    for i in prange(1, x.shape[0]):
        y[i] = x[i] * x[i - 1]


def test_neighbours_under_prange_have_the_right_gradient_and_the_same_bits_in_50_runs():
    made = differentiate(products, ["x"], ["y"])
    compiled = jit.helper(parallel=True)(made.function)
    x, dy = np.random.default_rng(0).standard_normal((2, 1001))
    before, found = numba_threads.get_threads(), []
    try:
        for k in range(50):
            assert numba_threads.set_threads(1 + k % 4) == 1 + k % 4
            dx = np.zeros_like(x)
            compiled(x, np.zeros_like(x), dy, dx)
            found.append(dx)
    finally:
        numba_threads.set_threads(before)
    want = np.zeros_like(x)
    want[1:] += dy[1:] * x[:-1]
    want[:-1] += dy[1:] * x[1:]
    assert np.abs(found[0] - want).max() < 1e-14
    assert all(np.array_equal(dx, found[0]) for dx in found)


def test_the_text_of_every_generated_backward_is_as_it_was():
    made = {n: backward(ops.ALL[n], registry.KERNELS[ops.ALL[n].inverts.name, "vanilla"]) for n in GENERATED}
    made |= {n: differentiate(f, ["x", "w"], ["y"]) for n, f in user.ALL.items()}
    texts = {n: [line for line in m.text.splitlines() if not QUOTE.fullmatch(line)] for n, m in made.items()}
    if "CPUOPT_RENEW" in os.environ:  # then read the difference
        GOLDEN.write_text(json.dumps(texts, indent=0) + "\n")
    assert texts == json.loads(GOLDEN.read_text())


# Refusals -----------------------------------------------------------------------------------------------------------

REFUSALS = {
    "while x[0] > 0:\n        y[0] = 1.0": "While",
    "for i in prange(3):\n        break": "break",
    "return y[0]": "Return",
    "y[0] = x[0:2]": "slice",
    "y[0] = x * 2": "used whole",
    "y[0] = foo(x[0])": "no derivative",
    "n = 3\n    for i in range(n):\n        n = 2": "bound",
    "for i in range(3):\n        i = 2": "written in the loop",
    "for i in range(3):\n        for i in range(2):\n            y[i] = x[i]": "already",
    "for v in x:\n        break\n    else:\n        y[0] = v": "range",
    "if x[0] > 0:\n        s = x[1]\n    y[0] = s": "may not be assigned",
    "x[0] = y[0] if x[0, 1] > 0 else 0.0": "indices elsewhere",
    "y[0] = [x[0]]": "not in the subset",
    "y[0] = max(x[0])": "arguments",
    "with x:\n        pass": "With",
    "y[0] = f(x, y)": "calls itself",
    "y[0] = g(x[0])": "no derivative",
    "r = x\n    for i in range(2):\n        y[i] = r[i]\n        r = y": "may stand for another",
    "for i in range(2):\n        a = np.zeros(i + 1)\n        y[i] = a[0] + x[i]": "size of a local array",
    "x, s = y[0], 1.0": "parameter",
}


@pytest.mark.parametrize("body", REFUSALS)
def test_what_is_outside_the_subset_is_refused_with_its_line(body):
    f = programs.compiled(f"def f(x, y):\n    y[1] = x[1]\n    {body}\n")
    with pytest.raises(UnsupportedError, match=REFUSALS[body]) as e:
        differentiate(f, ["x"], ["y"])
    assert re.search(r":\d+: '", str(e.value))
    assert "; " in str(e.value)  # what to write instead


def test_a_race_in_the_forward_is_refused():
    f = programs.compiled("def f(x, a, y):\n    for i in prange(3):\n        a[0] = x[i]\n        y[i] = a[0] * a[0]\n")
    with pytest.raises(UnsupportedError, match="every iteration writes"):
        differentiate(f, ["x"], ["y"])


def test_an_input_that_the_backward_is_not_given_is_refused():
    f = programs.compiled("def f(x, y):\n    for i in prange(x.shape[0]):\n        y[i] = x[i] * x[i]\n")
    with pytest.raises(UnsupportedError, match="which the declared backward is not given"):
        differentiate(f, ["x"], ["y"], interface=Interface(["y", "dy", "dx"]), hidden=["x"])


def test_a_saved_output_that_is_written_twice_is_refused():
    f = programs.compiled(
        "def f(x, z, y):\n    for i in range(3):\n        z[i] = x[i]\n        z[i] *= x[i]\n        y[i] = z[i]\n"
    )
    with pytest.raises(UnsupportedError, match="more than once"):
        differentiate(f, ["x"], ["y"], saved=["z"], fresh=["z"])


@pytest.mark.parametrize(
    ("first", "second", "once"), [("0", "1", True), ("0", "0", False), ("0", "x.shape[0] - 3", False)]
)
def test_elements_whose_indices_are_other_numbers_are_other_elements(first, second, once):
    f = programs.compiled(
        "def f(x, z, y):\n    for i in range(3):\n"
        f"        z[i, {first}] = x[i]\n        z[i, {second}] = x[i] * x[i]\n        y[i] = z[i, 0] * x[i]\n"
    )
    if not once:
        with pytest.raises(UnsupportedError, match="more than once"):
            differentiate(f, ["x"], ["y"], saved=["z"], fresh=["z"])
        return
    made = differentiate(f, ["x"], ["y"], saved=["z"], fresh=["z"])
    x, z, dx = np.array([0.3, 0.4, 0.5]), np.zeros((3, 2)), np.zeros(3)
    f(x, z, np.zeros(3))
    programs.plain(made)(x, z, np.zeros(3), np.ones(3), dx)
    assert np.allclose(dx, 2 * x)


def test_a_gradient_through_time_runs_backwards():
    """What an iteration saved and the next one reads carries an adjoint, though its value needs no record."""
    f = programs.compiled(
        "def f(x, z, y):\n    for t in range(x.shape[0]):\n"
        "        z[t] = x[t] + (0.9 * z[t - 1] * z[t - 1] if t > 0 else 0.0)\n    y[0] = z[x.shape[0] - 1]\n"
    )
    made = differentiate(f, ["x"], ["y"], saved=["z"], fresh=["z"])
    x, z, dx = np.array([0.3, 0.4, 0.5]), np.zeros(3), np.zeros(3)
    f(x, z, np.zeros(1))
    programs.plain(made)(x, z, np.zeros(1), np.ones(1), dx)
    assert np.allclose(dx, [0.9 * 2 * z[0] * 0.9 * 2 * z[1], 0.9 * 2 * z[1], 1])
