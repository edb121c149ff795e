"""Tracing, the check of a program, and its text, which has all calls, layers, shapes and gradients.

The texts of a one-block GPT-2, and of a one-block Llama with all rewrites, are kept in ``golden/``. To write them anew
after a change that is meant::

    CPUOPT_WRITE_GOLDEN=1 python -m pytest tests/test_program.py -k golden
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_models import Parts
from verbs import fails

from cpuopt import functional as F
from cpuopt import nn, ops
from cpuopt.building import build
from cpuopt.models import parse, specs
from cpuopt.models.gpt2 import GPT2, Config
from cpuopt.nn.trace import tracing
from cpuopt.program.fuse import FUSIONS
from cpuopt.program.program import Call, Program

GOLDEN = Path(__file__).parent / "golden"
ONE_BLOCK = Config(n_layer=1, n_head=3, n_embd=12, vocab_size=20, block_size=10)


def gpt2(T=8):
    return build(GPT2(ONE_BLOCK), specs(2, T)).program


# Tracing


def test_layers_are_restored_and_lists_are_numbered():
    parts = {"body": nn.Sequential(nn.Linear(3, 3), nn.GELU()), "loss": nn.CrossEntropyLoss()}
    twice = Parts(lambda m, x, y: m.loss(F.gelu(m.body(m.body(x))), y), **parts)
    program = build(twice, {"x": ((4, 3), "float32"), "y": ((4,), "int32")}, train=False).program
    assert [c.layer for c in program.calls] == ["body.layers.0", "body.layers.1"] * 2 + ["model", "loss"]
    names = [v.name for v in program.values]
    assert len(names) == len(set(names))
    assert [p.name for p in program.parameters] == ["body.layers.0.weight", "body.layers.0.bias"]


class Model(nn.Module):
    """Whatever a test wants of its inputs."""

    def __init__(self, forward):
        self.forward = forward


def weight(*shape):
    return nn.Parameter(shape, nn.constant(0.0))


OTHER_SHAPES = "shapes .2, 6. and .3, 4.; expected sizes that are equal or 1, from the last axis on"


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (lambda x: F.gelu(x), r"forward returned \(2, 6\); expected the loss, a value of shape \(1,\)"),
        (lambda x: None, "forward returned NoneType; expected the loss"),
        (lambda x: F.linear(x, weight(3, 5)), r"'weight' has shape \(3, 5\).*'inp' fixes C = 6"),
        (lambda x: F.attention(x, 1), r"'qkv' has shape \(2, 6\); expected \(B, T, 3\*C\)"),
        (lambda x: F.attention(x, 4), r"6 channels; expected a multiple of 3 \* n_head = 12"),
        (lambda x: x + F.softmax(F.cross_entropy(x, x)), "'targets' is float32; expected int32"),
        (lambda x: F.linear(x, weight(3, 6)), "'weight' is no parameter of the model; make its"),
        (lambda x: x + F.reshape(x, (3, 4)), OTHER_SHAPES),
        (lambda x: F.linear(x, None), "matmul_forward in layer 'model': argument 'weight' is missing"),
        (nn.Module().forward, "no forward method"),
    ],
)
def test_a_model_that_cannot_be_traced(forward, match):
    fails(match, build, Model(forward), {"x": ((2, 6), "float32")})


def test_a_sequence_beyond_the_context_is_refused():
    fails("T = 11 is beyond the model's context of 10 positions", gpt2, 11)


def test_a_trace_that_fails_leaves_no_trace_open():
    with pytest.raises(ZeroDivisionError), tracing({}):
        raise ZeroDivisionError
    fails(r"called outside a model: build an Engine\(model, inputs\)", F.gelu, Program().value("x", (3,)))


# The check


class ByHand:
    """A program with values x (given), a, b and c of one shape, and calls to them."""

    def __init__(self):
        self.program = Program()
        self.x, self.a, self.b, self.c = (self.program.value(name, (2, 3)) for name in "xabc")
        self.x.group = "input"
        self.program.inputs.append(self.x)

    def call(self, op, adds=None, **args):
        self.program.calls.append(Call(op, "layer", args, adds=adds or {}))

    def gelu(self, out, inp):
        self.call(ops.gelu_forward, out=out, inp=inp)

    def gelu_backward(self, dinp, add):
        self.call(ops.gelu_backward, {"dinp": add}, dinp=dinp, dout=self.x, inp=self.x)

    def residual_backward(self, dinp1, dinp2):
        self.call(ops.residual_backward, {"dinp1": False, "dinp2": False}, dinp1=dinp1, dinp2=dinp2, dout=self.x)


def test_verify_lets_a_right_program_through():
    p = ByHand()
    p.gelu(p.a, p.x)
    p.gelu_backward(p.b, add=False)
    p.gelu_backward(p.b, add=True)
    p.gelu(p.c, p.b)
    p.program.verify()


@pytest.mark.parametrize(
    ("match", "break_it"),
    [
        ("call 0, gelu_forward in layer 'layer': reads b, which no earlier", lambda p: p.gelu(p.a, p.b)),
        ("call 2, .*: 'out' overwrites a, which an earlier", lambda p: [p.gelu(out, p.x) for out in (p.a, p.b, p.a)]),
        ("'out' overwrites x", lambda p: [p.gelu(p.a, p.x), p.gelu(p.x, p.a)]),
        ("'dinp' overwrites a, which an earlier", lambda p: [p.gelu_backward(p.a, add=False) for _ in range(2)]),
        ("call 0, .*: reads a, which no earlier", lambda p: p.gelu_backward(p.a, add=True)),
        ("call 0, .*: x is given twice and written", lambda p: p.gelu_backward(p.x, add=True)),
        ("a is given twice and written; .* must be distinct", lambda p: p.residual_backward(p.a, p.a)),
        ("a is given twice", lambda p: [p.gelu(p.a, p.x), p.gelu(p.a, p.a)]),
        ("reads c, which no earlier", lambda p: p.call(ops.sumsq, out=p.program.value("s", (1,)), inp=p.c)),
    ],
)
def test_verify_notices(match, break_it):
    p = ByHand()
    break_it(p)
    fails(match, p.program.verify)


def test_a_call_of_the_wrong_shape_cannot_be_made():
    p = ByHand()
    why = r"gelu_forward: argument 'inp' has shape \(2, 3\); expected \(N\) = \(8,\), because 'out' fixes N = 8"
    fails(why, p.gelu, p.program.value("wide", (2, 4)), p.x)


# The text


def llama():
    sizes = {"num_hidden_layers": 1, "hidden_size": 12, "head_dim": 4, "intermediate_size": 20, "vocab_size": 20}
    config = replace(parse("llama-tiny"), **sizes, max_position_embeddings=10)
    return build(config.module(), specs(2, 8), fuse=tuple(FUSIONS)).program


TEXTS = [("program-1-block.txt", gpt2), ("program-1-block-llama.txt", llama)]


@pytest.mark.parametrize(("file", "program"), TEXTS, ids=["gpt2", "llama"])
def test_golden_text_of_one_block(file, program):
    text = "\n".join(program().lines("forward", "backward")) + "\n"
    if os.environ.get("CPUOPT_WRITE_GOLDEN"):
        (GOLDEN / file).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / file).read_text(encoding="utf-8"), "if this change is meant, see the top of this file"


def test_a_line_marks_what_is_written_and_takes_a_note():
    p = ByHand()
    p.gelu(p.a, p.x)
    p.gelu_backward(p.b, add=True)
    first, second = p.program.lines(note=lambda call: f" <{call.flops}>")
    assert first == f"{'layer':<20} gelu_forward(out = a [2, 3], inp: x [2, 3]) <54>"
    assert "gelu_backward(dinp += b [2, 3], dout: x" in second
