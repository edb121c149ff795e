"""Values in models, as people write them: against PyTorch, and dropout against its formula."""

import sys
from pathlib import Path

import numpy as np
import pytest
from small_models import Parts
from verbs import fails

from cpuopt import Choice, Engine, build, nn, ops
from cpuopt import engine as core
from cpuopt import functional as F
from cpuopt.comm.threads import Team
from cpuopt.ops.dropout import keep

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))
from values_model import LR, SHAPES, STEPS, draw, forward  # noqa: E402

PARAMETERS, INPUTS = draw()


def parameter(x):
    return nn.Parameter(np.shape(x), lambda rng, array: np.copyto(array, x))


def net():
    """The model that PyTorch computed."""
    return Parts(lambda m, x, y: forward(F, m, x, y), **{name: parameter(PARAMETERS[name]) for name in SHAPES})


def engine_of(variant="optimized", threads=1):
    specs = {name: (x.shape, "float32") for name, x in INPUTS.items()}
    return Engine(net(), specs, variant=variant, threads=threads, gradients=True)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "values.npz") as file:
        return dict(file)


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
def test_loss_gradients_and_ten_updates_are_pytorchs_on_any_number_of_threads(golden, variant):
    runs = []
    for threads in (1, 3):
        engine = engine_of(variant, threads)
        steps = [engine.step(lr=LR, weight_decay=0.0, **INPUTS)]
        gradients = {name: x.copy() for name, x in engine.gradients().items()}
        steps += [engine.step(lr=LR, weight_decay=0.0, **INPUTS) for _ in range(STEPS - 1)]
        runs.append((steps, gradients, {name: x.copy() for name, x in engine.parameters().items()}))
    steps, gradients, weights = runs[0]
    np.testing.assert_allclose([s.loss for s in steps], golden["losses"], rtol=1e-5)
    assert gradients.keys() == SHAPES.keys()
    for name, x in gradients.items():
        want = golden[f"d{name}"]
        assert np.abs(x - want).max() < 1e-5 * np.abs(want).max(), name
    for other in runs[1:]:
        assert other[0] == steps
        assert all(np.array_equal(other[1][name], gradients[name]) for name in SHAPES)
        assert all(np.array_equal(other[2][name], weights[name]) for name in SHAPES)


# Shapes


def mean_of(function, **parts):
    """A function of a module and an input x, and the parts that it needs; the loss is the mean."""
    return Parts(lambda m, x: ((out := function(m, x)).mean(), out), **parts)


def ops_of(function, shape=(2, 3, 4), **parts):
    calls = build(mean_of(function, **parts), {"x": (shape, "float32")}, fuse="none").program.phase("forward")
    found = [c.op.name.removesuffix("_forward") for c in calls]
    return found[: found.index("sum")]  # of the mean


def test_a_shape_costs_no_call():
    assert ops_of(lambda m, x: F.relu(x.reshape(6, 4).view(-1)).reshape(4, 6)) == ["relu"]
    assert ops_of(lambda m, x: F.relu(x.transpose(1, 1).expand(2, -1, 4))) == ["relu"]
    assert ops_of(lambda m, x: x - 1) == ops_of(lambda m, x: 2 - x) == ["scale"]
    assert ops_of(lambda m, x: m.a * x, a=parameter(np.ones((2, 1, 1)))) == ["expand", "mul"]
    assert ops_of(lambda m, x: m.a / m.a + x, a=parameter(np.ones(4))) == ["reciprocal", "mul", "expand", "residual"]


def test_a_call_that_takes_another_shape_keeps_it_in_its_backward_and_is_not_fused():
    def function(m, x):
        y = x + m.fc(x)
        return y + m.norm(y.reshape(-1, 4)).reshape(2, 6)

    model = mean_of(function, fc=nn.Linear(6, 6), norm=nn.RMSNorm(4))
    program = build(model, {"x": ((2, 6), "float32")}, fuse="all").program
    (there,) = (c for c in program.phase("forward") if c.op is ops.rmsnorm_forward)
    (back,) = (c for c in program.calls if c.op is ops.rmsnorm_backward)
    assert (there.views, back.views) == ({"inp": (3, 4)}, {"dinp": (3, 4), "inp": (3, 4)})
    assert "residual_rmsnorm_forward" not in {c.op.name for c in program.calls}
    assert f"inp: {there.args['inp']} [3, 4]" in str(there)


