"""The generated backward: its calls and flags, and its gradients against float64 and central differences."""

import inspect

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from small_models import Parts
from verbs import fails

from cpuopt import Choice, nn
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine

B, T, W, V, HEADS = 2, 3, 4, 5, 2
FLOATS = {"x": ((B, T, W), "float32"), "targets": ((B, T), "int32")}
TOKENS = {"x": ((B, T), "int32"), "targets": ((B, T), "int32")}


def program_of(model, inputs=FLOATS):
    return build(model, inputs).program


def model_of(forward, bent=lambda loss: loss, **parts):
    """A forward of its own over named parts; what it returns goes through a head to a loss."""
    return Parts(
        lambda m, x, targets: bent(F.cross_entropy(m.head(forward(m, x)), targets)), **parts, head=nn.Linear(W, V)
    )


def linear(width=W):
    return nn.Linear(W, width)


# Calls and flags


def backward(program, layer):
    return [c for c in program.phase("backward") if c.layer == layer]


def adds_to(program, gradient):
    """The flags of a gradient's writers, in order."""
    written = ((call, arg.name) for call in program.phase("backward") for arg in call.op.written)
    return [call.adds[name] for call, name in written if call.args[name] is gradient]


def test_a_value_used_three_times_sums_three_gradients():
    def forward(self, x):
        h = self.first(x)
        return self.second(h) + (F.gelu(h) + h)

    program = program_of(model_of(forward, first=linear(), second=linear()))
    (h,) = next(c for c in program.calls if c.layer == "first").writes
    assert adds_to(program, program.adjoint[h]) == [False, True, True]


def test_what_the_loss_does_not_use_has_no_backward():
    def forward(self, x):
        self.unused(x)
        return self.used(x)

    program = program_of(model_of(forward, used=linear(), unused=linear()))
    assert backward(program, "unused") == []
    assert [p.name for p in program.parameters if p not in program.adjoint] == ["unused.weight", "unused.bias"]
    assert [c.layer for c in program.phase("update")] == ["used", "used", "head", "head"]


def test_inputs_have_no_gradient():
    program = program_of(model_of(lambda self, x: self.first(F.gelu(x)), first=linear()))
    assert [c.op.name for c in backward(program, "first")] == ["matmul_backward_weight"]
    assert [c.op.name for c in backward(program, "head")] == ["matmul_backward_input", "matmul_backward_weight"]
    assert not [c for c in program.phase("backward") if c.op.name == "gelu_backward"]
    assert {v.name for v in program.adjoint}.isdisjoint({"x", "targets"})


def test_one_parameter_given_twice_to_one_call_is_refused():
    scale = nn.Parameter((W,), nn.constant(1))
    model = model_of(lambda self, x: F.layer_norm(x, self.scale, self.scale), scale=scale)
    said = fails("layernorm_forward in layer 'model' is given one value twice", program_of, model)
    assert "two distinct values" in said


@pytest.mark.parametrize("fuse", [(), ("residual",)])
def test_the_gradient_that_the_loss_is_given_is_never_written(fuse):
    program = build(model_of(lambda m, x: x, lambda loss: loss + F.gelu(F.gelu(loss))), FLOATS, fuse=fuse).program
    given = program.inputs[-1]
    assert [str(call) for call in program.calls if given in call.writes] == []


# Gradients


def interpret(program, arrays, *phases):
    """Run a program through the float64 references of its ops; `arrays` holds what is given and takes what is made."""
    for call in program.phase(*phases):
        shapes, args = {a.name: tuple(d(call.sizes) for d in a.shape) for a in call.op.arrays}, {}
        for name in inspect.signature(call.op.reference).parameters:
            v = call.args[name]
            if name in shapes and v is not None:  # of what is written, a reference takes the shape only
                v = arrays[v].reshape(shapes[name]) if v in call.reads else np.zeros(shapes[name])
            args[name] = v
        made = call.op.reference(**args)
        for arg in call.op.written:
            if (v := call.args[arg.name]) is not None:
                result = np.asarray(made[arg.name], dtype=float).reshape(v.shape)
                arrays[v] = arrays[v] + result if call.adds.get(arg.name) else result
    return arrays


