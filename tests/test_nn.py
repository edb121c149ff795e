"""Operators on values, and the modules of the Llama family: what they compute, and what they refuse."""

import numpy as np
import pytest
from small_models import Parts
from verbs import fails

from cpuopt import functional as F
from cpuopt import nn
from cpuopt.engine import Engine

RNG, INPUTS = np.random.default_rng(0), {"x": ((4, 6), "float32"), "y": ((4,), "int32")}
BATCH = {"x": RNG.standard_normal((4, 6), np.float32), "y": np.array([0, 5, 2, -100], np.int32)}


def model_of(function):
    """What a function makes of two linear layers' results, and the cross-entropy of that."""
    parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
    return Parts(lambda m, x, y: (F.cross_entropy(made := function(m.a(x), m.b(x)), y), made), **parts)


EXPRESSIONS = [
    *("a * b", "2 * a", "a * 0.5", "a - b", "-a", "a * a", "a + a"),
    *("a - a * b", "-(a * a) * a + 3 * b", "a * np.float32(2)"),
]


def loss_of(function, weights):
    """The loss in float64, from weights and biases by name."""
    wide = {n: w.astype(np.float64) for n, w in weights.items()}
    a, b = (BATCH["x"] @ wide[f"{n}.weight"].T + wide[f"{n}.bias"] for n in "ab")
    made = function(a, b)
    top = made.max(axis=-1, keepdims=True)
    logs = made - top - np.log(np.exp(made - top).sum(axis=-1, keepdims=True))
    return -np.mean([logs[i, t] for i, t in enumerate(BATCH["y"]) if t != -100]), made


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_operators_compute_as_numbers_do(text):
    function = eval(f"lambda a, b: {text}")
    engine = Engine.from_options(model_of(function), INPUTS, threads=1)
    weights = {n: p.copy() for n, p in engine.parameters().items()}
    loss, made = loss_of(function, weights)
    assert engine.forward(**BATCH) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(engine.array(engine.program.outputs[1]), made, rtol=1e-4, atol=1e-6)
    engine.run("backward")
    gradients, rng = engine.gradients(), np.random.default_rng(1)
    for n, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        ends = [loss_of(function, {**weights, n: weights[n] + s * 1e-5 * direction})[0] for s in (1, -1)]
        assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-6)


def takes(function):
    """A model that makes logits (2, 5, 8) of its input by a function of itself and of that."""
    parts = {"norm": nn.RMSNorm(4), "table": nn.Embedding(8, 2)}
    return Parts(lambda m, x, y: F.cross_entropy(function(m, x), y), **parts)


attend = F.scaled_dot_product_attention
CAUSAL, SHORT = {"is_causal": True, "head_size": 2}, nn.RotaryEmbedding(4, 3)
HOSTILE = [
    (lambda m, x: x * m.norm.weight, r"x \* y: shapes \(2, 5, 8\) and \(4,\); expected sizes that are equal or 1"),
    (lambda m, x: F.residual(x, m.norm.weight), r"residual: shapes \(2, 5, 8\) and \(4,\) differ; x \+ y broadcasts"),
    (lambda m, x: x - F.linear(x, m.table.weight), "argument 'weight' has shape"),
    (lambda m, x: x + float("inf"), "scale: the shift is inf; expected a finite number"),
    (lambda m, x: x * "2", r"x \* y: y is str; expected a value, a parameter or a number"),
    (lambda m, x: np.ones(8) * x, r"x \* y: y is ndarray; .*; an array of NumPy is an input .*, or nn.Buffer"),
    (lambda m, x: x / 0, "x / 0: expected another number"),
    (lambda m, x: x @ x, r"write F.linear\(x, weight\)"),
    (lambda m, x: x**2, r"write products, as in x \* x"),
    (lambda m, x: x[0], "reshape, sum and transpose select axes"),
    (lambda m, x: F.relu(x) if x > 0 else x, "a model has no branches; write F.relu"),
    (lambda m, x: x.sum(3), r"sum: dim=3 of the shape \(2, 5, 8\); expected -3 to 2"),
    (lambda m, x: x.mean((1, -2)), r"sum: dim=\(1, -2\) of the shape .*; expected axes, each once"),
    (lambda m, x: x.transpose(0, 7), r"transpose: dim=7 of the shape"),
    (lambda m, x: x.reshape(3, -1), r"reshape: a value of shape \(2, 5, 8\) cannot have the shape \(3, -1\)"),
    (lambda m, x: x.reshape(-1, -1, 80), "cannot have the shape"),
    (lambda m, x: x.expand(4, 5, 8), r"expand: a value of shape \(2, 5, 8\) cannot have the shape \(4, 5, 8\)"),
    (lambda m, x: x.expand(8), "expand: a value of shape"),
    (lambda m, x: F.dropout(x, 1), "dropout: p = 1; expected a probability, 0 or more and below 1"),
    (lambda m, x: F.dropout(x, float("nan")), "dropout: p = nan"),
    (lambda m, x: x * float("nan"), "scale: the factor is nan; expected a finite number"),
    (lambda m, x: x * -1e39, "scale: the factor is -1e\\+39; expected a finite number of float32"),
    (lambda m, x: x - None, r"x - y: y is NoneType; expected a value"),
    (lambda m, x: 1 / x - "1", r"x - y: y is str"),
    (lambda m, x: nn.RotaryEmbedding(3, 9)(x), "RotaryEmbedding: head_size = 3, of which 3 rotate; expected even"),
    (lambda m, x: nn.RMSNorm(3)(x), "rms_norm: rows of 8 channels; expected a multiple of weight's 3"),
    (lambda m, x: F.rms_norm(x, m.table.weight), "argument 'weight' has shape"),
    (lambda m, x: F.rotary_embedding(x, m.table.weight, m.table.weight), "no gradient for 'cos'.*nn.Buffer"),
    (lambda m, x: nn.RotaryEmbedding(6, 9)(x), "rotary_embedding: 8 channels; expected a multiple of the head size 6"),
    (lambda m, x: nn.RotaryEmbedding(4, 9)(x), "is no parameter of the model; make its module in __init__"),
    (lambda m, x: SHORT(x), "T = 5 is beyond the model's context of 3 positions"),
    (lambda m, x: attend(x, x, x, head_size=2), "only is_causal=True is supported"),
    (
        lambda m, x: attend(x, x, x, is_causal=True, head_size=3),
        "query has 8 channels; expected a multiple of head_size = 3",
    ),
    (
        lambda m, x: attend(x, F.linear(x, m.key.weight), x, **CAUSAL),
        "4 query heads and 3 key heads; expected a multiple of these",
    ),
    (
        lambda m, x: attend(x, *[F.linear(x, m.half.weight)] * 2, **CAUSAL),
        "4 query heads and 2 key heads; expected as many, or enable_gqa=True",
    ),
    (lambda m, x: attend(x, F.linear(x, m.half.weight), x, enable_gqa=True, **CAUSAL), "argument 'v' has shape"),
]


