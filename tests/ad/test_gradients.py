"""Gradients of small kernels against dual numbers: right whatever the kernel says, or refused with its line and reason.

Dual numbers are compared with differences here; the generated backwards of the package in test_generated.py.
"""

import math
import re

import numba
import numpy as np
import programs
import pytest
from numba import prange

from cpuopt.ad import Interface, UnsupportedError, differentiate, emit, finite
from cpuopt.check import dual
from cpuopt.kernels.compile import jit
from cpuopt.kernels.toolkit import threads as numba_threads


@pytest.mark.parametrize("name", dual.SLOPES)
def test_dual_numbers_have_the_slopes_of_differences(name):
    home = "np" if hasattr(np, name) else "math"
    f = programs.function(f"y[0] = {home}.{name}(x[0]) * 2.0")
    for x in {"acosh": (1.3, 2.7)}.get(name.replace("arc", "a"), (0.3, 0.8 if "a" in name[:2] else 1.7)):
        got, size = dual.slope(f, {"x": np.array([x]), "y": np.zeros(1)}, {"x": np.ones(1)}, {"y": np.ones(1)})
        g = getattr(np if home == "np" else math, name)
        assert abs(got - (g(x + 1e-5) - g(x - 1e-5)) / 1e-5) < 1e-7
        assert size == (2 * (1 + g(x) ** 2) if name == "tanh" else abs(got))


def refuses(why, f, wrt=("x",), results=("y",), **how):
    with pytest.raises(UnsupportedError, match=why):
        differentiate(f, [*wrt], [*results], **how)


# What is right ------------------------------------------------------------------------------------------------------

