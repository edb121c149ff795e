"""The generated backward of every op: in float64, interpreted, planned and with everything recorded; its text.

Compiled in float32, on one thread and on several, each is compared with its reference in kernels/test_conformance.py.
"""

import hashlib
import itertools
import json
import os
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from numba import prange
from small_models import Parts

import cpuopt.kernels  # noqa: F401  (registers)
from cpuopt import check_gradient, differentiable, nn, ops
from cpuopt import functional as F
from cpuopt.ad import differentiate, emit, prune
from cpuopt.check.cases import SMALL, arguments, case, reference
from cpuopt.cli import main
from cpuopt.engine import Engine
from cpuopt.kernels import doubles, registry
from cpuopt.kernels.generated import REFUSED
from cpuopt.kernels.generated.load import backward
from cpuopt.ops.declaration import B, C, inp, out

GENERATED = [op for op in ops.ALL.values() if (op.name, "generated") in registry.KERNELS]
EVERY = pytest.mark.parametrize("op", GENERATED, ids=[op.name for op in GENERATED])


def wide(made):
    """A generated backward whose constants are float64 too, as plain Python."""
    text = made.text.replace("np.float32(", "np.float64(")
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return getattr(emit.load(f"{made.name}_wide", key, lambda: text), made.name)


def vanilla(op):
    return registry.KERNELS[op.inverts.name, "vanilla"]


def sizes_of(op):
    """How many elements each array of the forward has, and its scratch."""
    sizes = case(op.inverts, SMALL).sizes
    found = {a.name: prod(d(sizes) for d in a.shape) for a in op.inverts.arrays}
    return found | {s.name: s.elements(sizes) for s in vanilla(op).scratch}


def pullback(op, made, function):
    """A generated backward as what `check_gradient` calls: gradients overwritten, scratch poisoned."""

    def call(given):
        got, args = {a.name: given[a.name].copy() for a in op.args if a.kind == "acc"}, []
        for a in op.args:
            args += [got[a.name], False] if a.kind == "acc" else [given[a.name]]
        args += [np.full(factor * sizes_of(op)[like], np.nan) for factor, like in made.scratch.values()]
        with np.errstate(over="ignore"):  # of the integers in random numbers
            function(*args)
        return got

    return call


@EVERY
def test_interpreted_it_agrees_with_differences(op):
    made = backward(op, vanilla(op))
    results = check_gradient(op, pullback=pullback(op, made, wide(made)))
    assert max(r.error for r in results) < 1e-8, results


@EVERY
def test_it_agrees_with_a_plan_that_records_everything(op):
    forward, first, rng = vanilla(op), op.inverts, np.random.default_rng(0)
    before = {n: x.astype(float) if getattr(x, "dtype", None) == np.float32 else x
              for n, x in arguments(first, case(first, SMALL), rng).items()}  # fmt: skip
    after, wrt = {**before, **reference(first, before)}, [a.name[1:] for a in op.args if a.kind == "acc"]
    outs = [a.name[1:] for a in op.arrays if a.kind != "acc" and a.name not in first.by_name]
    adjoints = {f"d{n}": rng.standard_normal(after[n].shape) for n in outs}
    planned, everything = backward(op, forward), differentiate(forward.function, wrt, outs, record_all=True)
    got = pullback(op, planned, wide(planned))({**after, **adjoints, **{f"d{n}": after[n] * np.nan for n in wrt}})
    want = {f"d{n}": np.zeros_like(after[n]) for n in wrt}
    scratch = {s.name: np.full(sizes_of(op)[s.name], np.nan) for s in forward.scratch}
    with np.errstate(over="ignore"):
        wide(everything)(*({**before, **scratch, **adjoints, **want}[n] for n in everything.params))
    for n in want:
        assert np.abs(got[n] - want[n]).max() <= 1e-12 * (1 + np.abs(want[n]).max()), n


def test_every_op_with_a_derivative_has_a_generated_one_or_a_reason():
    assert {op.name for op in GENERATED} == {op.name for op in ops.ALL.values() if op.inverts}
    assert set(REFUSED) == ({op.name for op in ops.ALL.values() if not op.backwards} - {op.name for op in GENERATED})
    assert "matmul_backward_input and gelu_backward" in REFUSED["matmul_gelu_backward"]
    assert "no declared backward" in REFUSED["attention_decode"]


GOLDEN = Path(__file__).parent / "golden.json"
QUOTE = re.compile(r" *(# \d+): .*")


def test_the_text_of_every_generated_backward_is_as_it_was_and_quotes_a_line_once_above_its_group():
    made = {op.name: backward(op, vanilla(op)).text.splitlines() for op in GENERATED}
    for lines in made.values():
        quotes = [found[1] for line in lines if (found := QUOTE.fullmatch(line))]
        assert quotes
        assert all(a != b for a, b in itertools.pairwise(quotes))
        assert not any(re.search(r"\S +# \d+: ", line) for line in lines)
    texts = {n: [line for line in lines if not QUOTE.fullmatch(line)] for n, lines in made.items()}
    if "CPUOPT_RENEW" in os.environ:  # then read the difference
        GOLDEN.write_text(json.dumps(texts, indent=0) + "\n")
    assert texts == json.loads(GOLDEN.read_text())


def recurrence(y, x, w):
    for b in prange(x.shape[0]):
        h = np.float32(0)
        for t in range(x.shape[1]):
            g = np.float32(1) / (np.float32(1) + np.exp(-x[b, t]))
            h = g * h + x[b, t] * w[t]
            y[b, t] = h


