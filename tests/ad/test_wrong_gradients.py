"""Kernels whose gradient was once wrong, or called wrong: each is right now, or refused with its line and reason."""

import math

import numpy as np
import programs
import pytest
from numba import prange

from cpuopt import differentiable, ops
from cpuopt.ad import UnsupportedError, differentiate
from cpuopt.check import dual
from cpuopt.errors import UserError
from cpuopt.kernels.compile import jit
from cpuopt.ops.declaration import C, N, T, index, inp, out, scalar

X = np.array([0.0, 1.5, -0.5, 1.5, 0.0, -2.0])
"""Zeros and equal numbers."""


def written(body, params="x, y", name="f"):
    """A function of two arrays from its body."""
    return programs.compiled(f"def f({params}):\n    n = x.shape[0]\n    {body}\n")


def agrees(f, wrt=("x",), **given):
    """Whether the gradient of all outputs agrees with dual numbers in every direction, planned or recorded."""
    given = {"x": X, "y": np.full(len(X), 0.25), **given}
    given = {n: given[n] for n in f.__code__.co_varnames[: f.__code__.co_argcount]}
    dy = np.linspace(1.0, 2.0, len(X))
    for record_all in (False, True):
        made = differentiate(f, list(wrt), ["y"], record_all=record_all)
        adjoints = [np.zeros_like(given[n]) for n in wrt]
        copies = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in given.items()}
        programs.plain(made)(*copies.values(), dy.copy(), *adjoints)
        for name, found in zip(wrt, adjoints, strict=True):
            for i in range(len(X)):
                want, _ = dual.slope(f, given, {name: np.eye(len(X))[i]}, {"y": dy})
                assert abs(found[i] - want) < 1e-12 * (1 + abs(want)), (record_all, name, i)
    return True


# Loops --------------------------------------------------------------------------------------------------------------

OVERWRITTEN = {
    "i = 2\n    s = x[i] * x[i]\n    for i in range(n):\n        y[i] = s * x[i]": "'i' is assigned in line",
    "for i in range(n):\n        y[i] = x[i]\n    y[0] = x[i] * x[i]": "'i' is read where it may not be assigned",
    "for x in range(n):\n        y[0] = 1.0": "a parameter or a view",
    "v = x.reshape(n)\n    for v in range(n):\n        y[v] = x[v]": "a parameter or a view",
    "m = y.reshape(n)\n    for i in range(int(y[0])):\n        m[i] = x[i] * x[i]": "the bound reads 'y'",
    "for i in range(0, n, 0):\n        y[i] = x[i]": "step of a range",
    "for i in range(0, n, 1.5):\n        y[i] = x[i]": "step of a range",
}


@pytest.mark.parametrize("body", OVERWRITTEN)
def test_a_loop_that_overwrites_what_is_read_elsewhere_is_refused(body):
    with pytest.raises(UnsupportedError, match=rf":\d+: '.*': .*{OVERWRITTEN[body]}.*; "):
        differentiate(written(body), ["x"], ["y"])


def test_loops_one_after_another_may_share_a_variable():
    assert agrees(
        written("for i in range(n):\n        y[i] = x[i] ** 2\n    for i in range(1, n):\n        y[i] *= x[i]")
    )


@pytest.mark.parametrize("line", ["y[i] = y[i]", "y[i] += 1.0", "y[i] = -(-y[i])"])
def test_a_parallel_loop_that_changes_no_adjoint_has_no_reverse(line):
    """It was written as a loop without a body, which is no Python."""
    f = written(f"for i in prange(n):\n        y[i] = x[i] * x[i]\n    for i in prange(n):\n        {line}")
    assert agrees(f)


RANGES = ["-1, n", "-n, 0", "1 - n, n", "n - 1, -2, -1", "n - 1, -n - 1, -2", "-3, n, 2", "2, 1", "n, n - 9", "n // 2"]


@pytest.mark.parametrize("kind", ["range", "prange"])
@pytest.mark.parametrize("bounds", RANGES)
def test_a_range_may_have_any_bounds(bounds, kind):
    """Index -1 is that of the last element: two iterations may write one element."""
    if kind == "range" or not bounds.endswith(("-1", "-2", "2")):  # a prange by steps may be refused
        assert agrees(written(f"for i in {kind}({bounds}):\n        y[i] = x[i] * x[i]"))
        assert agrees(written(f"for i in {kind}({bounds}):\n        y[i] *= x[i]\n        y[i] += x[i] * y[i]"))


