"""Whatever a kernel calls its values and functions, its gradient is right or it is refused."""

import math

import numba
import numpy as np
import programs
import pytest

from cpuopt.ad import Interface, UnsupportedError, differentiate, emit


def gradients(body, outside=(), interface=None):
    """The gradient of sum(y) as the generated module gives it, and by differences."""
    code = f"def f(x, y):\n    {body}\n"
    f = programs.compiled(code, {**programs.NAMES, **dict(outside)})
    made = differentiate(f, ["x"], ["y"], interface=interface)
    x, dx, want = np.array([0.5, 1.5, 2.5]), np.zeros(3), np.zeros(3)
    made.function(x, np.zeros(3), np.ones(3), dx)
    for i in range(3):
        ends = []
        for h in (1e-6, -1e-6):
            at, y = x.copy(), np.zeros(3)
            at[i] += h
            f(at, y)
            ends.append(y.sum())
        want[i] = (ends[0] - ends[1]) / 2e-6
    return dx, want


SQUARES = "for i in prange(3):\n        y[i] = x[i] * x[0] * NAME + tanh(x[i]) * NAME"
CLASHES = [
    *programs.CLASHES,
    "TWO",
    "HALF",
    "SCRATCH",
    "dx_memory",
    "np",
    "math",
    "range",
    "prange",
    "ef",
    "dy",
    "tape2_top",
]


@pytest.mark.parametrize("name", CLASHES)
def test_a_local_may_have_any_name(name):
    body = SQUARES.replace("prange", "numba.prange").replace("tanh", "sin").replace("NAME", name)
    got, want = gradients(f"{name} = 1.5\n    {body}", {"numba": numba})
    assert np.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", ["ONE", "TWO", "HALF", "ZERO", "CHUNKS", "chunk", "j0", "f_backward", "dx", "len"])
def test_a_global_may_have_any_name(name):
    got, want = gradients(SQUARES.replace("NAME", name), {name: 3.0})
    assert np.allclose(got, want, atol=1e-5)


def test_a_loop_variable_and_a_view_may_have_any_name():
    got, want = gradients("for chunk in prange(3):\n        y[chunk] = x[chunk] * x[0]")
    assert np.allclose(got, want, atol=1e-5)
    got, want = gradients("part = x.reshape(3)\n    for j0 in prange(3):\n        y[j0] = part[j0] * part[0]")
    assert np.allclose(got, want, atol=1e-5)


def test_a_local_may_have_the_name_of_a_flag():
    f = programs.compiled(
        "def f(x, y):\n    for i in range(3):\n        dx_add = 2.0\n        y[i] = dx_add * x[i] * x[i]\n"
    )
    face = Interface(["dx", "dx_add", "dy", "x"], {"x": ("N",), "y": ("N",)})
    made, dx = differentiate(f, ["x"], ["y"], interface=face, fresh=["y"]), np.ones(3)
    made.function(dx, True, np.ones(3), np.array([1.0, 2.0, 3.0]))
    assert np.allclose(dx, [5, 9, 13])


@pytest.mark.parametrize("name", ["chunk", "j0", "ONE", "tape", "x_parts", "el"])
def test_a_parameter_of_such_a_name_is_refused(name):
    f = programs.compiled(f"def f(x, y, {name}):\n    y[0] = x[0] * {name}\n")
    with pytest.raises(UnsupportedError, match=rf":1: 'def f.*: the backward needs the name of the parameter '{name}'"):
        differentiate(f, ["x"], ["y"])


# Functions ----------------------------------------------------------------------------------------------------------


def cube(x):
    return x * x * x


MINE = {"sin": cube, "log": cube, "max": lambda a, b: a, "float": cube, "range": lambda n: [0], "prange": lambda n: [0]}


@pytest.mark.parametrize("name", [n for n, f in MINE.items() if f is cube])
def test_a_function_of_ones_own_is_inlined_whatever_its_name(name):
    f = programs.compiled(f"def f(x, y):\n    y[0] = {name}(x[0])\n", {**programs.NAMES, name: cube})
    dx = np.zeros(1)
    programs.plain(differentiate(f, ["x"], ["y"]))(np.array([0.5]), np.zeros(1), np.ones(1), dx)
    assert dx[0] == 0.75


@pytest.mark.parametrize("name", [n for n, f in MINE.items() if f is not cube])
def test_what_is_no_function_of_ones_own_is_refused_whatever_its_name(name):
    call = {"max": "y[0] = max(x[0], 1.0)"}.get(name, f"y[0] = {name}(x[0])")
    body = f"for i in {name}(3):\n        y[i] = x[i]" if name.endswith("range") else call
    f = programs.compiled(f"def f(x, y):\n    {body}\n", {**programs.NAMES, name: MINE[name]})
    with pytest.raises(UnsupportedError, match=rf":2: .*{name} is n.*; (write|give)"):
        differentiate(f, ["x"], ["y"])


def test_a_function_of_ones_own_in_a_closure_is_inlined():
    def outer():
        exp = cube

        def f(x, y):
            y[0] = exp(x[0])

        return f

    dx = np.zeros(1)
    programs.plain(differentiate(outer(), ["x"], ["y"]))(np.array([0.5]), np.zeros(1), np.ones(1), dx)
    assert dx[0] == 0.75


def test_the_maximum_of_an_array_is_not_that_of_two_numbers():
    f = programs.compiled("def f(x, y):\n    y[0] = np.max(x[0], x[1])\n")
    with pytest.raises(UnsupportedError, match=r"np\.max is not"):
        differentiate(f, ["x"], ["y"])


@pytest.mark.parametrize(
    ("call", "outside"),
    [
        ("numpy.exp(x[i])", {"numpy": np}),
        ("exp(x[i])", {"exp": np.exp}),
        ("e(x[i])", {"e": math.exp}),
        ("m.exp(x[i]) * m.pi", {"m": math}),
        ("nb.float64(x[i]) * x[i]", {"nb": numba}),
        ("float64(x[i]) * x[i]", {"float64": numba.float64}),
        ("numba.float64(x[i]) * numpy.pi", {"numba": numba, "numpy": np}),
    ],
)
def test_however_a_function_is_imported_the_module_imports_it(call, outside):
    got, want = gradients(f"for i in range(3):\n        y[i] = {call}", outside)
    assert np.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("-inf"), np.int32(3), True]
)
def test_a_number_is_written_with_its_type_and_value(value):
    got = eval(emit.number(value), {"np": np})
    assert type(got) is type(value)
    assert np.array_equal(got, value, equal_nan=True)


def test_a_global_that_is_not_a_number_stands_in_the_module():
    got, want = gradients("for i in range(3):\n        y[i] = (NAN if x[i] > 9.0 else x[i]) * x[i]", {"NAN": math.nan})
    assert np.allclose(got, want, atol=1e-5)