RANGES = ["-1, n", "-n, 0", "1 - n, n", "n - 1, -2, -1", "n - 1, -n - 1, -2", "-3, n, 2", "2, 1", "n, n - 9", "n // 2"]
"""Index -1 is that of the last element: two iterations may write one element."""
BODIES = [
    "for i in range(n):\n        y[i] = x[i] ** 2\n    for i in range(1, n):\n        y[i] *= x[i]",
    # a parallel loop that changes no adjoint has no reverse
    *(f"for i in prange(n):\n        y[i] = x[i] * x[i]\n    for i in prange(n):\n        {line}"
      for line in ("y[i] = y[i]", "y[i] += 1.0", "y[i] = -(-y[i])")),
    *(f"for i in {kind}({bounds}):\n        {line}"
      for bounds in RANGES
      for kind in ("range", *["prange"] * (not bounds.endswith(("-1", "-2", "2"))))  # by steps it may be refused
      for line in ("y[i] = x[i] * x[i]", "y[i] *= x[i]\n        y[i] += x[i] * y[i]")),
    *(f"for i in range(n):\n        y[i] = 3.0 * x[i] ** ({power}) + p[i]"  # at zero too
      for power in ("0", "0.0", "1", "2", "3", "NONE", "i % 3", "p[i]")),
    "for i in range(n):\n        for k in range(n):\n            y[i] += w[k] * x[i] ** k",
    "v = x.reshape(n)\n    for i in range(n):\n        y[i] = 2.0 ** v[i] + (3.0 + v[i]) ** v[i]",
    # what numba reduces
    *(f"s = 0.5\n    for i in prange(n):\n        {step}\n    for i in range(n):\n        y[i] = s"
      for step in ("s += x[i] * x[i]", "s -= x[i]", "s *= x[i] + 3.0", "s = max(s, x[i])")),
    "for i in prange(n):\n        y[i] = x[i] * x[(i + n - 1) % n] * w[i]",
    "for i in prange(n // 2):\n        y[2 * i] = x[i]\n        y[2 * i + 1] = y[2 * i] * x[i]",
    "for i in prange(n):\n        if i == 0:\n            y[0] = x[i] * x[i]",
    "h = 0.1\n    for i in range(n):\n        h = tanh(w[i] * h + x[i])\n        y[i] = h",
    "s = 0.5\n    for i in range(n):\n        y[i] = x[i] + w[i]\n    for i in range(n):\n        y[i] *= y[i] * s\n"
    "        s = s + log(1.0 + y[i] * y[i])\n    for i in range(n):\n        y[i] += s * w[i]",
    "top = -1e30\n    for i in range(n):\n        top = max(top, x[i] * w[i])\n    total = 0.0\n"
    "    for i in range(n):\n        e = exp(x[i] * w[i] - top)\n        total += e\n        y[i] = e\n"
    "    for i in range(n):\n        y[i] /= total",
    "v = 0.0\n    for i in range(n):\n        v += x[i] * x[i]\n    r = 1.0 / sqrt(v / n + 1e-5)\n"
    "    for i in range(n):\n        y[i] = x[i] * r * w[i]",
    "for i in range(n // 2):\n        a, b = x[2 * i], x[2 * i + 1]\n"
    "        y[2 * i] = a * w[2 * i] - b * w[2 * i + 1]\n        y[2 * i + 1] = a * w[2 * i + 1] + b * w[2 * i]",
    "for i in range(len(w)):\n        y[i] = max(w[i], x[0]) * h1(x[i])",
    "for i in range(n):\n        y[i] = (NAN if x[i] > 9.0 else x[i]) * x[i]",
    "for i in range(n):\n        y[i] = x[i] * (1.0 - 2.0 * (((i >> 1) & 1) ^ (i & 1)))",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_gradient_agrees_with_dual_numbers_planned_or_recorded(body):
    wrt, f = ["x"] + ["w"] * ("w[" in body), programs.function(body, "x, w, p, y", NONE=0, NAN=math.nan)
    programs.agrees(f, wrt, w=np.linspace(-1, 1, 6), p=np.array([0, 1, 2, 3, 0, 2]))


SAVED = [
    "for i in range(n):\n        z[i, 0] = x[i]\n        z[i, 1] = x[i] * x[i]\n        y[i] = z[i, 0] * x[i]",
    "for i in range(n):\n        z[i, 0] = HALF\n        y[i] = x[i] * z[i, 0] * HALF",
    # what an iteration saved and the next one reads carries an adjoint, though its value needs no record
    "for t in range(n):\n        z[t, 0] = x[t] + (0.9 * z[t - 1, 0] ** 2 if t > 0 else 0.0)\n    y[0] = z[n - 1, 0]",
]


@pytest.mark.parametrize("body", SAVED)
def test_what_the_forward_saved_is_read(body):
    programs.agrees(programs.function(body, "x, z, y", HALF=0.3), saved=["z"], z=np.full((6, 2), np.nan))


@pytest.mark.parametrize("other", ["0", "x.shape[0] - 6"])
def test_a_saved_output_that_may_be_written_twice_is_refused(other):
    f = programs.function(SAVED[0].replace("z[i, 1]", f"z[i, {other}]"), "x, z, y")
    refuses("more than once", f, saved=["z"], fresh=["z"])


def test_neighbours_under_prange_have_the_same_bits_in_50_runs():
    def products(x, y):
        for i in prange(1, x.shape[0]):
            y[i] = x[i] * x[i - 1]

    compiled = jit.helper(parallel=True)(differentiate(products, ["x"], ["y"]).function)
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


# Where a slope is infinite, and the adjoint that multiplies it is 0: 0 stays 0 ----------------------------------------

LEFT_OUT = "v = {}\n        w = v * v\n        y[i] = w + v if x[i] > 0.0 else 3.0 * x[i]"
OVERFLOWS = "e = np.log(1.0 + np.exp(x[i] * 4000.0))\n        y[i] = {}"
SINGULAR = {name: LEFT_OUT.format(value) for name, value in {
    "sqrt": "np.sqrt(x[i])", "sqrt of a square": "np.sqrt(x[i] * x[i])", "rsqrt": "1.0 / np.sqrt(x[i])",
    "log": "np.log(x[i])", "log2": "np.log2(x[i])", "log10": "np.log10(x[i])", "log1p": "np.log1p(x[i] - 1.0)",
    "asin": "np.arcsin(1.0 - x[i])", "acos": "np.arccos(1.0 - x[i])", "acosh": "np.arccosh(1.0 + x[i])",
    "atanh": "np.arctanh(1.0 - x[i])", "atan2": "np.arctan2(x[i], 2.0 * x[i])", "hypot": "np.hypot(x[i], x[i])",
    "cube root": "x[i] ** (1.0 / 3.0)", "power": "x[i] ** -1.5", "active exponent": "x[i] ** (x[i] - 0.5)",
    "quotient": "(x[i] + 1.0) / x[i]", "quotient of zeros": "x[i] / (2.0 * x[i])",
    "remainder": "(x[i] + 1.0) % (1.5 * x[i])", "product with a reciprocal": "x[i] * (1.0 / x[i])",
    "power of a reciprocal": "(1.0 / x[i]) ** 2", "sine of a reciprocal": "np.sin(1.0 / x[i]) + np.tanh(1.0 / x[i])",
}.items()}  # fmt: skip
SINGULAR |= {name: OVERFLOWS.format(value) for name, value in {
    "sigmoid": "1.0 / (1.0 + np.exp(x[i] * 4000.0))",
    "softplus": "np.log1p(np.exp(x[i] * 4000.0)) if x[i] < 0.2 else x[i]",
    "softplus, from outside": "e if x[i] < 0.2 else x[i]", "tanh": "np.tanh(np.exp(x[i] * 4000.0))",
    "doubly exponential": "np.exp(-np.exp(x[i] * 4000.0))", "powers of two": "1.0 / (1.0 + np.exp2(x[i] * 4000.0))",
    "hyperbolic": "1.0 / np.cosh(x[i] * 4000.0)",
}.items()}  # fmt: skip


@pytest.mark.parametrize("name", SINGULAR)
def test_an_adjoint_of_zero_stays_zero(name, monkeypatch):
    f = programs.function(f"for i in prange(n):\n        {SINGULAR[name]}")
    given = {"x": np.array([0.0, 0.25, 0.5, 0.0, 0.75]), "y": np.zeros(5)}
    programs.agrees(f, **given)
    if name not in ("hypot", "softplus"):  # which have no guard
        monkeypatch.setattr(finite, "spared", lambda e, seed: e)
        with pytest.raises(AssertionError, match="nan"):
            programs.agrees(f, **given)


def test_compiled_in_float32_a_sigmoid_has_a_gradient_everywhere_and_an_index_may_be_below_zero():
    def sigmoid(x, y):
        for i in prange(-5, 0):  # an unsigned index would lie outside of the array
            y[i] = 1 / (1 + np.exp(-x[i]))

    x = np.float32([-1e30, -100, 0, 100, 1e30])
    dx = np.zeros_like(x)
    jit.helper(parallel=True)(differentiate(sigmoid, ["x"], ["y"]).function)(x, np.zeros_like(x), np.ones_like(x), dx)
    assert np.allclose(dx, [0, 0, 0.25, 0, 0], rtol=0, atol=1e-40)


# Names --------------------------------------------------------------------------------------------------------------

NAMED = "for i in prange(n):\n        y[i] = x[i] * x[0] * NAME + tanh(x[i]) * NAME"
LOCALS = ["TWO", "HALF", "SCRATCH", "np", "math", "range", "prange", "chunk", "ONE", "CHUNKS", "ZERO", "part", "int"]
LOCALS += ["len", "j0", "j1", "tape", "tape_top", "tape2", "tape2_top", "dx_parts", "dx_memory", "dy_copy", "el", "ef"]
LOCALS += ["dx", "dy", "dz", "f_backward"]
IN_NUMBA = NAMED.replace("prange", "numba.prange")
GLOBALS = ["ONE", "TWO", "HALF", "ZERO", "CHUNKS", "chunk", "j0", "f_backward", "dx", "len"]


def cube(x):
    return x * x * x


def in_a_closure():
    exp = cube

    def f(x, y):
        y[0] = exp(x[0])

    return f


@pytest.mark.parametrize("f", [
    *(programs.function(f"{name} = 1.5\n    {IN_NUMBA.replace('NAME', name)}", numba=numba) for name in LOCALS),
    *(programs.function(NAMED.replace("NAME", name), **{name: 3.0}) for name in GLOBALS),
    programs.function("for chunk in prange(n):\n        y[chunk] = x[chunk] * x[0]"),
    programs.function("part = x.reshape(n)\n    for j0 in prange(n):\n        y[j0] = part[j0] * part[0]"),
    *(programs.function(f"y[0] = {name}(x[0])", **{name: cube}) for name in ("sin", "log", "float")), in_a_closure(),
    *(programs.function(f"for i in range(n):\n        y[i] = {call}", **outside) for call, outside in (
        ("numpy.exp(x[i])", {"numpy": np}), ("exp(x[i])", {"exp": np.exp}), ("e(x[i])", {"e": math.exp}),
        ("m.exp(x[i]) * m.pi", {"m": math}), ("nb.float64(x[i]) * x[i]", {"nb": numba}),
        ("float64(x[i]) * x[i]", {"float64": numba.float64}),
        ("numba.float64(x[i]) * numpy.pi", {"numba": numba, "numpy": np}),
    )),
])  # fmt: skip
def test_whatever_a_kernel_calls_its_values_and_functions_its_module_computes_its_gradient(f):
    programs.agrees(f, run=lambda made: made.function, within=1e-6)  # numbers of 32 bits


NUMBERS = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("-inf"), np.int32(3), True]


