"""Types besides float32, and sizes that arguments do not fix: ops that have them, from trace to check."""

from dataclasses import replace

import numba
import numpy as np
import pytest
from small_models import Parts
from verbs import fails

from cpuopt import functional as F
from cpuopt import nn, ops
from cpuopt.check.cases import SMALL, Case, calls_alike, case, cases
from cpuopt.check.check import check
from cpuopt.check.fences import check_fenced
from cpuopt.check.gradient import check_gradient
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.files.reading import from_json, to_json
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.kernels.registry import Kernel, Scratch
from cpuopt.lab import ab
from cpuopt.nn.trace import current
from cpuopt.ops.declaration import BT, C, N, Op, acc, inp, out

ANY = ("float32", "float64", "float16")
DOUBLE = ("float64",)


def declare(name, *args, flops=2 * N, reference, inverts=None):
    return Op(name, *args, label="", flops=flops, reference=reference, source="", inverts=inverts)


widen_forward = declare(
    "widen_forward", out("out", N, types=DOUBLE), inp("inp", N), reference=lambda inp: {"out": inp * 1.1}
)
widen_backward = declare(
    "widen_backward",
    *(acc("dinp", N), inp("dout", N, types=DOUBLE)),
    reference=lambda dout: {"dinp": dout * 1.1},
    inverts=widen_forward,
)
scale_forward = declare(
    "scale_forward",
    *(out("out", BT, C), inp("inp", BT, C), inp("weight", C, types=ANY)),
    flops=BT * C,
    reference=lambda inp, weight: {"out": inp * weight},
)
scale_backward = declare(
    "scale_backward",
    *(acc("dinp", BT, C), acc("dweight", C, reduces=BT, types=ANY)),
    *(inp("dout", BT, C), inp("inp", BT, C), inp("weight", C, types=ANY)),
    flops=3 * BT * C,
    reference=lambda dout, inp, weight: {"dinp": dout * weight, "dweight": (dout * inp).sum(axis=0)},
    inverts=scale_forward,
)


def widen(out, inp):
    out[:] = inp.astype(np.float64) * 1.1


def widen_back(dinp, dinp_add, dout):
    dinp[:] = dout * 1.1 + (dinp if dinp_add else 0)


def scale(out, inp, weight, order):
    for c in range(len(weight)):
        order[c] = len(weight) - 1 - c
    for row in range(len(out)):
        for c in range(len(weight)):
            at = order[c]
            out[row, at] = inp[row, at] * np.float32(weight[at])


def scale_back(dinp, dinp_add, dweight, dweight_add, dout, inp, weight):
    dinp[:] = dout * weight + (dinp if dinp_add else 0)
    total = np.float32 if dweight.dtype == np.float16 else dweight.dtype
    dweight[:] = (dout.astype(total) * inp).sum(axis=0) + (dweight if dweight_add else 0)


def kernel(op, function):
    return Kernel(op, "vanilla", function, (Scratch("order", C, "int32"),) * (op is scale_forward))


MADE = ((widen_forward, widen), (widen_backward, widen_back), (scale_forward, scale), (scale_backward, scale_back))
KERNELS = {op.name: kernel(op, function) for op, function in MADE}


@pytest.fixture
def registered(monkeypatch):
    for k in KERNELS.values():
        monkeypatch.setitem(registry.KERNELS, (k.op.name, "vanilla"), k)


class Scaled(nn.Module):
    """Logits, scaled by a float32 weight that is made a float64."""

    def __init__(self):
        self.fc, self.weight = nn.Linear(4, 3), nn.Parameter((3,), nn.normal(1))

    def forward(self, x, targets):
        weight = current().emit(widen_forward, {"inp": self.weight})
        logits = current().emit(scale_forward, {"inp": self.fc(x), "weight": weight})
        return F.cross_entropy(logits, targets), logits


INPUTS = {"x": ((2, 4), "float32"), "targets": ((2,), "int32")}
BATCH = {"x": np.arange(8, dtype=np.float32).reshape(2, 4) / 8, "targets": np.array([2, 0], np.int32)}


