"""What a user sees of it: an op from one kernel, the command line, gradient checks, the variant in training."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from numba import prange

from cpuopt import Choice, check_gradient, differentiable, nn, ops
from cpuopt import functional as F
from cpuopt.ad import emit
from cpuopt.ad.activity import Activity
from cpuopt.check import gradient
from cpuopt.cli import main
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.ops.declaration import N, index, inp, out


def square_forward(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = inp[i] * inp[i]


def square_backward(dinp, dinp_add, dout, inp):
    for i in prange(inp.shape[0]):
        d = dout[i] * (inp[i] + inp[i])
        dinp[i] = dinp[i] + d if dinp_add else d


def square_backward_wrong(dinp, dinp_add, dout, inp):
    for i in prange(inp.shape[0]):
        d = dout[i] * inp[i]
        dinp[i] = dinp[i] + d if dinp_add else d


def test_an_op_of_ones_own_has_a_backward_and_a_check():
    square = differentiable(out("out", N), inp("inp", N), flops=N)(square_forward)
    assert square.backward.params == ["dinp", "dinp_add", "dout", "inp"]
    assert {r.verdict for r in square.check()} == {"right"}
    with pytest.raises(UserError, match=r"disagrees with the generated one: dinp\["):
        square.handwritten(square_backward_wrong)
    assert registry.KERNELS["square_backward", "vanilla"].function is not square_backward_wrong
    made = square.handwritten(square_backward)
    assert registry.KERNELS["square_backward", "vanilla"].function is made
    with pytest.raises(UserError, match="already"):
        differentiable(out("out", N), inp("inp", N))(square_forward)


class Squares(nn.Module):
    def __init__(self, op):
        self.op, self.head, self.loss = op, nn.Linear(4, 3), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.head(self.op(x)), y)


def engine_of(op):
    return Engine(Squares(op), {"x": ((2, 4), "float32"), "y": ((2,), "int32")})


def halved(monkeypatch):
    """Break the generator: a square's derivative lacks its factor."""
    leaves = Activity.leaves
    monkeypatch.setattr(Activity, "leaves", lambda self, s, e, *more: leaves(self, s, e, *more)[:1])


def test_a_gradient_is_judged_before_a_model_uses_it(monkeypatch, tmp_path):
    monkeypatch.setattr(emit, "cache_folder", lambda name: tmp_path / name)
    square = differentiable(out("out", N), inp("inp", N))(square_forward)
    assert not square.judged
    engine_of(square)
    assert square.judged
    halved(monkeypatch)

    def wrong_forward(out, inp):
        for i in prange(inp.shape[0]):
            out[i] = inp[i] * inp[i]

    wrong = differentiable(out("out", N), inp("inp", N))(wrong_forward)
    with pytest.raises(UserError, match="wrong: its generated gradient disagrees with the slope"):
        engine_of(wrong)


def logs_forward(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = np.float32(np.log(inp[i]))


def nothing_forward(out, inp):
    for i in prange(inp.shape[0]):
        out[i] = np.log(-inp[i] * inp[i])


def test_a_gradient_is_compared_where_its_forward_is_finite():
    logs = differentiable(out("out", N), inp("inp", N))(logs_forward)
    logs.judge()
    assert logs.judged
    with pytest.raises(UserError, match=r"test_users.py:\d+: .*it is not finite for any of"):
        differentiable(out("out", N), inp("inp", N))(nothing_forward).judge()


@pytest.mark.parametrize("factor", [np.float32(2), np.float32(3)])
def test_a_number_from_around_the_function_is_the_one_of_this_function(factor):
    def scaled_forward(out, inp):
        for i in prange(inp.shape[0]):
            out[i] = inp[i] * factor

    op = differentiable(out("out", N), inp("inp", N))(scaled_forward)
    function = registry.KERNELS[op.backward.name, "generated"].function
    assert getattr(function, "py_func", function).__globals__["factor"] == factor


def test_an_op_outside_the_subset_registers_nothing():
    def lost_forward(out, inp):
        while inp[0] > 0:
            out[0] = inp[0]

    before = set(registry.KERNELS)
    with pytest.raises(UserError, match="While"):
        differentiable(out("out", N), inp("inp", N))(lost_forward)
    assert set(registry.KERNELS) == before
    assert "lost_forward" not in ops.ALL


class Tiny(nn.Module):
    def __init__(self):
        self.wte, self.ln = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 11)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        x = x + F.gelu(F.attention(self.qkv(self.ln(x)), 2))
        return self.loss(self.head(x), targets)


