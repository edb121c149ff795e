"""Ops that `@differentiable` makes: judged on a domain that fits and right when compiled, or refused with a reason."""

import builtins
import inspect
import json
import math
import re
from zlib import crc32

import natural
import numpy as np
import programs
import pytest
from numba import njit, prange
from small_models import Parts
from verbs import fails

from cpuopt import check_gradient, differentiable, kernel, nn, ops
from cpuopt import functional as F
from cpuopt.ad import emit, finite
from cpuopt.ad.activity import Activity
from cpuopt.ad.rules import ALIASES, BINARY, CHOICES, DERIVATIVE, INTEGER
from cpuopt.check import gradient, worker
from cpuopt.check.cases import SMALL, Case, arguments, case
from cpuopt.check.check import check
from cpuopt.check.fit import LARGEST
from cpuopt.check.result import refuse
from cpuopt.cli import main
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.ops.declaration import C, N, T, index, inp, out, scalar, state, symbols

P, Q, R = symbols("P Q R")
ONE = out("y", N), inp("x", N)


def function(body, *args, **names):
    """A kernel from its body, in which n is the length of x."""
    names = {"__name__": __name__, "prange": prange, **names}
    made = programs.function(body, ", ".join(a.name for a in args), **names)
    made.__name__ = f"f_{crc32(body.encode())}"
    return made


def made(body, *args, inputs=None, **names):
    """The op of a kernel from its body."""
    return differentiable(*args, inputs=inputs)(function(body, *args, **names))


def each(value):
    return f"for i in prange(n):\n        y[i] = {value}"


# Right by both routes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", natural.ALL)
def test_a_kernel_as_people_write_it_is_right(uncompiled, name):
    natural.ALL[name]().judge()


@pytest.mark.slow
@pytest.mark.parametrize("name", natural.ALL)
def test_a_kernel_as_people_write_it_compiles(name):
    natural.ALL[name]()._compile()


NO_CALLS = {"rsqrt", "**", "len", "bool", "int32", "int64"}
FUNCTIONS = sorted({*DERIVATIVE, *BINARY, *ALIASES, *CHOICES, *INTEGER} - NO_CALLS)
"""Of the tables of derivatives, all that are written as a call of numbers."""


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "uint64"])
def test_each_function_of_the_tables_is_right(uncompiled, name):
    home = "" if hasattr(builtins, name) else "math." if hasattr(math, name) else "np."
    more = ", 0.3, w[i]" if name == "clip" else ", w[i]" if name in {*BINARY, *CHOICES, "pow", "power"} else ""
    called = f"{home}{name}({'1.0 + ' * (name in ('acosh', 'arccosh'))}x[i]{more})"
    inside = {"inputs": lambda a: {k: 0.5 + 0.3 * np.tanh(x) for k, x in a.items()}}
    made(each(f"x[i] * w[i] + {called}"), *ONE, inp("w", N), **inside).judge()


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


def every_argument(y, tab, x, pos, few, threshold, eps, lr):
    for i in prange(x.shape[0]):
        k = int(math.floor(x[i]))  # noqa: RUF046  (as people write it)
        k = min(max(k, 0), tab.shape[0] - 1)
        y[i] = tab[k] * x[i] * pos[i] / eps if x[i] > threshold[0] else lr * x[i] * math.trunc(3.0 * x[i])
        for _ in range(few[i]):
            y[i] += np.trunc(x[i])


def every_integer(y, x, t, k):
    for i in prange(x.shape[0]):
        j = i
        bits = (np.uint64(i) * np.uint64(11400714819323198485)) >> np.uint64(40)
        y[i, 0] = x[i, 0] * (-i) + x[-i, 0] + t[-j] + halved(-i) + (i - i * i) + abs(-i) % 7
        y[i, 0] += x[i, 0] * (k[i] * 40037 * 1003 % 17) + np.float32(bits) + math.floor(x[i, 0]) * (i - k[i]) // 5
        for m in prange(x.shape[1]):
            y[i, m] = x[i, m] * (i - m) + (0.0 if m else y[i, 0])


def relax(u, k):
    n = u.shape[1]
    for t in range(u.shape[0]):
        row = u[t]
        old = np.zeros(n)
        for i in range(n):
            old[i] = row[i]
        for i in range(n):
            if i == 0:
                continue
            row[i] += np.clip(k[0] * (old[i - 1] - row[i]), -1.0, 1.0)