def test_a_float64_value_and_an_int32_scratch_go_through_a_training_step(registered):
    del registry.KERNELS["scale_forward", "vanilla"]
    jit.kernel(scale_forward, "vanilla", scratch=[("order", C, "int32")], parallel=False)(scale)
    engine = Engine.from_options(Scaled(), INPUTS)
    calls = {c.op: c for c in engine.program.calls}
    forward, backward = calls[scale_forward], calls[scale_backward]
    # trace and reverse: what widens makes a float64, and its gradient takes its type
    assert {v.dtype for v in (forward.args["weight"], backward.args["dweight"])} == {"float64"}
    assert calls[widen_backward].args["dout"] is backward.args["dweight"]
    assert forward.types == {"weight": "float64"}
    assert (backward.types, forward.bytes) == ({"weight": "float64", "dweight": "float64"}, 4 * (6 + 6) + 8 * 3)
    assert backward.bytes == 4 * (6 + 6 + 6) + 8 * (3 + 3)
    # the variant's signature follows from the values' types
    (bound,) = [b for b in engine.calls if b.call is forward]
    (compiled,) = bound.kernel.function.signatures
    assert [a.dtype for a in compiled] == [numba.float32, numba.float32, numba.float64, numba.int32]
    # the arena
    order, weight = engine.plan.scratch[forward]["order"], forward.args["weight"]
    assert (order.nbytes, order.dtype) == (12, "int32")
    assert (weight.nbytes, engine.array(weight).dtype) == (24, "float64")
    assert [x.dtype for x in bound.args] == ["float32", "float32", "float64", "int32"]
    (other,) = engine.rebound(bound, KERNELS["scale_forward"].of(forward.types))
    third = other.args[3]
    assert (third.dtype, third.shape, third.ctypes.data % 64) == (np.int32, (3,), 0)
    # the engine
    old = {n: x.copy() for n, x in engine.parameters().items()}
    hidden = BATCH["x"] @ old["fc.weight"].T + old["fc.bias"]
    logits = hidden * (old["weight"] * 1.1)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert engine.forward(**BATCH) == pytest.approx(-np.log(probs[[0, 1], BATCH["targets"]]).mean(), rel=1e-5)
    engine.run("backward")
    dlogits = (probs - np.eye(3)[BATCH["targets"]]) / 2
    np.testing.assert_allclose(engine.gradients()["weight"], (dlogits * hidden).sum(axis=0) * 1.1, rtol=1e-4, atol=1e-6)
    engine.step(**BATCH)
    assert all((x != old[n]).any() for n, x in engine.parameters().items())
    # the check, on the sizes and types of the calls
    for c in (forward, backward, calls[widen_forward]):
        k = registry.KERNELS[c.op.name, "vanilla"].of(c.types)
        assert check(k, Case.of(c), threads=(1,)).verdict == "right"
    # a comparison of two kernels, on the types of the call
    shape = from_json(Case, to_json(calls_alike([forward])[0]))
    assert shape.types == forward.types
    k = registry.KERNELS["scale_forward", "vanilla"]
    assert ab.Alone((k, k), shape, 0).slots[0]["weight"].dtype == "float64"


@pytest.mark.parametrize("dtype", ANY)
def test_a_parameter_of_another_type_starts_from_the_same_numbers(registered, dtype):
    def one(dtype):
        def forward(m, x, targets):
            return F.cross_entropy(current().emit(scale_forward, {"inp": x, "weight": m.weight}), targets)

        return Parts(forward, weight=nn.Parameter((3,), nn.normal(1), dtype))

    inputs = {"x": ((2, 3), "float32"), "targets": ((2,), "int32")}
    engines = (Engine.from_options(one(d), inputs, train=False) for d in ("float32", dtype))
    usual, engine = (e.parameters()["weight"] for e in engines)
    assert engine.dtype == dtype
    np.testing.assert_array_equal(engine, usual.astype(dtype))


def test_a_type_that_an_op_does_not_take_is_refused(registered):
    class Wrong(Scaled):
        def forward(self, x, targets):
            weight = current().emit(widen_forward, {"inp": self.weight})
            return F.cross_entropy(self.fc(x), targets), current().emit(widen_forward, {"inp": weight})

    fails(r"in layer 'model': argument 'inp' is float64; expected float32$", Engine.from_options, Wrong(), INPUTS)


# The check ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_right_kernels_pass_with_every_type(name):
    kernel = KERNELS[name]
    told = [check(kernel, on) for on in [case(kernel.op, SMALL), *(c for c in cases(kernel.op) if c.types)]]
    assert [str(r) for r in told if r.verdict != "right"] == []
    assert {t for r in told for t in r.case.types.values()} == ({"float64", "float16"} if "scale" in name else set())
    assert check_fenced(kernel.of({}), case(kernel.op, SMALL), (1,), 0) == ""
    assert all(r.verdict == "right" for r in check_gradient(kernel.op))


def result(function, op, types=None, sized=False):
    k, on = kernel(op, function).of(types or {}), case(op, SMALL, types=types)
    return check(k, replace(on, adds={}, sized=True) if sized else on, threads=(1, 2)[: 2 - sized])


@pytest.mark.parametrize("sized", [False, True])
def test_tolerances_follow_the_type(sized):
    def in_float32(out, inp):
        out[:] = inp * np.float32(1.1)

    assert result(widen, widen_forward, sized=sized).verdict == "right"
    assert result(in_float32, widen_forward, sized=sized).verdict == "wrong"

    def off_by(relative):
        def function(dinp, dinp_add, dweight, dweight_add, *read):
            scale_back(dinp, dinp_add, dweight, dweight_add, *read)
            dweight[:] = dweight * np.float32(1 + relative)

        return function

    half = dict.fromkeys(("weight", "dweight"), "float16")
    for types, relative, verdict in [
        (half, 1e-5, "right"), (half, 1e-2, "wrong"), (None, 1e-3, "wrong"), (None, 1e-7, "right")
    ]:  # fmt: skip
        assert result(off_by(relative), scale_backward, types, sized).verdict == verdict, (types, relative)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("dtype", ANY)
def test_what_is_not_written_is_seen(dtype, sized):
    def forgets_the_last(dinp, dinp_add, dweight, dweight_add, *read):
        kept = dweight[-1]
        scale_back(dinp, dinp_add, dweight, dweight_add, *read)
        dweight[-1] = kept

    types = dict.fromkeys(("weight", "dweight"), dtype) if dtype != "float32" else {}
    assert "as filled before the call, so not written" in result(forgets_the_last, scale_backward, types, sized).reason


def test_a_size_that_no_argument_fixes_is_asked_for():
    model = Parts(lambda m, x: F.mean(current().emit(ops.attention_forward, {"qkv": x})))
    with pytest.raises(UserError, match="layer 'model': no argument fixes NH; give its size: emit"):
        Engine.from_options(model, {"x": ((2, 3, 6), "float32")})
