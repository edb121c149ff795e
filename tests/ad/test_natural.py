"""Kernels as people write them: right by both routes; a refused one is told what to write instead."""

import importlib

import judge
import natural
import numpy as np
import pytest

from cpuopt import differentiable
from cpuopt.ad import UnsupportedError, differentiate
from cpuopt.ad.rules import ALIASES, BINARY, CHOICES, DERIVATIVE, INTEGER
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.ops.declaration import BT, C, N, T, inp, out, state

REFUSED = {
    "kepler_while": "write a for loop over a range",
    "softmax_rows_numpy": "give every index",
    "student_t": "write it out",
    "value_at_risk": "pass the order as an index input",
}
"""Of those that were first written, with what the message tells to write."""


ACCEPTED = [n for n in natural.ALL if n not in REFUSED]


def test_the_kernels_are_found():
    assert len(ACCEPTED) >= 35


@pytest.mark.parametrize("name", [n for n in natural.FIRST_WRITTEN if n not in REFUSED])
def test_the_generator_is_right_against_differences_and_dual_numbers(name):
    found = judge.judge(natural.ALL[name])
    assert found.kind == "right", found.detail


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_what_to_write(name):
    kernel = natural.ALL[name]
    wrt = [a.name for a in kernel.args if a.kind == "in"]
    with pytest.raises(UnsupportedError, match=rf":\d+: '.*': .*{REFUSED[name]}"):
        differentiate(kernel.function, wrt, [kernel.args[0].name])


def made(monkeypatch, name):
    kernel = natural.ALL[name]
    monkeypatch.setattr(kernel.function, "__name__", f"natural_{name}")
    return differentiable(*kernel.args, inputs=kernel.inputs)(kernel.function)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_decorator_judges_it_right(uncompiled, monkeypatch, name):
    made(monkeypatch, name).judge()


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_compiles(monkeypatch, name):
    op = made(monkeypatch, name)
    for part in [op.forward, *[op.backward] * op.read.rewritten]:
        registry.KERNELS[part.name, registry.BASE].compile()


def test_the_judge_of_the_generator_fails_a_wrong_derivative(monkeypatch):
    monkeypatch.setitem(judge.differentiate.__globals__, "unshift", lambda kernel, *a: kernel.body.pop())
    assert judge.judge(natural.ALL["gelu_erf"]).kind != "right"