def written_twice(y, x0):
    x = x0.copy()
    for i in range(x0.shape[0]):
        for k in range(2):
            x[i, k] = x[i, k] * x[i, k]
        y[i] = x[i, 0] + x[i, 1]
    for i in range(x0.shape[0]):
        y[i] *= y[i]


CHECKED = {
    every_form: (out("y", P, Q), inp("x", P, Q), inp("w", Q)),
    every_argument: (*(out("y", P), inp("tab", Q), inp("x", P), index("pos", P, below=R), index("few", P, below=3)),
                     *(inp("threshold", 1), scalar("eps"), scalar("lr"))),
    every_integer: (out("y", P, Q), inp("x", P, Q), inp("t", P), index("k", P, below=9_000_000)),
    relax: (state("u", T, C), inp("k", 1)), written_twice: (out("y", P), inp("x0", P, 2)),
}  # fmt: skip


@pytest.mark.parametrize("f", CHECKED)
def test_it_is_right_when_compiled(f):
    op = differentiable(*CHECKED[f])(f)
    op.judge()
    assert op.judged
    if f is every_form:  # the plain loops that it is compiled as, and the lines that were written
        code = inspect.getsource(op.compiled)
        assert "    unit = np.empty(x.shape[1], np.float64)" in code  # in each iteration
        assert "x.shape[0]," not in code
        assert "total[j - 1] = total[j] + through(unit[j]) * sigmoid(w[j])" in op.generated.text
    if f is every_argument:  # also of numbers that are none, which have no integer
        assert {r.verdict for r in op.check()} == {"right"}
    assert (op.compiled is f) == (f in (every_argument, written_twice))
    assert (f is not relax) or op.forward.params == ["u", "k", "u_before"]
    assert (f is not written_twice) or "y" not in op.backward.by_name  # it is computed again


JUDGED = {
    "masked scores": "x[i] + (-1e9 if mask[i] > 0 else 0.0)", "scaled tanh": "FACTOR * math.tanh(x[i] * FACTOR)",
    "smooth abs": "math.sqrt(x[i] * x[i] + eps * eps) - eps",
    "bent": "math.tanh(x[i] / eps) * math.exp(-x[i] * x[i] / eps) + x[i]", "logit": "math.log(x[i] / (1.0 - x[i]))",
    "acosh": "math.log(x[i] + math.sqrt(x[i] * x[i] - 1.0))", "cancelled": "((x[i] + 1e9) - 1e9) + x[i] * x[i]",
    "cast": "np.float32(x[i]) * np.float32(x[i]) * np.float32(0.3)",
}  # fmt: skip


def scaled(reference, factor):
    """A reference whose gradients are multiplied."""

    def changed(**given):
        return {n: x * factor for n, x in reference(**given).items()}

    changed.__signature__ = reference.__signature__
    return changed


@pytest.mark.parametrize("name", JUDGED)
def test_no_right_gradient_is_called_wrong_and_one_that_is_off_by_a_millionth_is(uncompiled, monkeypatch, name):
    more = [a for a in (inp("mask", N), scalar("eps")) if a.name in JUDGED[name]]
    op = made(each(JUDGED[name]), *ONE, *more, FACTOR=np.float32(0.7))
    for factor in (1.000001, np.nan):
        with monkeypatch.context() as patch:
            patch.setattr(op.backward, "reference", scaled(op.backward.reference, factor))
            fails("disagrees with the slope of its forward", op.judge)
    op.judge()
    assert op.judged


HANDED_ON = {
    "h = np.zeros(n)\n    for t in range(n):\n        new = np.zeros(n)\n        for i in range(n):\n"
    "            new[i] = 0.5 * h[i] * h[i] + x[i]\n        h = new\n        y[t] = h[t]": (N,),
    "a, b = np.ones(n), np.empty(n)\n    for _ in range(4):\n        for i in range(n):\n"
    "            b[i] = 0.5 * a[i] * a[i] + x[i]\n        a, b = b, a\n    for i in range(n):\n        y[i] = a[i]": (
        N,
    ),
    "for b in prange(n):\n        m = x.shape[1]\n        u = x[b].copy()\n        for _ in range(3):\n"
    "            v = np.zeros(m)\n            for i in range(1, m - 1):\n"
    "                v[i] = u[i] + 0.2 * (u[i - 1] - u[i + 1]) * u[i]\n            u = v\n"
    "        for i in range(m):\n            y[b, i] = u[i]": (T, C),
}