def test_a_model_trains_with_no_derivative_by_hand():
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 11, (2, 5)), "targets": rng.integers(0, 11, (2, 5))}
    shapes = dict.fromkeys(batch, ((2, 5), "int32"))
    losses = {}
    for swaps in ((), ("*_backward=generated",)):
        engine = Engine(Tiny(), shapes, choice=Choice("vanilla", swaps))
        losses[swaps] = [engine.step(**batch, lr=1e-2).loss for _ in range(12)]
    backward = [k for k in engine.kernels if "backward" in k.op.name]
    assert {k.variant for k in backward} == {"generated"}
    a, b = losses.values()
    assert np.allclose(a, b, rtol=1e-4)
    assert b[-1] < 0.8 * b[0]


def test_check_gradient_passes_for_every_op_and_fails_for_a_wrong_reference(monkeypatch, capsys):
    assert main(["check", "--gradient", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["gradients"]
    assert {g["op"] for g in told} == {op.name for op in ops.ALL.values() if op.inverts}
    assert max(g["error"] for g in told) < 1e-7
    op = ops.gelu_backward
    monkeypatch.setattr(op, "reference", lambda dout, inp: {"dinp": dout * inp})
    assert check_gradient(ops.gelu_forward)[0].verdict == "wrong"
    assert main(["check", "--gradient", "gelu"]) == 1
    with pytest.raises(UserError, match="no declared backward"):
        check_gradient(ops.adamw)
    assert main(["check", "--gradient", "gelo"]) == 2


def test_a_result_that_is_not_a_number_fails():
    result = gradient.GradientResult("op", None, "dx", 1.0, (float("nan"),) * 5)
    assert result.verdict == "wrong"


def test_a_generated_backward_is_printed_with_its_plan_and_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["new-kernel", "layernorm", "--backward", "--plan", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "def layernorm_backward(dinp, dinp_add," in said
    assert "# 27: d = inp[bt, i] - m" in said
    assert "kept: the backward is given 'mean'" in said
    assert "summed by each chunk" in said
    html = page.read_text()
    assert html.count("<section>") == 1
    assert 'data-line="27"' in html
    assert main(["new-kernel", "layernom", "--backward"]) == 2
    assert "did you mean" in capsys.readouterr().err


def cast_forward(out, inp):
    for i in prange(inp.shape[0]):
        x = np.float32(inp[i])
        out[i] = x * x * np.float32(0.3)


def test_a_cast_to_float32_roughens_no_comparison():
    """The reference, an op's own text, is float64 throughout."""
    cast = differentiable(out("out", N), inp("inp", N))(cast_forward)
    (found,) = check_gradient(cast.backward)
    assert found.error < 1e-14


def truncated(y, x, n):
    for i in prange(x.shape[0]):
        y[i] = x[i] * math.trunc(3.0 * x[i])
        for _ in range(n[i]):
            y[i] += np.trunc(x[i])


def test_an_index_may_stay_below_a_number_and_a_kernel_may_truncate():
    op = differentiable(out("y", N), inp("x", N), index("n", N, below=3))(truncated)
    assert {r.verdict for r in op.check()} == {"right"}


MADE: dict[str, Any] = {}
exec("def made(y, x):\n    for i in range(x.shape[0]):\n        y[i] = x[i]", MADE)
ODD = {
    "by exec": (MADE["made"], "made has no source to read"),
    "a lambda": (lambda y, x: None, "<lambda> has no source to read"),
    "a lambda by eval": (eval("lambda y, x: None"), "<lambda> has no source to read"),
    "builtin": (len, "built-in function len> is no Python function"),
    "of numpy": (np.sin, "'sin'> is no Python function"),
    "number": (7, "7 is no Python function"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_function_without_source_is_an_error_of_one_line(kind):
    function, why = ODD[kind]
    with pytest.raises(UserError, match=why) as e:
        differentiable(out("y", N), inp("x", N))(function)
    assert "\n" not in str(e.value)
    assert "def" in str(e.value)  # what to write


@pytest.mark.parametrize("size", [0, -1, 2.5, "N", True, None])
def test_a_size_is_a_symbol_or_a_whole_number(size):
    for declare in (lambda: out("y", size), lambda: inp("y", N, size), lambda: index("y", N, below=size)):
        with pytest.raises(UserError, match=re.escape(f"'y' has the size {size!r}; expected a whole number above 0")):
            declare()
    assert str(index("y", N, below=np.int64(3)).below) == "3"