FUNCTIONS = sorted(
    {*DERIVATIVE, *BINARY, *ALIASES, *CHOICES, *INTEGER} - {"rsqrt", "**", "len", "bool", "int32", "int64", "uint64"}
)
"""Of the tables of derivatives, all that are written as a call of numbers."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_of_the_tables_is_right(tmp_path, monkeypatch, name):
    home = next(h for h in ("builtins", "math", "numpy") if hasattr(importlib.import_module(h), name))
    more = {1: "", 2: ", w[i]", 3: ", 0.3, w[i]"}[
        3 if name == "clip" else 2 if name in {*BINARY, *CHOICES, "pow", "power"} else 1
    ]
    call = name if home == "builtins" else f"{home}.{name}"
    argument = "1.0 + x[i]" if name in ("acosh", "arccosh") else "x[i]"
    text = f"import {home}\n\ndef one(y, x, w):\n    for i in range(x.shape[0]):\n"
    (tmp_path / f"of_{name}.py").write_text(f"{text}        y[i] = x[i] * w[i] + {call}({argument}{more})\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = importlib.import_module(f"of_{name}").one
    kernel = natural.Natural(one, (out("y", N), inp("x", N), inp("w", N)), inside)
    found = judge.judge(kernel)
    assert found.kind == "right", found.detail


def inside(a):
    return {n: 0.5 + 0.3 * np.tanh(x) for n, x in a.items()}


def bits(y, x):
    for i in range(x.shape[0]):
        y[i] = x[i] * x[i] * (1.0 - 2.0 * (((i >> 1) & 1) ^ (i & 1)))


def test_arithmetic_on_bits_of_an_index_is_a_number():
    assert judge.judge(natural.Natural(bits, (out("y", N), inp("x", N)))).kind == "right"


def fourth_power(out, inp):
    for i in range(inp.shape[0]):
        out[i] = inp[i] * inp[i]
    for i in range(inp.shape[0]):
        out[i] *= out[i]


def test_an_output_that_is_written_twice_is_computed_again_by_the_compiled_backward():
    op = differentiable(out("out", N), inp("inp", N))(fourth_power)
    assert "out" not in op.backward.by_name
    assert {r.verdict for r in op.check()} == {"right"}


def sums_by_axis(out, inp):
    for b in range(inp.shape[0]):
        out[b] = np.sum(inp[b], axis=0) + inp[b, 0]


def sums_a_slice(out, inp):
    for b in range(inp.shape[0]):
        out[b] = np.sum(inp[b, 1:9])


@pytest.mark.parametrize(
    ("function", "said"), [(sums_by_axis, "sum has no derivative here"), (sums_a_slice, "loop over the indices")]
)
def test_reductions_that_are_no_loops_over_a_row_are_refused(function, said):
    with pytest.raises(UnsupportedError, match=said):
        differentiate(function, ["inp"], ["out"])


def projection(out, inp, weight):
    for b in range(inp.shape[0]):
        row = inp[b]
        length = np.sqrt(np.dot(row, row) + 1.0)
        out[b] = np.dot(inp[b], weight) / length + 0.1 * (row.max() - np.min(row)) + weight.mean() * np.sum(inp[b])


def test_functions_of_whole_rows_are_loops():
    declared = out("out", BT), inp("inp", BT, C), inp("weight", C)
    found = judge.judge(natural.Natural(projection, declared))
    assert found.kind == "right", found.detail
    op = differentiable(*declared)(projection)
    op.judge()
    assert op.judged


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
            row[i] += k[0] * (old[i - 1] - row[i])


def test_an_update_in_place_compiles_and_is_right():
    op = differentiable(state("u", T, C), inp("k", 1))(relax)
    assert op.forward.params == ["u", "k", "u_before"]
    assert {r.verdict for r in op.check()} == {"right"}


def leaking(out, u, inp):
    for i in range(u.shape[0]):
        u[i] = 0.5 * u[i] + inp[i]
        out[i] = u[i]


def test_parameters_in_another_order_are_refused_in_the_words_of_the_file():
    with pytest.raises(UserError) as e:
        differentiable(out("out", N), inp("inp", N), state("u", N))(leaking)
    said = "parameters are (out, u, inp); the declaration says otherwise: write def leaking(out, inp, u)"
    assert str(e.value) == f"@differentiable leaking: {said}"


def roots_forward(y, x):
    for i in range(x.shape[0]):
        y[i] = np.sqrt(x[i] - 4.0) + np.sqrt(5.0 - x[i])


def test_the_gradient_is_judged_on_the_declared_inputs():
    declared = (out("y", N), inp("x", N))
    with pytest.raises(UserError, match="declare inputs="):
        differentiable(*declared)(roots_forward).judge()


def test_inputs_that_are_no_inputs_are_refused():
    op = differentiable(out("y", N), inp("x", N), inputs=lambda a: {"x": a["x"][:1]})(roots_forward)
    with pytest.raises(UserError, match="inputs= returned 'x' of shape"):
        op.judge()


def between_four_and_five(a):
    return {"x": 4.5 + 0.4 * np.tanh(a["x"])}


def test_a_domain_of_ones_own_makes_a_gradient_finite():
    op = differentiable(out("y", N), inp("x", N), inputs=between_four_and_five)(roots_forward)
    op.judge()
    assert op.judged


def test_a_size_with_a_number_added_is_found():
    op = differentiable(out("y", T), inp("x", T + 4))(natural.ALL["savitzky_golay"].function)
    assert op.forward.bind({"x": (9,)}) == {"T": 5}
    assert (T - 1)({"T": 5}) == 4