@pytest.mark.parametrize("body", HANDED_ON, ids=["to the next", "exchanged", "in a parallel loop"])
def test_an_array_that_is_handed_on_is_the_one_that_is_read_next(uncompiled, body):
    made(body, out("y", *HANDED_ON[body]), inp("x", *HANDED_ON[body])).judge()


@pytest.mark.parametrize("factor", [np.float32(2), np.float32(3)])
def test_a_number_from_around_the_function_is_the_one_of_this_function(factor):
    def multiplied(y, x):
        for i in prange(x.shape[0]):
            y[i] = x[i] * factor

    generated = registry.KERNELS[differentiable(*ONE)(multiplied).backward.name, "generated"].function
    assert getattr(generated, "py_func", generated).__globals__["factor"] == factor


# Wrong, and refused -------------------------------------------------------------------------------------------------


def square(y, x):
    for i in prange(x.shape[0]):
        y[i] = x[i] * x[i]


def square_backward(dx, dx_add, dy, x):
    for i in prange(x.shape[0]):
        d = dy[i] * (x[i] + x[i])
        dx[i] = dx[i] + d if dx_add else d


def square_backward_wrong(dx, dx_add, dy, x):
    for i in prange(x.shape[0]):
        d = dy[i] * x[i]
        dx[i] = dx[i] + d if dx_add else d


def engine_of(op):
    model = Parts(lambda m, x, y: F.cross_entropy(m.head(op(x)), y), head=nn.Linear(4, 3))
    return Engine.from_options(model, {"x": ((2, 4), "float32"), "y": ((2,), "int32")})


