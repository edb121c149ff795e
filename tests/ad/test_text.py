"""The text of a generated backward: what it quotes, what it keeps, and what is said of its precision."""

import itertools
import re

import numpy as np
import pytest
from numba import prange

import cpuopt.kernels  # noqa: F401  (registers)
from cpuopt import differentiable, nn, ops
from cpuopt.ad import differentiate, prune
from cpuopt.cli import main
from cpuopt.engine import Engine
from cpuopt.kernels import doubles, registry
from cpuopt.kernels.generated.load import backward
from cpuopt.ops.declaration import B, C, inp, out

QUOTE = re.compile(r" *(# \d+): .*")


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


def test_a_line_of_the_forward_is_quoted_once_above_its_group():
    texts = [backward(op, registry.KERNELS[op.inverts.name, "vanilla"]).text for op in ops.ALL.values() if op.inverts]
    assert len(texts) > 20
    for text in texts:
        lines = text.splitlines()
        quotes = [found[1] for line in lines if (found := QUOTE.fullmatch(line))]
        assert quotes
        assert all(a != b for a, b in itertools.pairwise(quotes))
        assert not any(re.search(r"\S +# \d+: ", line) for line in lines)


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
    "y[b] = x[b] * 0.5": True,
    "y[b] = x[b] * HALF": False,
    "y[b] = x[b] * np.float32(0.5)": False,
    "y[b] = x[b] * np.float64(0.5)": True,
    "y[b] = x[b] / x.shape[0]": True,
    "y[b] = x[b] / np.float32(x.shape[0])": False,
    "y[b] = 1 / (1 + np.exp(-x[b]))": True,
    "y[b] = x[b] ** 2": False,
    "y[b] = max(x[b], 0.0)": True,
    "y[b] = x[b] if x[b] > 1e-6 else np.float32(0)": False,
    "y[b] = 0.0": False,
    "y[b] = x[b] * k": True,
    "s = 0.0\n        s += x[b]\n        y[b] = s": True,
    "e = np.empty(3)\n        e[0] = x[b]\n        y[b] = e[0]": True,
    "e = np.empty(3, np.float32)\n        e[0] = x[b]\n        y[b] = e[0]": False,
    "y[b] = np.float32(b * 0.5) * x[b]": False,
    "v = x.reshape(1, x.shape[0])\n        y[b] = v[0, b] * v[0, b]": False,
}


@pytest.mark.parametrize("line", LINES)
def test_what_computes_in_float64_is_told(line):
    tree = doubles.ast.parse(f"def f(y, x, k):\n    for b in prange(x.shape[0]):\n        {line}\n").body[0]
    known = {"y": "float32", "x": "float32", "k": "float64"}
    found = doubles.Doubles(known, {"np": np, "HALF": np.float32(0.5)}, tree).first
    assert bool(found) == LINES[line]


class Model(nn.Module):
    def __init__(self, op):
        self.op, self.loss = op, nn.CrossEntropyLoss()
        self.w, self.head = nn.Parameter((4,), nn.constant(1.0)), nn.Linear(4, 3)

    def forward(self, x, y):
        return self.loss(self.head(self.op(x, self.w)), y)


NOTE = r"in_double_forward\[vanilla\] computes in float64 from line \d+ on: 'g = 1 / \(1 \+ np.exp\(-x\[b, t\]\)\)'; "


def test_a_model_and_the_command_say_so(capsys):
    single, double = (differentiable(*ARGUMENTS)(f) for f in (recurrence, in_double))
    notes = [doubles.note(registry.KERNELS[op.forward.name, "vanilla"]) for op in (single, double)]
    assert notes[0] == ""
    assert re.match(NOTE, notes[1])
    assert notes[1] in Engine(Model(double), {"x": ((2, 4), "float32"), "y": ((2,), "int32")}).notes
    assert main(["new-kernel", "in_double", "--backward"]) == 0
    assert re.search(NOTE, " ".join(capsys.readouterr().err.split()))