@pytest.mark.parametrize(("function", "match"), HOSTILE, ids=[match[:40] for _, match in HOSTILE])
def test_hostile_use_is_refused_in_one_line(function, match):
    model = takes(function)
    model.key, model.half = nn.Linear(8, 6), nn.Linear(8, 4)
    fails(match, Engine.from_options, model, {"x": ((2, 5, 8), "float32"), "y": ((2, 5), "int32")})


def test_a_buffer_is_a_constant_of_the_program():
    parts = {"a": nn.Linear(6, 8), "rotary": nn.RotaryEmbedding(4, 9, base=100.0)}
    turns = Parts(lambda m, x, y: (F.cross_entropy(turned := m.rotary(m.a(x)), y), turned), **parts)
    batch = {"x": RNG.standard_normal((2, 5, 6), np.float32), "y": np.ones((2, 5), np.int32)}
    engine = Engine.from_options(turns, {"x": ((2, 5, 6), "float32"), "y": ((2, 5), "int32")}, threads=1)
    assert engine.parameters().keys() == {"a.weight", "a.bias"}  # so a checkpoint has no tables
    assert [v.name for v in engine.program.constants] == ["rotary.cos", "rotary.sin"]
    angles = np.arange(5)[:, None] * 100.0 ** (-np.arange(2) / 2)  # of 9 positions, those that there are
    for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
        np.testing.assert_allclose(engine.array(f"rotary.{name}"), table, atol=1e-6)
    engine.forward(**batch)
    heads = (batch["x"] @ engine.parameters()["a.weight"].T + engine.parameters()["a.bias"]).reshape(2, 5, 2, 2, 2)
    turned = (heads[..., 0, :] + 1j * heads[..., 1, :]) * np.exp(1j * angles)[:, None]
    want = np.stack([turned.real, turned.imag], axis=-2).reshape(2, 5, 8)
    np.testing.assert_allclose(engine.array(engine.program.outputs[1]), want, rtol=1e-4, atol=1e-5)
    before = engine.array("rotary.cos").copy()
    engine.step(**batch, lr=0.1)
    np.testing.assert_array_equal(engine.array("rotary.cos"), before)


def test_modules_call_their_functionals():
    model = takes(lambda m, x: nn.SiLU()(m.norm(x)))
    engine = Engine.from_options(model, {"x": ((2, 5, 8), "float32"), "y": ((2, 5), "int32")}, train=False)
    made = [(c.op.name, c.layer, dict(c.given)) for c in engine.program.calls[:2]]
    assert made == [("rmsnorm_forward", "norm", {"G": 2}), ("silu_forward", "model", {})]


def test_a_parameter_filled_by_no_function_is_refused_where_it_is_made():
    fails(r"init is 1\.0; expected a function", nn.Parameter, (3,), 1.0)