def test_a_range_below_zero_is_right_when_compiled():
    """An unsigned index would lie outside of the array."""

    def f(x, y):
        for i in prange(-3, -1):
            y[i] = x[i] * x[i]

    made = differentiate(f, ["x"], ["y"])
    dx = np.zeros_like(X)
    jit.helper(parallel=True)(made.function)(X, np.zeros_like(X), np.ones_like(X), dx)
    assert dx.tolist() == [0, 0, 0, 3, 0, 0]


# Powers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", ["0", "0.0", "1", "2", "3", "NONE", "i % 3", "p[i]"])
def test_a_power_has_a_slope_at_zero(power):
    code = f"def f(x, y, p):\n    for i in range(x.shape[0]):\n        y[i] = 3.0 * x[i] ** ({power}) + p[i]\n"
    f = programs.compiled(code, {**programs.NAMES, "NONE": 0})
    assert agrees(f, p=np.array([0, 1, 2, 3, 0, 2]))


def test_a_power_from_a_loop_has_a_slope_at_zero():
    f = written("for i in range(n):\n        for p in range(n):\n            y[i] += w[p] * x[i] ** p", "x, w, y")
    assert agrees(f, wrt=("x", "w"), w=np.linspace(-1, 1, len(X)))


def test_an_exponent_seen_through_a_view_has_a_slope():
    f = written("v = x.reshape(n)\n    for i in range(n):\n        y[i] = 2.0 ** v[i] + (3.0 + v[i]) ** v[i]")
    assert agrees(f)


# Arrays -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "for i in range(n):\n        x[i] *= 2.0\n        y[i] = x[i]",
        "v = x.reshape(n)\n    v[0] = 1.0\n    y[0] = x[1]",
    ],
)
def test_what_is_written_and_differentiated_is_refused(body):
    with pytest.raises(UnsupportedError, match=r":\d+: '.*': 'x' is written, and is differentiated with respect to; "):
        differentiate(written(body), ["x"], ["y"])


def test_one_array_in_inputs_and_outputs_is_refused():
    with pytest.raises(UnsupportedError, match="'y' is written, and is differentiated"):
        differentiate(written("for i in range(n):\n        y[i] *= x[i]"), ["x", "y"], ["y"])
    with pytest.raises(UnsupportedError, match="nothing is written to 'x'"):
        differentiate(written("y[0] = x[0]"), ["x"], ["x"])


RACES = {
    "s = 0.5\n    for i in prange(n):\n        s = s * 0.5 + x[i]\n        y[i] = s": "'s'",
    "s = 0.5\n    for i in prange(n):\n        s += x[i]\n        y[i] = s": "'s'",
    "s = 0.5\n    for i in prange(n):\n        if x[i] > s:\n            s = x[i]\n    y[0] = s": "'s'",
    "s = 0.5\n    for i in prange(n):\n        s += x[i]\n        s *= x[i]\n    y[0] = s": "'s'",
    "s = 0.5\n    for i in prange(n):\n        s = x[i] / s\n    y[0] = s": "'s'",
    "t = 0.5\n    for i in prange(n):\n        t = x[i] * x[i]\n    y[0] = t": "'t'",
}


@pytest.mark.parametrize("body", RACES)
def test_a_scalar_carried_over_prange_is_refused(body):
    with pytest.raises(UnsupportedError, match=rf":\d+: '.*': {RACES[body]} is carried over .*prange.*; "):
        differentiate(written(body), ["x"], ["y"])


@pytest.mark.parametrize("step", ["s += x[i] * x[i]", "s -= x[i]", "s *= x[i] + 3.0", "s = max(s, x[i])"])
def test_what_numba_reduces_over_prange_is_differentiated(step):
    assert agrees(
        written(f"s = 0.5\n    for i in prange(n):\n        {step}\n    for i in range(n):\n        y[i] = s")
    )


@pytest.mark.parametrize("name", ["dx", "dy", "dx_add", "chunk"])
def test_a_parameter_named_like_an_adjoint_is_refused(name):
    f = programs.compiled(f"def f(x, {name}, y):\n    y[0] = x[0] * x[0] * {name}[0]\n")
    with pytest.raises(UnsupportedError, match=rf":1: 'def f.*': the backward needs the name .*'{name}'"):
        differentiate(f, ["x"], ["y"])