class Dag(nn.Module):
    """A random model: each step takes earlier values of shape (B, T, W) and makes one more."""

    def __init__(self, steps, on_tokens, two_losses):
        self.steps, self.two_losses = steps, two_losses
        self.wte = nn.Embedding(V, W) if on_tokens else None
        self.wpe = nn.Embedding(T + 1, W) if on_tokens else None
        self.shared = linear()
        self.parts = [self.part(kind) for kind, _, _ in steps]
        self.head = nn.Linear(W, V)
        if on_tokens:
            self.head.weight = self.wte.weight

    def part(self, kind):
        made = {
            "linear": lambda: linear(),
            "mlp": lambda: nn.Sequential(linear(6), nn.GELU(), nn.Linear(6, W, bias=False)),
            "norm": lambda: nn.LayerNorm(W, eps=0.1),
            "attention": lambda: linear(3 * W),
            "shared": lambda: self.shared,
        }
        return made[kind]() if kind in made else nn.Module()

    def forward(self, x, targets):
        values = [self.wte(x, self.wpe.weight) if self.wte else x]
        for (kind, i, j), part in zip(self.steps, self.parts, strict=True):
            a, b = values[i % len(values)], values[j % len(values)]
            if kind in ("gelu", "softmax"):
                values.append(getattr(F, kind)(a))
            elif kind == "residual":
                values.append(a + b if a is not b else F.gelu(a))
            else:
                values.append(F.attention(part(a), HEADS) if kind == "attention" else part(a))
        loss = F.cross_entropy(self.head(values[-1]), targets)
        return loss + F.cross_entropy(self.head(values[0]), targets) if self.two_losses else loss


KINDS = ["linear", "mlp", "norm", "attention", "shared", "gelu", "softmax", "residual", "residual"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(0, 20)), max_size=8)


LATE = [("linear", 0, 0)] * 2 + [("gelu", 1, 0), ("residual", 1, 2), ("linear", 3, 0), ("residual", 4, 5)]
"""One gradient of the first residual connection is added to before the other is read: they must not be one array."""


@settings(max_examples=60, phases=set(Phase) - {Phase.explain})
@given(STEPS, st.booleans(), st.booleans(), st.sampled_from([(), ("residual",)]), st.integers(0, 2**32 - 1))
@example([("attention", 0, 0), ("residual", 0, 1), ("norm", 2, 0), ("mlp", 3, 0)], True, True, (), 0)
@example([("shared", 0, 0), ("shared", 1, 0), ("softmax", 2, 0), ("residual", 0, 3)], False, True, ("residual",), 1)
@example(LATE, True, False, ("residual",), 2)
def test_gradients_of_random_models(steps, on_tokens, two_losses, fuse, seed):
    inputs = TOKENS if on_tokens else FLOATS
    engine = Engine.from_options(Dag(steps, on_tokens, two_losses), inputs, choice=Choice("blas"), fuse=fuse, threads=1)
    rng = np.random.default_rng(seed)
    for p in engine.parameters().values():
        p += rng.normal(0, 0.5, p.shape)
    x = rng.integers(0, V, (B, T)) if on_tokens else rng.normal(0, 1, (B, T, W)).astype(np.float32)
    targets = rng.integers(0, V, (B, T))
    targets[0, 0] = -100
    loss = engine.forward(x=x, targets=targets)
    engine.run("backward")

    program, gradients = engine.program, engine.gradients()
    start = {v: engine.array(v) for v in (*program.parameters, *program.inputs)}
    start = {v: array.astype(np.int64 if v.dtype == "int32" else np.float64) for v, array in start.items()}
    exact = interpret(program, dict(start), "forward", "backward")
    scale = max(abs(exact[g]).max() for g in program.adjoint.values())

    def loss_beside(p, step):
        return interpret(program, start | {p: start[p] + step}, "forward")[program.outputs[0]][0]

    assert loss == pytest.approx(exact[program.outputs[0]][0], rel=1e-5)
    for p in program.parameters:
        direction = rng.normal(size=p.shape)
        slope = (loss_beside(p, 1e-5 * direction) - loss_beside(p, -1e-5 * direction)) / 2e-5
        if p not in program.adjoint:
            assert slope == 0, f"{p} moves the loss and has no gradient"
            continue
        want = exact[program.adjoint[p]]
        assert slope == pytest.approx((want * direction).sum(), rel=1e-5, abs=1e-7 * scale), f"d({p})"
        assert abs(gradients[p.name] - want).max() <= 1e-4 * abs(want).max() + 1e-6 * scale, f"d({p})"