def test_a_backward_by_hand_replaces_the_generated_one_if_it_agrees_and_both_are_judged_before_a_model_uses_them(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(emit, "cache_folder", lambda name: tmp_path / name)
    op = differentiable(*ONE, flops=N)(square)
    assert op.backward.params == ["dx", "dx_add", "dy", "x"]
    assert not op.judged
    engine_of(op)
    assert op.judged
    fails(r"disagrees with the generated one: dx\[", op.handwritten, square_backward_wrong)
    assert registry.KERNELS["square_backward", "vanilla"].function is not square_backward_wrong
    by_hand = op.handwritten(square_backward)
    assert registry.KERNELS["square_backward", "vanilla"].function is by_hand
    fails("already", differentiable(*ONE), square)
    leaves = Activity.leaves  # a broken generator: a square's derivative lacks its factor
    monkeypatch.setattr(Activity, "leaves", lambda self, s, e, *more: leaves(self, s, e, *more)[:1])
    fails("its generated gradient disagrees with the slope", engine_of, made(each("x[i] * x[i]"), *ONE))


def test_a_gradient_that_is_not_a_number_where_the_forward_has_a_slope_is_refused(uncompiled, monkeypatch):
    monkeypatch.setattr(finite, "spared", lambda e, seed: e)
    clamped = "rho = np.sqrt(x[i] * x[i] + w[i] * w[i])\n        y[i] = rho if rho > 1e-6 else 1e-6"
    op = made(f"for i in prange(n):\n        {clamped}", *ONE, inp("w", N))
    asked = {"op": op.backward.name, "variant": "generated", "case": {"sizes": {"N": 8}}, "threads": [1], "seed": 0}
    for judge in (op.judge, lambda: worker.check(asked, print)):  # the second is what `cpuopt check` does
        fails("disagrees with the slope of its forward", judge)


def test_compiled_kernels_are_compared_with_their_text_before_the_first_use(monkeypatch):
    """The mutant: numba's own integers, with which the forward is 1.8e19 times its input, and the gradient right."""
    monkeypatch.setattr(jit, "PYTHON_INTEGERS", {})
    monkeypatch.setattr(jit, "integers", lambda function: {})
    op = made(each("x[i] * (-i)"), *ONE)
    fails(r"_forward\[vanilla\]: compiled, it disagrees with its text in Python", op.judge)
    assert not op.judged


def test_an_index_of_a_parallel_loop_is_signed_in_a_kernel_that_is_no_differentiable_op():
    def helped(out, inp):
        for i in prange(inp.shape[0]):
            out[i] = max(inp[i] if -i + 1 < 2 else np.float32(7), np.float32(0))

    assert kernel(ops.relu_forward, "signed")(helped)._compiler.pipeline_class is jit.PythonIntegers
    result = check(registry.KERNELS["relu_forward", "signed"], {"N": 37})
    assert result.verdict == "right", result.reason


def test_what_numba_refuses_is_an_error_with_its_line():
    op = made(each("x[i] * x[i] * x[i]"), *ONE)
    op.compiled.__globals__["prange"] = object()
    fails(r"_forward\[vanilla\] .* compile: .* \(line \d+: for i in prange", op.judge)
    assert not op.judged


ROWS = out("y", N), inp("x", N, T)
BIG = "an integer is .*, beyond int64; .*uint64"
NO_OPS = [  # when it is declared
    ("while x[0] > 0:\n        y[0] = x[0]", ONE, "While"),
    (each("x[i] * x[i]\n        x[i] = y[i]"), ONE, "'x' is declared as an input, and is written"),
    (each("x[ix[i]]\n        ix[i] = 0"), (*ONE, index("ix", N, below=N)),
     "'ix' is declared as an input, and is written"),
    ("for i in prange(n):\n        other = x[i]", ONE, "nothing is written to 'y'"),
    (each("x[i] * dx[i]"), (*ONE, inp("dx", N)), "the name 'dx' for the adjoint of 'x'"),
    (each("x[i] * dx_add"), (*ONE, scalar("dx_add")), "the name 'dx_add' for the adjoint of 'x'"),
]  # fmt: skip
NOT_JUDGED = [  # before its first use
    *(
        (f"for i in {loop}:\n        {body}", ROWS, "'y' depends on its content before .*; assign every element")
        for body, loop in (
            ("for j in range(x.shape[1]):\n            y[i] += x[i, j] * x[i, j]", "prange(n)"),
            ("if x[i, 0] > 0:\n            y[i] = x[i, 0]", "prange(n)"),
            ("y[i] = x[i, 0] * x[i, 1] if y[i] < 0.5 else x[i, 0]", "prange(n)"),
            ("y[i] = x[i, 0] * x[i, 0]", "range(n - 1)"),
        )
    ),
    (each("np.sqrt(x[i] - 4.0) + np.sqrt(5.0 - x[i])"), ONE, "it is not finite for any of.*declare inputs="),
    (each("x[i] * (((i + 7) * 6364136223846793005) % 1000)"), ONE, BIG),
    ("for i in range(n):\n        h = 1\n        for k in reversed(range(4)):\n            h *= 10 ** (5 + k)\n"
     "        y[i] = x[i] * h", ONE, BIG),
    (each("x[i] * (k[i] * 4000037 * 1000003 // 7)"), (*ONE, index("k", N, below=9_000_000)), BIG),
    (each("x[i] * (1 << (i + 60))"), ONE, BIG),
]  # fmt: skip


@pytest.mark.parametrize(("body", "args", "why"), [*NO_OPS, *NOT_JUDGED])
def test_an_op_is_refused_with_line_and_reason_and_what_to_do(uncompiled, body, args, why):
    before, judged = {**ops.ALL}, (body, args, why) in NOT_JUDGED
    op = made(body, *args) if judged else None
    with pytest.raises(UserError, match=rf":\d+: '.*': .*{why}"):
        op.judge() if op else made(body, *args)
    assert op or before == ops.ALL


@pytest.mark.parametrize(("value", "inputs", "why"), [
    ("np.sqrt(x[i] - a) + np.sqrt(a + 1.0 - x[i])", lambda given: {"x": 4.5 + 0.4 * np.tanh(given["x"]), "a": 4.0}, ""),
    ("np.sqrt(x[i])", lambda given: {"x": given["x"][:1]}, "inputs= returned 'x' of shape"),
    ("a * x[int(x[i])]", lambda given: {"x": given["x"] + 100}, "IndexError.*declare its domain with inputs="),
])  # fmt: skip
def test_inputs_that_bring_a_kernel_into_its_domain_or_do_not(uncompiled, value, inputs, why):
    op = made(each(value), *ONE, scalar("a"), inputs=inputs)
    if not why:
        assert arguments(op.forward, case(op.forward, SMALL), np.random.default_rng(0))["a"] == 4
        op.judge()
        return
    fails(why, op.judge)


def leaking(out, u, inp):
    for i in range(u.shape[0]):
        u[i] = 0.5 * u[i] + inp[i]
        out[i] = u[i]


MADE = {}
exec("def made(y, x):\n    for i in range(x.shape[0]):\n        y[i] = x[i]", MADE)
ODD = {
    "by exec": (MADE["made"], "made has no source to read.*def"),
    "a lambda": (lambda y, x: None, "<lambda> has no source to read.*def"),
    "a lambda by eval": (eval("lambda y, x: None"), "<lambda> has no source to read.*def"),
    "builtin": (len, "built-in function len> is no Python function.*def"),
    "of numpy": (np.sin, "'sin'> is no Python function.*def"),
    "number": (7, "7 is no Python function.*def"),
    "another order": (leaking, r"leaking: parameters are \(out, u, inp\).* otherwise: write def leaking\(y, x\)$"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_kernel_of_these_parameters_is_an_error_of_one_line(kind):
    f, why = ODD[kind]
    fails(f"^[^\n]*{why}[^\n]*$", differentiable(*ONE), f)


@pytest.mark.parametrize("size", [0, -1, 2.5, "N", True, None])
def test_a_size_is_a_symbol_or_a_whole_number(size):
    for declare in (lambda: out("y", size), lambda: inp("y", N, size), lambda: index("y", N, below=size)):
        fails(re.escape(f"'y' has the size {size!r}; expected a whole number above 0"), declare)
    assert str(index("y", N, below=np.int64(3)).below) == "3"
    op = made("for i in prange(y.shape[0]):\n        y[i] = x[i] + x[i + 4]", out("y", T), inp("x", T + 4))
    assert (op.forward.bind({"x": (9,)}), (T - 1)({"T": 5})) == ({"T": 5}, 4)


# The inputs on which it is judged: what float32 cannot hold is no evidence --------------------------------------------

RECURRENCE = (
    "for c in prange(x.shape[1]):\n        s = 0.0\n        for t in range(n):\n"
    "            s = a[c] * s + {}x[t, c]\n            y[t, c] = s"
)
LOG_SUM = (
    "top = {}\n    s = 0.0\n    for i in range(n):\n        s += math.exp(x[i] - top)\n    y[0] = top + math.log(s)"
)
TOP = "max(x[0], x[1])\n    for i in range(n):\n        top = max(top, x[i])"
AT_SIZE = {"adds": {}, "sized": True}


def drawn(op, on):
    return arguments(op.forward, on, np.random.default_rng(0))


def judged(op, on, variant="vanilla", **how):
    return check(registry.KERNELS[op.forward.name, variant], on, **how)


def test_a_recurrence_that_grows_is_judged_on_smaller_inputs_and_a_wrong_one_fails_on_them():
    args, long = (out("y", T, C), inp("x", T, C), inp("a", C)), {"T": 130, "C": 24}
    op = made(RECURRENCE.format(""), *args)
    kernel(op.forward, "wrong")(function(RECURRENCE.format("2.0 * "), *args))
    assert drawn(op, Case(long)).scale < 1
    found = [judged(op, Case(long)), check(registry.KERNELS[op.backward.name, "generated"], Case(long))]
    found.append(judged(op, Case(long, **AT_SIZE), threads=(1,)))
    assert {r.verdict for r in found} == {"right"}
    assert all("so that float32 holds" in r.reason and "declare it with inputs=" in r.reason for r in found)
    for on in (Case(long), Case(long, **AT_SIZE)):
        result = judged(op, on, "wrong")
        assert result.verdict == "wrong"
        with pytest.raises(UserError, match=r"is wrong, so .* expected .* times 0\.\d+.*; if its domain is another"):
            refuse(result, "nothing is run with it")


def test_a_formula_that_leaves_float64_too_is_judged_on_smaller_inputs():
    body = "h = 0.0\n    for t in range(n):\n        h = 0.5 * h * h + x[t]\n        y[t] = h"
    op = made(body, out("y", T), inp("x", T))
    assert drawn(op, Case({"T": 90})).scale < 1
    assert np.isfinite(op.forward.reference(**drawn(op, Case({"T": 90})))["y"]).all()


@pytest.mark.parametrize(("args", "right", "overflows"), [
    ((out("y", 1), inp("x", P)), LOG_SUM.format(TOP), LOG_SUM.format("np.float32(0.0)")),
    (ONE, each("1.0 / (1.0 + math.exp(-x[i]))"), each("math.exp(x[i]) / (1.0 + math.exp(x[i]))")),
], ids=["log of a sum", "sigmoid"])  # fmt: skip
def test_a_kernel_that_overflows_where_its_reference_does_not_fails(args, right, overflows):
    op = made(right, *args)
    kernel(op.forward, "other", parallel="prange" in overflows)(function(overflows, *args))
    large = Case(dict.fromkeys(op.forward.symbols, 40), "thousands")
    assert (drawn(op, large).scale, judged(op, large).verdict) == (1, "right")
    assert judged(op, large, "other").verdict == "wrong"


def test_a_formula_is_judged_where_it_does_not_overflow_on_the_way():
    op = made(LOG_SUM.format("np.float32(0.0)"), out("y", 1), inp("x", P))
    assert judged(op, Case({"P": 40}, "thousands")).verdict == "right"
    op = made(each("1.0 / x[i] ** 8"), *ONE)
    tiny = case(op.forward, SMALL, "tiny")
    assert drawn(op, tiny).scale > 1
    assert judged(op, tiny).verdict == "right"
    op = made(each("1e30 * (1.5 + math.sin(x[i])) * 1e30"), *ONE)
    with pytest.raises(UserError, match="leaves float32's range, on random inputs of any scale; declare its domain"):
        judged(op, case(op.forward, SMALL))


BEST = (
    "for i in prange(n):\n        top = {}\n        for p in range(c.shape[0]):\n            if x[i] * c[p] > top:\n"
    "                top = x[i] * c[p]\n        y[i] = top{}"
)


@pytest.mark.parametrize("lowest", [-1e20, -3.4028235e38, -math.inf])
def test_a_number_that_the_formula_has_may_be_as_large_as_float32_holds(lowest):
    """With NaN put in, nothing is greater than it, and the result is the number; the others are judged as ever.

    Of those beside a number in the range of sums the tolerance follows from it.
    """
    args = *ONE, inp("c", Q)

    def best(start="LOWEST", more=""):
        return function(BEST.format(start, more), *args, LOWEST=lowest)

    op = differentiable(*args)(best())
    on = case(op.forward, SMALL, "nan")
    assert (drawn(op, on).scale, judged(op, on).verdict) == (1, "right")
    kernel(op.forward, "from_another")(best("-1e19"))
    kernel(op.forward, "but_one")(best(more=" + 1e-3 * (i == 1)"))
    for wrong in ("from_another", "but_one"):
        assert judged(op, on, wrong).verdict == "wrong"
    given = drawn(op, Case({"N": 40, "Q": 7})) | {"y": np.full(40, np.nan, np.float32)}
    given["x"][3] = np.nan
    if -math.inf < lowest < -LARGEST:
        on = Case({"N": 40, "Q": 7}, **AT_SIZE)
        assert judged(op, on, given=given).verdict == "right"
        assert judged(op, on, "but_one", given=given).verdict == "wrong"


# The command line -----------------------------------------------------------------------------------------------------


def test_check_gradient_passes_for_every_op_and_fails_for_a_wrong_reference(monkeypatch, capsys):
    assert main(["check", "--gradient", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["gradients"]
    assert {g["op"] for g in told} == {op.name for op in ops.ALL.values() if op.inverts}
    assert max(g["error"] for g in told) < 1e-7
    monkeypatch.setattr(ops.gelu_backward, "reference", lambda dout, inp: {"dinp": dout * inp})
    assert check_gradient(ops.gelu_forward)[0].verdict == "wrong"
    assert main(["check", "--gradient", "gelu"]) == 1
    fails("no declared backward", check_gradient, ops.adamw)
    assert main(["check", "--gradient", "gelo"]) == 2
    assert gradient.GradientResult("op", None, "dx", 1.0, (float("nan"),) * 5).verdict == "wrong"


def test_a_generated_backward_is_printed_with_its_plan_and_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["new-kernel", "layernorm", "--backward", "--plan", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "def layernorm_backward(dinp, dinp_add," in said
    assert "# 27: d = inp[bt, i] - m" in said
    assert "kept: the backward is given 'mean'" in said
    assert "summed by each chunk" in said
    html = page.read_text()
    assert html.count("<section") == 1
    assert 'data-line="27"' in html
    for asked, why in ("layernom", "did you mean"), ("matmul_gelu_backward", "matmul_gelu_backward: it fuses"):
        assert main(["new-kernel", asked, "--backward"]) == 2
        assert why in capsys.readouterr().err
