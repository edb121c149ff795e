"""Sizes that arguments do not fix: an op with two goes through trace, reverse, rewrite, arena, engine and check."""

import numpy as np
import pytest

from cpuopt import functional as F
from cpuopt import nn, ops
from cpuopt.check.cases import Case, cases
from cpuopt.check.check import check
from cpuopt.check.gradient import check_gradient
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.registry import Kernel, Scratch
from cpuopt.nn.trace import current
from cpuopt.ops.declaration import Op, acc, inp, out, symbols
from cpuopt.program.program import Call

N, R, W = symbols("N R W")
"""R: the powers that are made, which only the output has; W: rounds of work, which no array has."""


def reference_forward(inp, out):
    return {"out": inp[:, None] ** np.arange(1, out.shape[1] + 1)}


def reference_backward(dout, inp):
    r = np.arange(1, dout.shape[1] + 1)
    return {"dinp": (dout * r * inp[:, None] ** (r - 1)).sum(axis=1)}


powers_forward = Op(
    "powers_forward", out("out", N, R), inp("inp", N), label="", flops=N * R * W, reference=reference_forward, source=""
)
powers_backward = Op(
    "powers_backward",
    acc("dinp", N, reduces=R),
    inp("dout", N, R),
    inp("inp", N),
    label="",
    flops=2 * N * R * W,
    reference=reference_backward,
    source="",
    inverts=powers_forward,
)


def forward(out, inp, work):
    work[:] = 1 / len(work)
    for r in range(out.shape[1]):
        out[:, r] = inp ** (r + 1)


def backward(dinp, dinp_add, dout, inp, work):
    work[:] = 1 / len(work)
    dinp[:] = reference_backward(dout, inp)["dinp"] + (dinp if dinp_add else 0)


def kernel(op, function, variant="vanilla"):
    return Kernel(op, variant, function, (Scratch("work", W),))


@pytest.fixture
def registered(monkeypatch):
    for op, function in ((powers_forward, forward), (powers_backward, backward)):
        monkeypatch.setitem(registry.KERNELS, (op.name, "vanilla"), kernel(op, function))


class Powers(nn.Module):
    def __init__(self, **sizes):
        self.weight, self.sizes = nn.Parameter((5,), nn.uniform(1)), sizes

    def forward(self, targets):
        logits = current().emit(powers_forward, {"inp": self.weight}, **self.sizes)
        return F.cross_entropy(logits, targets), logits


def engine(**sizes):
    return Engine(Powers(**sizes), {"targets": ((5,), "int32")})


def test_a_size_that_no_argument_fixes_reaches_all_that_reads_sizes(registered):
    made = engine(R=3, W=70)
    calls = {c.op: c for c in made.program.calls}
    for op, count in ((powers_forward, 5 * 3 * 70), (powers_backward, 2 * 5 * 3 * 70)):
        assert calls[op].sizes == {"N": 5, "R": 3, "W": 70}
        assert calls[op].flops == count
        assert made.plan.scratch[calls[op]]["work"].shape == (70,)
        case = Case.of(calls[op])
        assert case.sizes["W"] == 70
        assert check(registry.KERNELS[op.name, "vanilla"], case).verdict == "right"
    assert calls[powers_backward].inverts is calls[powers_forward]
    assert "W" not in calls[ops.adamw].sizes
    targets = np.arange(5, dtype=np.int32) % 3
    weight = made.parameters()["weight"].copy().astype(float)
    logits = weight[:, None] ** np.arange(1, 4)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert made.forward(targets=targets) == pytest.approx(-np.log(probs[np.arange(5), targets]).mean(), rel=1e-6)
    made.run("backward")
    dout = (probs - np.eye(3)[targets]) / 5
    np.testing.assert_allclose(
        made.gradients()["weight"], reference_backward(dout, weight)["dinp"], rtol=1e-5, atol=1e-7
    )


def test_the_cases_of_a_check_have_the_size():
    assert all(case.sizes.keys() == {"N", "R", "W"} for case in cases(powers_forward) + cases(powers_backward))
    assert all(r.verdict == "right" for r in check_gradient(powers_forward))


def test_a_kernel_that_relies_on_another_size_is_caught():
    def mutant(out, inp, work):
        forward(out, inp, work[: out.shape[1]])
        out *= len(work) / out.shape[1]

    case = Case({"N": 5, "R": 3, "W": 70})
    assert check(kernel(powers_forward, forward), case).verdict == "right"
    assert check(kernel(powers_forward, mutant), case).verdict == "wrong"


def test_a_size_that_is_neither_fixed_nor_given_is_named(registered):
    with pytest.raises(UserError, match="layer 'model': no argument fixes W; give its size: emit"):
        engine(R=3)
    with pytest.raises(UserError, match="no argument fixes R"):
        engine(W=3)


def test_a_size_that_is_given_must_agree_with_the_arguments(registered):
    program = engine(R=3, W=70).program
    call = next(c for c in program.calls if c.op is powers_forward)
    with pytest.raises(
        UserError, match=r"'out' has shape \(5, 3\); expected .* = \(5, 4\), because the call fixes R = 4"
    ):
        Call(powers_forward, "layer", call.args, given={"R": 4})
    with pytest.raises(KeyError, match="W"):  # what becomes of a call that loses its sizes
        _ = Call(powers_forward, "layer", call.args).flops