def test_a_global_that_a_saved_output_holds_is_not_assigned():
    code = "def f(x, y, z):\n    for i in range(x.shape[0]):\n        z[i] = HALF\n        y[i] = x[i] * z[i] * HALF\n"
    made = differentiate(programs.compiled(code), ["x"], ["y"], saved=["z"], fresh=["z"])
    dx = np.zeros_like(X)
    programs.plain(made)(X, np.zeros_like(X), np.full(len(X), 0.3), np.ones_like(X), dx)
    assert np.allclose(dx, 0.09)


# The judge ----------------------------------------------------------------------------------------------------------


def looped(body, params="out, inp", loop="prange(inp.shape[0])"):
    """A kernel from the body of its loop, which numba can compile."""
    names = {"__name__": __name__, "prange": prange, "math": math, "FACTOR": np.float32(0.7)}
    return programs.compiled(f"def f({params}):\n    for i in {loop}:\n        {body}\n", names)


SQUARES = "for j in range(inp.shape[1]):\n            out[i] += inp[i, j] * inp[i, j]"


@pytest.mark.parametrize(
    "function",
    [
        looped(SQUARES),
        looped("if inp[i, 0] > 0:\n            out[i] = inp[i, 0]"),
        looped("out[i] = inp[i, 0] * inp[i, 1] if out[i] < 0.5 else inp[i, 0]"),
        looped("out[i] = inp[i, 0] * inp[i, 0]", loop="range(inp.shape[0] - 1)"),
    ],
    ids=["only added", "partly unwritten", "read before", "last row unwritten"],
)
def test_an_output_that_depends_on_what_stood_in_it_is_refused(function):
    op = differentiable(out("out", N), inp("inp", N, T))(function)
    with pytest.raises(
        UserError, match=r":\d+: 'out\[i\] .*: 'out' depends on its content before the call.*; assign every element"
    ):
        op.judge()
    assert not op.judged


def test_an_output_that_is_assigned_and_then_added_to_is_judged():
    differentiable(out("out", N), inp("inp", N, T))(looped(f"out[i] = 0.0\n        {SQUARES}")).judge()


CONTRADICTED = [
    ("inp[i] = inp[i] * 2.0\n        out[i] = inp[i] * inp[i]", (), "'inp' is declared as an input, and is written"),
    (
        "ix[i] = 0\n        out[i] = inp[ix[i]]",
        (index("ix", N, below=N),),
        "'ix' is declared as an input, and is written",
    ),
    ("other = inp[i]", (), "nothing is written to 'out'"),
    ("out[i] = inp[i] * dinp[i]", (inp("dinp", N),), "the name 'dinp' for the adjoint of 'inp'"),
    ("out[i] = inp[i] * dinp_add", (scalar("dinp_add"),), "the name 'dinp_add' for the adjoint of 'inp'"),
]


@pytest.mark.parametrize(("body", "more", "why"), CONTRADICTED)
def test_a_declaration_that_its_kernel_contradicts_is_refused(body, more, why):
    function = looped(body, ", ".join(["out", "inp", *(a.name for a in more)]))
    with pytest.raises(UserError, match=rf":\d+: '.*': .*{why}.*; "):
        differentiable(out("out", N), inp("inp", N), *more)(function)
    assert "f_forward" not in ops.ALL


RIGHT = {
    "masked scores": "inp[i] + (-1e9 if mask[i] > 0 else 0.0)",
    "scaled tanh": "FACTOR * math.tanh(inp[i] * FACTOR)",
    "smooth abs": "math.sqrt(inp[i] * inp[i] + eps * eps) - eps",
    "bent": "math.tanh(inp[i] / eps) * math.exp(-inp[i] * inp[i] / eps) + inp[i]",
    "logit": "math.log(inp[i] / (1.0 - inp[i]))",
    "acosh": "math.log(inp[i] + math.sqrt(inp[i] * inp[i] - 1.0))",
    "cancelled": "((inp[i] + 1e9) - 1e9) + inp[i] * inp[i]",
}


def declared(expression):
    """The op of a right kernel."""
    more = [a for a in (inp("mask", N), scalar("eps")) if a.name in expression]
    function = looped(f"out[i] = {expression}", ", ".join(["out", "inp", *(a.name for a in more)]))
    return differentiable(out("out", N), inp("inp", N), *more)(function)