def test_merged_axes_are_no_other_shape_to_a_loss():
    parts = {"fc": nn.Linear(4, 4), "head": nn.Linear(4, 7, bias=False)}
    head = Parts(lambda m, x, y: F.cross_entropy(m.head(m.fc(x)).reshape(-1, 7), y.reshape(-1)), **parts)
    inputs = {"x": ((2, 3, 4), "float32"), "y": ((2, 3), "int32")}
    assert "classifier_update" in {c.op.name for c in build(head, inputs, fuse="all").program.calls}


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda x: x.softmax(-1), r"x.softmax: write F.softmax\(x\)"),
        (lambda x: x.reshap(4), "a value of a model has no 'reshap'; did you mean 'reshape'?"),
        (lambda x: F.leaky_relu(x), "has no 'leaky_relu'; known: .*relu.*; @differentiable makes an op"),
    ],
)
def test_a_missing_function_names_another(use, match):
    with pytest.raises(AttributeError, match=match):
        ops_of(lambda m, x: use(x))


# Dropout

N, P = 1001, 0.3
X = np.random.default_rng(0).standard_normal((7, 143)).astype(np.float32)


def test_the_random_numbers_have_the_rate_and_mean_of_dropout():
    for p in (0.1, 0.5, 0.9):
        masks = np.array([keep(1 << 16, p, stream, 1, 1) for stream in range(4)])
        assert set(np.unique(masks)) == {0, 1 / (1 - p)}
        assert abs((masks == 0).mean() - p) < 5 * np.sqrt(p * (1 - p) / masks.size)
        assert abs(masks.mean() - 1) < 5 * np.sqrt(p / (1 - p) / masks.size)
    assert (keep(9, P, 0, 1, 0) == 1).all()


def test_other_numbers_are_other_masks():
    masks = [keep(1 << 14, 0.5, *numbers) for numbers in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (1, 1, 2)]]
    agree = [np.mean(x == y) for i, x in enumerate(masks) for y in masks[:i]]
    assert np.allclose(agree, 0.5, atol=5 / 2 / np.sqrt(1 << 14))
    shifted = [np.mean(masks[0][k:] == masks[0][:-k]) for k in (1, 2, 8, 64, 1024)]
    assert np.allclose(shifted, 0.5, atol=5 / 2 / np.sqrt((1 << 14) - 1024))


def dropped():
    """Two dropouts of the product with a parameter of ones, whose gradient shows the masks."""
    parts = {"weight": nn.Parameter(X.shape, nn.constant(1)), "dropout": nn.Dropout(P)}
    return Parts(lambda m, x: ((y := m.dropout(m.dropout(x * m.weight))).sum(), y), **parts)


def dropping(threads=1, seed=3, **how):
    return Engine(dropped(), {"x": (X.shape, "float32")}, gradients=True, threads=threads, seed=seed, **how)


def masks(engine, steps=1, **more):
    """The product of both masks of some steps, as the output has it; the backward drops the same."""
    found = []
    for _ in range(steps):
        engine.step(x=X, lr=0.0, **more)
        found.append(engine.array(engine.program.outputs[1]) / X)
        np.testing.assert_allclose(engine.gradients()["weight"], found[-1] * X, rtol=1e-6)
    return found


def test_a_step_drops_by_seed_and_step_and_an_evaluation_keeps_all():
    engine = dropping()
    first, second = masks(engine, 2)
    counters = [1 + step * core.MOST_MICRO_BATCHES for step in (0, 1)]
    for mask, counter in zip((first, second), counters, strict=True):
        want = keep(X.size, P, 0, 3, counter) * keep(X.size, P, 1, 3, counter)
        np.testing.assert_allclose(mask, want.reshape(X.shape), rtol=1e-6)
    for _ in range(2):
        engine.forward(x=X)
        np.testing.assert_array_equal(engine.array(engine.program.outputs[1]), X)
    again = dropping(threads=3)
    again.forward(x=X)
    assert all(np.array_equal(x, y) for x, y in zip(masks(again, 2), (first, second), strict=True))
    resumed = dropping(seed=None)
    resumed.parameters()["weight"].fill(1)
    resumed.step_number, resumed.dropout_seed = 1, 3
    assert np.array_equal(masks(resumed)[0], second)
    assert not np.array_equal(masks(dropping(seed=4))[0], first)