@pytest.mark.parametrize("value", NUMBERS)
def test_a_number_is_written_with_its_type_and_value(value):
    got = eval(emit.number(value), {"np": np})
    assert type(got) is type(value)
    assert np.array_equal(got, value, equal_nan=True)


def test_a_local_may_have_the_name_of_a_flag():
    f = programs.function("for i in range(3):\n        dx_add = 2.0\n        y[i] = dx_add * x[i] * x[i]")
    face = Interface(["dx", "dx_add", "dy", "x"], {"x": ("N",), "y": ("N",)})
    made, dx = differentiate(f, ["x"], ["y"], interface=face, fresh=["y"]), np.ones(3)
    made.function(dx, True, np.ones(3), np.array([1.0, 2.0, 3.0]))
    assert np.allclose(dx, [5, 9, 13])


@pytest.mark.parametrize("name", ["chunk", "j0", "ONE", "tape", "x_parts", "el", "dx", "dy", "dx_add"])
def test_a_parameter_of_such_a_name_is_refused(name):
    f = programs.function(f"y[0] = x[0] * {name}", f"x, y, {name}")
    refuses(rf":1: 'def f.*: the backward needs the name .*'{name}'", f)


# Refusals -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "while x[0] > 0:\n        y[0] = 1.0": "write a for loop over a range",
    "for i in prange(3):\n        break": "break", "return y[0]": "Return", "y[0] = x[0:2]": "slice",
    "y[0] = x * 2": "used whole", "v = y.reshape(2, n // 2)\n    v[0] = x[0]": "give every index",
    "y[0] = foo(x[0])": "no derivative", "y[0] = math.lgamma(x[0])": "write it out",
    "s = np.sort(x)\n    y[0] = s[0]": "pass the order as an index input",
    "y[0] = np.sum(x, axis=0)": "sum has no derivative here", "y[0] = np.sum(x[1:9])": "loop over the indices",
    "y[0] = np.max(x[0], x[1])": r"np\.max is not", "n = 3\n    for i in range(n):\n        n = 2": "bound",
    "for i in range(3):\n        i = 2": "written in the loop",
    "for i in range(3):\n        for i in range(2):\n            y[i] = x[i]": "already",
    "for v in x:\n        break\n    else:\n        y[0] = v": "range",
    "if x[0] > 0:\n        s = x[1]\n    y[0] = s": "may not be assigned",
    "x[0] = y[0] if x[0, 1] > 0 else 0.0": "indices elsewhere", "y[0] = [x[0]]": "not in the subset",
    "y[0] = max(x[0])": "arguments", "with x:\n        pass": "With", "y[0] = f(x, y)": "calls itself",
    "y[0] = g(x[0])": "no derivative",
    "r = x\n    for i in range(2):\n        y[i] = r[i]\n        r = y": "may stand for another",
    "for i in range(2):\n        b = np.zeros(i + 1)\n        y[i] = b[0] + x[i]": "size of a local array",
    "x, s = y[0], 1.0": "parameter",
    # loops that overwrite what is read elsewhere
    "i = 2\n    s = x[i] * x[i]\n    for i in range(n):\n        y[i] = s * x[i]": "'i' is assigned in line",
    "for i in range(n):\n        y[i] = x[i]\n    y[0] = x[i] * x[i]": "'i' is read where it may not be assigned",
    "for x in range(n):\n        y[0] = 1.0": "a parameter or a view",
    "v = x.reshape(n)\n    for v in range(n):\n        y[v] = x[v]": "a parameter or a view",
    "m = y.reshape(n)\n    for i in range(int(y[0])):\n        m[i] = x[i] * x[i]": "the bound reads 'y'",
    "for i in range(0, n, 0):\n        y[i] = x[i]": "step of a range",
    "for i in range(0, n, 1.5):\n        y[i] = x[i]": "step of a range",
    # what is written and differentiated
    "for i in range(n):\n        x[i] *= 2.0\n        y[i] = x[i]": "'x' is written, and is differentiated with",
    "v = x.reshape(n)\n    v[0] = 1.0\n    y[0] = x[1]": "'x' is written, and is differentiated with",
    # what an iteration of a parallel loop leaves to another
    "for i in prange(3):\n        a[i % 2] = x[i]\n        y[i] = a[i % 2] * a[i % 2]": "every iteration writes",
    **{f"for i in prange(n - 1):\n        {body}": f"'{element}' is an element that other .* may write"
       for body, element in (
           ("y[i + 1] = y[0] * y[0]", "y.0."), ("y[i] = x[i] * y[i + 1]", "y.i . 1."), ("y[0] += x[i] * x[i]", "y.0."),
           ("a[0] = x[i]\n        y[i] = a[0] * a[0]", "a.0."),
           ("for j in range(n):\n            y[j] += x[i] * x[j]", "y.j."))},
    **{f"s = 0.5\n    for i in prange(n):\n        {body}": "'s' is carried over .*prange"
       for body in (
           "s = s * 0.5 + x[i]\n        y[i] = s", "s += x[i]\n        y[i] = s",
           "if x[i] > s:\n            s = x[i]\n    y[0] = s", "s += x[i]\n        s *= x[i]\n    y[0] = s",
           "s = x[i] / s\n    y[0] = s", "s = x[i] * x[i]\n    y[0] = s")},
    # a name that may stand for two arrays
    **{f"h, new = np.zeros(n), np.ones(n)\n    for t in range(n):\n        {body}": "'h' may stand for another array"
       for body in (
           "y[t] = h[0] * x[t]\n        h = new\n        new[0] = new[0] * x[t]",
           "if x[t] > 0:\n            h = new\n        y[t] = h[0] * x[t]",
           "y[t] = h[0] * x[t]\n        h = np.ones(2)")},
}  # fmt: skip