@pytest.mark.parametrize("name", RIGHT)
def test_no_right_gradient_is_called_wrong_and_one_that_is_off_by_a_millionth_is(name, monkeypatch):
    op = declared(RIGHT[name])
    true = op.backward.reference
    for factor in (1.000001, np.nan):
        with monkeypatch.context() as patch:
            patch.setattr(op.backward, "reference", true_but(true, lambda x, factor=factor: x * factor))
            with pytest.raises(UserError, match="disagrees with the slope of its forward"):
                op.judge()
    op.judge()
    assert op.judged


def true_but(reference, change):
    """A reference whose gradients are changed."""

    def changed(**given):
        return {n: change(x) for n, x in reference(**given).items()}

    changed.__signature__ = reference.__signature__
    return changed


@pytest.mark.parametrize("name", dual.SLOPES)
def test_dual_numbers_have_the_slopes_of_differences(name):
    home = "np" if hasattr(np, name) else "math"
    f = programs.compiled(f"def f(x, y):\n    y[0] = {home}.{name}(x[0]) * 2.0\n", {"np": np, "math": math})
    for x in {"acosh": (1.3, 2.7)}.get(name.replace("arc", "a"), (0.3, 0.8 if "a" in name[:2] else 1.7)):
        got, size = dual.slope(f, {"x": np.array([x]), "y": np.zeros(1)}, {"x": np.ones(1)}, {"y": np.ones(1)})
        g = getattr(np if home == "np" else math, name)
        assert abs(got - (g(x + 1e-5) - g(x - 1e-5)) / 1e-5) < 1e-7
        assert size == (2 * (1 + g(x) ** 2) if name == "tanh" else abs(got))


def hands_on(y, x):
    h = np.zeros(x.shape[0])
    for t in range(x.shape[0]):
        new = np.zeros(x.shape[0])
        for i in range(x.shape[0]):
            new[i] = 0.5 * h[i] * h[i] + x[i]
        h = new
        y[t] = h[t]


def exchanges(y, x):
    a, b = np.ones(x.shape[0]), np.empty(x.shape[0])
    for _ in range(4):
        for i in range(x.shape[0]):
            b[i] = 0.5 * a[i] * a[i] + x[i]
        a, b = b, a
    for i in range(x.shape[0]):
        y[i] = a[i]


def in_a_parallel_loop(y, x):
    for b in prange(x.shape[0]):
        n = x.shape[1]
        u = x[b].copy()
        for _ in range(3):
            v = np.zeros(n)
            for i in range(1, n - 1):
                v[i] = u[i] + 0.2 * (u[i - 1] - u[i + 1]) * u[i]
            u = v
        for i in range(n):
            y[b, i] = u[i]


@pytest.mark.parametrize(("function", "shape"), [(hands_on, (N,)), (exchanges, (N,)), (in_a_parallel_loop, (T, C))])
def test_an_array_that_is_handed_on_is_the_one_that_is_read_next(uncompiled, function, shape):
    op = differentiable(out("y", *shape), inp("x", *shape))(function)
    op.judge()
    assert op.judged


def changed_after_it(y, x):
    h, new = np.zeros(x.shape[0]), np.ones(x.shape[0])
    for t in range(x.shape[0]):
        y[t] = h[0] * x[t]
        h = new
        new[0] = new[0] * x[t]


def in_a_branch(y, x):
    h, new = np.zeros(x.shape[0]), np.ones(x.shape[0])
    for t in range(x.shape[0]):
        if x[t] > 0:
            h = new
        y[t] = h[0] * x[t]


def made_with_another_size(y, x):
    h = np.zeros(x.shape[0])
    for t in range(x.shape[0]):
        y[t] = h[0] * x[t]
        h = np.ones(2)


@pytest.mark.parametrize("function", [changed_after_it, in_a_branch, made_with_another_size])
def test_a_name_that_may_stand_for_two_arrays_is_refused(function):
    with pytest.raises(UnsupportedError, match="'h' may stand for another array or row here"):
        differentiate(function, ["x"], ["y"])


def gate(y, x, threshold):
    for i in range(x.shape[0]):
        y[i] = x[i] * x[i] if x[i] > threshold[0] else 0.1 * x[i]


def test_a_gradient_that_nothing_adds_to_is_zero():
    op = differentiable(out("y", N), inp("x", N), inp("threshold", 1))(gate)
    assert {r.verdict for r in op.check()} == {"right"}