def test_ranks_drop_as_one_does():
    def work(comm):
        how = {"choice": Choice("vanilla"), "micro_batches": 4 // comm.size, "comm": comm, "threads": 1, "seed": 3}
        engine = core.Engine.from_options(dropped(), {"x": (X.shape, "float32")}, **how)
        return [engine.step(x=X, more=[{"x": X}] * (engine.micro_batches - 1), lr=0.1) for _ in range(2)], engine

    (alone, engine), *_ = Team(1).run(work)
    for size in (2, 4):
        for steps, other in Team(size).run(work):
            assert steps == alone
            assert np.array_equal(other.parameters()["weight"], engine.parameters()["weight"])
    assert alone[0].loss != alone[1].loss


# Mistakes, and shapes of what comes out ------------------------------------------------------------------------------


def scaled(first=lambda x: None):
    """A weight that is broadcast, and an output that is a reshape; `first` is given the input before."""
    parts = {"fc": nn.Linear(6, 12), "gain": nn.Parameter((12,), nn.constant(1.0)), "dropout": nn.Dropout(0.5)}

    def forward(m, x, y):
        first(x)
        z = m.dropout(m.fc(x) * m.gain)
        return F.cross_entropy(z, y), z.reshape(2, 2, 12)

    return Parts(forward, **parts)


def test_a_step_that_raises_leaves_no_dropout_behind():
    engine = Engine(scaled(), {"x": ((4, 6), "float32"), "y": ((4,), "int32")}, threads=1, micro_batches=2)
    x, y = np.ones((4, 6), np.float32), np.arange(4, dtype=np.int32)
    loss = engine.forward(x=x, y=y)
    fails("expected ids", engine.step, x=x, y=y, more=[{"x": x, "y": y + 99}])
    assert engine.forward(x=x, y=y) == loss


def test_gradients_and_outputs_have_the_shapes_that_were_written():
    engine = Engine(scaled(), {"x": ((4, 6), "float32"), "y": ((4,), "int32")}, threads=1, gradients=True)
    shapes = {name: p.shape for name, p in engine.parameters().items()}
    assert {name: g.shape for name, g in engine.gradients().items()} == shapes
    assert engine.array(engine.program.outputs[1]).shape == (2, 2, 12)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *(
            (lambda x: x.reshape("ab"), "a shape has the size 'a'"),
            (lambda x: F.relu(3), "'inp' is int; expected a value"),
        ),
        (lambda x: F.relu(np.ones(3)), "'inp' is ndarray; expected a value"),
        *((lambda x: abs(x), r"abs\(x\): write"), (lambda x: x % 2, "x % n and"), (len, "is no number")),
        (lambda x: x == 1, "x == y: the model is traced once"),
        (lambda x: x if x else 0, "if x: the model is traced once"),
        *((lambda x: x * float(x), "is no number"), (lambda x: np.float32(2) ** x, r"^a \*\* x")),
        (np.exp, r"^np.exp\(x\): .*; take one of cpuopt.functional, or write an op"),
        (np.tanh, r"^np.tanh\(x\): .*; write F.tanh\(x\)$"),
        (np.sum, r"^np.sum\(x\): .*; write x.sum\(...\)$"),
        (np.add.reduce, r"^np.add\(x\): a value of a model is no array of NumPy"),
        (np.asarray, r"^np.array\(x\): a value of a model has no elements"),
        (lambda x: x.sum(axis=1), r"^x.sum\(axis=...\): no such keyword; expected x.sum\(dim=None, keepdim=False\)$"),
        (lambda x: F.dropout(x, 0.5, True), r"^dropout: too many positional arguments; expected dropout\(x, p=0.5\)$"),
        (lambda x: nn.ReLU()(x, x), r"^ReLU.forward: too many positional arguments; expected ReLU.forward\(x\)$"),
    ],
)
def test_a_mistake_is_one_line(wrong, why):
    fails(why, build, scaled(wrong), {"x": ((4, 6), "float32"), "y": ((4,), "int32")})


def test_numbers_of_numpy_are_axes_and_sizes():
    def check(x):
        assert (x.sum(np.int64(1)).shape, x.reshape(np.int64(24)).shape) == ((4,), (24,))
        for number in (np.float32(2), np.float64(2), np.int64(2)):
            assert (number * x + number - (number - x / number)).shape == (number / -np.negative(x)).shape == x.shape

    build(scaled(check), {"x": ((4, 6), "float32"), "y": ((4,), "int32")})