@pytest.mark.parametrize("body", REFUSED)
def test_what_is_outside_the_subset_is_refused_with_its_line_and_what_to_write(body):
    f = programs.function(f"y[1] = x[1]\n    {body}", "x, a, y")
    with pytest.raises(UnsupportedError) as e:
        differentiate(f, ["x"], ["y"])
    place, _, said = str(e.value).partition("': ")
    assert re.search(r":\d+: '", place)
    assert re.search(REFUSED[body], said)
    assert "; " in said


@pytest.mark.parametrize("name", ["max", "range", "prange"])
def test_a_builtin_that_stands_for_something_else_is_refused(name):
    body = "y[0] = max(x[0], 1.0)" if name == "max" else f"for i in {name}(3):\n        y[i] = x[i]"
    f = programs.function(body, **{name: lambda *a: a})
    refuses(rf":3: .*{name} is n.*; (write|give)", f)


def test_what_is_asked_for_and_not_there_is_refused():
    f = programs.function("for i in range(n):\n        y[i] = x[i] * x[i]")
    face = Interface(["y", "dy", "dx"])
    refuses("which the declared backward is not given", f, interface=face, hidden=["x"])
    refuses("nothing is written to 'x'", f, results=["x"])
    refuses("'y' is written, and is differentiated", f, ["x", "y"])