def in_double(y, x, w):
    for b in prange(x.shape[0]):
        h = np.float32(0)
        for t in range(x.shape[1]):
            g = 1 / (1 + np.exp(-x[b, t]))
            h = g * h + x[b, t] * w[t]
            y[b, t] = h


ARGUMENTS = out("y", B, C), inp("x", B, C), inp("w", C)


def test_only_what_is_read_is_computed_and_recorded(monkeypatch):
    found = differentiable(*ARGUMENTS)(recurrence).generated.text
    sweep = found[: found.index("dh = ")]
    assert "np.exp(" not in sweep
    assert sweep.count("_was[") == 1

    def scaled(x, y):
        for i in prange(x.shape[0]):
            y[i] = np.exp(x[i])
        for i in prange(x.shape[0]):
            y[i] *= np.tanh(x[i])

    assert "was" not in differentiate(scaled, ["x"], ["y"]).text
    monkeypatch.setattr(prune.Prune, "remove", lambda self, body: False)
    assert "was" in differentiate(scaled, ["x"], ["y"]).text


LINES = {
    "y[b] = x[b] * 0.5": True, "y[b] = x[b] * HALF": False, "y[b] = x[b] * np.float32(0.5)": False,
    "y[b] = x[b] * np.float64(0.5)": True, "y[b] = x[b] / x.shape[0]": True,
    "y[b] = x[b] / np.float32(x.shape[0])": False, "y[b] = 1 / (1 + np.exp(-x[b]))": True, "y[b] = x[b] ** 2": False,
    "y[b] = max(x[b], 0.0)": True, "y[b] = x[b] if x[b] > 1e-6 else np.float32(0)": False, "y[b] = 0.0": False,
    "y[b] = x[b] * k": True, "s = 0.0\n        s += x[b]\n        y[b] = s": True,
    "e = np.empty(3)\n        e[0] = x[b]\n        y[b] = e[0]": True,
    "e = np.empty(3, np.float32)\n        e[0] = x[b]\n        y[b] = e[0]": False,
    "y[b] = np.float32(b * 0.5) * x[b]": False, "y[b] = load(x, b) * x[b]": False, "y[b] = full(x, b) * x[b]": False,
    "y[b] = np.full(3, 0.5)[b] * x[b]": True, "v = x.reshape(1, x.shape[0])\n        y[b] = v[0, b] * v[0, b]": False,
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_what_computes_in_float64_is_told(line):
    tree = doubles.ast.parse(f"def f(y, x, k):\n    for b in prange(x.shape[0]):\n        {line}\n").body[0]
    known = {"y": "float32", "x": "float32", "k": "float64"}
    assert bool(doubles.Doubles(known, {"np": np, "HALF": np.float32(0.5)}, tree).first) == LINES[line]


HELPED = """
def f(y, x):
    y[0] = helped(x[0]) + x[0]
def helped(v):
    {}
def other(v, k):
    return v * k
"""
HELPERS = {
    "return v * 0.5": {"return v * 0.5", "y[0] = helped(x[0]) + x[0]"}, "return v * HALF": set(),
    "return 0.5": {"y[0] = helped(x[0]) + x[0]"},
    "return v if v > 0 else 0.5": {"y[0] = helped(x[0]) + x[0]"},  # numba makes one type of both
    "other(v, k=0.5)": {"return v * k"}, "other(v, HALF)": set(),
}  # fmt: skip


@pytest.mark.parametrize("body", HELPERS)
def test_a_function_that_is_called_is_followed(body):
    text = HELPED.format(body)
    f, *others = doubles.ast.parse(text).body
    known, names = {"y": "float32", "x": "float32"}, {"np": np, "HALF": np.float32(0.5)}
    found = doubles.Doubles(known, names, f, {node.name: node for node in others}).made
    assert {text.splitlines()[n - 1].strip() for n in found} == HELPERS[body]
    assert doubles.Doubles(known, names, f).first == 0


def test_functions_that_call_each_other_end_soon():
    names = [f"f{i}" for i in range(300)]
    each = zip(names, [*names[1:], "f0"], strict=True)
    calls = "".join(f"def {a}(v):\n    return {b}({b}(v)) + {b}(1)\n" for a, b in each)
    nodes = {node.name: node for node in doubles.ast.parse(calls).body}
    found = doubles.Doubles({"v": "float32"}, {}, nodes["f0"], nodes)
    assert len(found.known) <= doubles.MOST
    assert found.made == []


NOTE = r"in_double_forward\[vanilla\] computes in float64 from line \d+ on: 'g = 1 / \(1 \+ np.exp\(-x\[b, t\]\)\)'; "


def test_a_model_and_the_command_say_so(capsys):
    single, double = (differentiable(*ARGUMENTS)(f) for f in (recurrence, in_double))
    notes = [doubles.note(registry.KERNELS[op.forward.name, "vanilla"]) for op in (single, double)]
    assert notes[0] == ""
    assert re.match(NOTE, notes[1])
    parts = {"w": nn.Parameter((4,), nn.constant(1.0)), "head": nn.Linear(4, 3)}
    model = Parts(lambda m, x, y: F.cross_entropy(m.head(double(x, m.w)), y), **parts)
    assert notes[1] in Engine.from_options(model, {"x": ((2, 4), "float32"), "y": ((2,), "int32")}).notes
    assert main(["new-kernel", "in_double", "--backward"]) == 0
    assert re.search(NOTE, " ".join(capsys.readouterr().err.split()))
