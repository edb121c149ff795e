"""Optimizers: each against its formula in float64, by every route, through checkpoints, flags and patterns."""

import inspect
import json
from dataclasses import replace

import numpy as np
import pytest
from small_models import batch
from small_runs import SIZES
from verbs import error_of, fails, goes_on

from cpuopt import Choice, cli, ops
from cpuopt.building import build
from cpuopt.check.cases import Case, arguments
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.ops.optimizer import BLOCK
from cpuopt.ops.rounding import draw_of
from cpuopt.ops.storage import TYPES
from cpuopt.program.fuse import FUSIONS
from cpuopt.train import checkpoint
from cpuopt.train.job import Settings
from cpuopt.train.resume import resumed

TINY, B, T = replace(PRESETS["gpt2-tiny"], n_layer=1), 2, 16
NEW = [name for name in ops.OPTIMIZERS if name != ops.USUAL]
HYPER = {"sgd": {"lr": 0.1, "momentum": 0.8}, "lion": {"lr": 1e-3, "beta1": 0.8, "beta2": 0.95}}
DECAY, HALF = 0.1, TYPES["bfloat16"].dtype


def engine(optimizer, variant="vanilla", fuse=(), **more):
    how = {"choice": Choice(variant), "fuse": fuse, "optimizer": optimizer, "threads": 1, **more}
    return Engine.from_options(GPT2(TINY), specs(B, T), **how)


def sgd(p, state, g, decay, lr, momentum):
    """``torch.optim.SGD(momentum=momentum, weight_decay=decay)``, whose first velocity is the first gradient."""
    g = g + decay * p
    velocity = g if state is None else momentum * state + g
    return p - lr * velocity, velocity


def lion(p, state, g, decay, lr, beta1, beta2):
    """Chen et al. 2023, algorithm 2, as its authors' ``lion_pytorch.py`` has it: decay first."""
    m, p = np.zeros(p.shape) if state is None else state, p * (1 - lr * decay)
    return p - lr * np.sign(m * beta1 + g * (1 - beta1)), m * beta2 + g * (1 - beta2)


FORMULA = {"sgd": sgd, "lion": lion}


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_five_steps_follow_the_formula(name, clip):
    """Weights in float64 of their own: the gradients of each step are those at the engine's."""
    one, ghost = engine(name), engine(ops.USUAL)
    want = {n: (p.astype(float), None) for n, p in one.parameters().items()}
    sure = {n: np.ones(p.shape, bool) for n, p in one.parameters().items()}
    for step in range(5):
        for n, p in ghost.parameters().items():
            p[...] = one.parameters()[n]
        ghost.forward(**batch(step))
        ghost.run("backward")
        gradients = {n: g.astype(float) for n, g in ghost.gradients().items()}
        scale = min(1.0, clip / np.sqrt(sum((g * g).sum() for g in gradients.values()))) if clip else 1.0
        for n, (p, state) in want.items():
            decay = 0.0 if p.ndim == 1 else DECAY
            if name == "lion":  # rounding decides the sign where two terms cancel
                direction = 0.8 * (0.0 if state is None else state) + 0.2 * scale * gradients[n]
                sure[n] &= (direction == 0) | (abs(direction) > 1e-5 * abs(direction).max())
            want[n] = FORMULA[name](p, state, gradients[n] * scale, decay, **HYPER[name])
        one.step(**batch(step), **HYPER[name], weight_decay=DECAY, vector_decay=0.0, clip=clip)
        ((_, states),) = one.states().items()
        for n, p in one.parameters().items():
            assert abs(p - want[n][0])[sure[n]].max() <= 1e-5 * abs(want[n][0]).max() + 1e-7, n
            assert sure[n].mean() > 0.6, n
            assert abs(states[n] - want[n][1]).max() <= 1e-5 * abs(want[n][1]).max() + 1e-7, n


ROUTES = [("vanilla", ()), ("optimized", ()), ("vanilla", tuple(FUSIONS)), ("optimized", tuple(FUSIONS))]


def losses(name, variant, fuse):
    made = engine(name, variant, fuse)
    return [made.step(**batch(i), **HYPER[name], weight_decay=DECAY).loss for i in range(4)], made


@pytest.mark.parametrize("name", NEW)
def test_the_same_by_every_route(name):
    plain, _ = losses(name, *ROUTES[0])
    assert plain[0] != plain[-1]
    for variant, fuse in ROUTES[1:]:
        found, made = losses(name, variant, fuse)
        np.testing.assert_allclose(found, plain, rtol=2e-5)
        called = {c.op.name for c in made.program.calls}
        fused = {f"{op}_{name}" for op in ("matmul_update", "classifier_update", "embedding_update")}
        assert fused <= called if fuse else not fused & called
        assert {k.variant for k in made.kernels if k.op.name in fused} <= {variant}


# Patterns


def test_optimizers_by_pattern():
    mixed = engine({"*": "adamw", "*.bias": "sgd"}, fuse=("update",))
    assert set(mixed.states()) == {"adam_m", "adam_v", "sgd_velocity"}
    assert all(n.endswith(".bias") for n in mixed.states()["sgd_velocity"])
    assert {c.op.name for c in mixed.program.calls} & {"matmul_update", "matmul_update_sgd"} == set()  # of two kinds
    before = {n: p.copy() for n, p in mixed.parameters().items()}
    mixed.step(**batch(0), lr=0.0, sgd={"lr": 0.1})
    changed = {n for n, p in mixed.parameters().items() if not np.array_equal(p, before[n])}
    assert changed
    assert all(n.endswith(".bias") for n in changed)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("adam", "optimizer 'adam': there is no such; did you mean 'adamw'?"),
        ({"*": "sgd", "*.byas": "lion"}, "no parameter matches '*.byas'"),
        (None, "optimizer 'None': expected a name, or names by patterns of parameters"),
        *((odd, "expected a name, or names by patterns") for odd in (["sgd"], {"*": None})),
        ({"*.bias": "lion"}, "no pattern matches 'wte.weight'; add '*' before the others"),
    ],
)
def test_what_no_optimizer_can_be(optimizer, words):
    assert words in error_of(build, GPT2(TINY), specs(B, T), optimizer=optimizer)


def test_a_number_that_the_optimizer_does_not_have_is_refused():
    fails("momentum: adamw has no such number", engine("adamw").step, **batch(0), momentum=0.5)


# The command line


TRAIN = ["train", "--model", SIZES, "-B", "2", "-T", "8", "--variant", "vanilla", "--lr", "0.01", "--val-every", "0"]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"sgd": {"mometum": 0.5}}, "sgd: .*expected numbers by name, of lr, momentum"),
        *(({"sgd": 0.1}, "sgd: 0.1; expected numbers by name"), ({"sgd": {"step": 1}}, "expected numbers by name")),
        *(({"lr": float("nan")}, "lr nan: expected 0 or more"), ({"lr": "fast"}, "lr fast: expected a number")),
        ({"momentum": 2}, "momentum 2: expected 0 or more, and less than 1"),
        ({"momentum": None}, "momentum None: expected a number"),
        ({"vector_decay": float("nan")}, "vector_decay nan: expected 0 or more"),
        ({"clip": -1.0}, "clip -1.0: expected a positive number"),
    ],
)
def test_numbers_that_no_step_can_use(numbers, words):
    made = engine("sgd")
    before = {n: x.copy() for n, x in made.parameters().items()}
    fails(words, made.step, **batch(0), **numbers)
    assert all((before[n] == x).all() for n, x in made.parameters().items())


def test_defaults_are_those_of_the_optimizer():
    assert Settings().numbers == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    assert Settings(optimizer="lion", beta1=0.5).numbers == {"beta1": 0.5, "beta2": 0.99, "weight_decay": 0.0}
    assert replace(Settings(optimizer="sgd"), B=2).numbers == {"momentum": 0.9, "weight_decay": 0.0}


@pytest.mark.parametrize("name", NEW)
def test_a_run_goes_on_bit_for_bit(name, tmp_path, capsys):
    """The states are in files of the optimizer's own."""
    flags, said = [*TRAIN, "--optimizer", name, "--weight-decay", "0.1"], f"the run has optimizer '{name}', not 'adamw'"
    one = goes_on(capsys, tmp_path, *flags, refused=["--optimizer", "adamw"], said=said)
    (state,) = (f"{name}_{s.name}.safetensors" for s in ops.OPTIMIZERS[name].states)
    assert checkpoint.TENSORS[name] == ("params.safetensors", state)
    assert {f.name for f in one.glob("*.safetensors")} == {*checkpoint.TENSORS[name]}
    assert json.loads((one / "state.json").read_text())["settings"]["optimizer"] == name


def test_states_of_another_optimizer_are_damage(tmp_path):
    assert cli.main([*TRAIN, "--optimizer", "sgd", "--save-every", "1", "--steps", "1", "--runs", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/checkpoints/step-00000001")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["lion_m.safetensors"] = manifest["files"].pop("sgd_velocity.safetensors")
    (path / "sgd_velocity.safetensors").rename(path / "lion_m.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest))
    fails("has the settings of sgd and the states of lion: it is damaged", checkpoint.verify, path)


def test_a_run_of_an_earlier_version_has_adamw(tmp_path):
    assert cli.main([*TRAIN, "--save-every", "1", "--steps", "1", "--runs", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/checkpoints/step-00000001")
    found = checkpoint.verify(path)
    settings = {n: x for n, x in found.state["settings"].items() if n not in ("optimizer", "momentum")}
    old = replace(found, state={**found.state, "settings": settings})
    assert resumed(old, {}).optimizer == "adamw"
    fails("the run has optimizer 'adamw', not 'sgd'", resumed, old, {"optimizer": "sgd"})


@pytest.mark.parametrize("name", ops.OPTIMIZERS)
def test_a_reference_gives_large_arrays_what_it_gives_small_ones(name: str) -> None:
    op, sizes = ops.OPTIMIZERS[name], {"N": 2 * BLOCK + 7}
    given = arguments(op, Case(sizes), np.random.default_rng(0))
    by_blocks = op.reference.__wrapped__  # type: ignore[attr-defined]  # without the parameter's copy
    given = {n: x for n, x in given.items() if n in inspect.signature(by_blocks.__wrapped__).parameters}
    whole = by_blocks.__wrapped__(**given)  # the rule itself
    found = op.reference(**given)
    for result, x in whole.items():
        np.testing.assert_array_equal(found[result], x)
    np.testing.assert_array_equal(found["copy"], whole["param"])


def test_moments_in_bfloat16_decay_without_a_gradient():
    """v falls as beta2^n within 2 %; rounded to nearest, it would stay where it is."""
    kernel = registry.KERNELS["adamw", "optimized"].of({"m": "bfloat16", "v": "bfloat16"})
    kernel.compile()
    run, n = kernel.direct().function, 4096
    param, grad, none = np.ones(n, np.float32), np.zeros(n, np.float32), np.empty(0, np.float32)
    m, v = np.zeros(n, HALF), np.full(n, 0.7, np.float32).astype(HALF)
    start, steps = float(v.astype(np.float32).mean()), 2000
    for step in range(1, steps + 1):
        run(param, m, v, none, grad, 0.0, 0.9, 0.999, 1e-8, 0.0, 1.0, step, draw_of(0, step), 0)
    assert float(v.astype(np.float32).mean()) / start == pytest.approx(0.999**steps, rel=0.02)


def moments_of(fuse=FUSIONS, steps=4, threads=2, variant="vanilla", **more):
    how = {"choice": Choice(variant), "fuse": tuple(fuse), "moments": "bfloat16", "seed": 0, **more}
    made = Engine.from_options(GPT2(TINY), specs(B, T), threads=threads, **how)
    losses = [made.step(lr=1e-3, **batch(i)).loss for i in range(steps)]
    return made, losses, {f"{s}/{n}": x.tobytes() for s, of in made.states().items() for n, x in of.items()}


WAYS = [(ops.USUAL, "vanilla"), *((name, "optimized") for name in ops.OPTIMIZERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "variant"), WAYS)
def test_training_with_moments_in_bfloat16_is_near_that_in_float32(optimizer, variant):
    _, losses, _ = moments_of(variant=variant, optimizer=optimizer)
    whole = engine(optimizer, variant, tuple(FUSIONS))
    np.testing.assert_allclose(losses, [whole.step(lr=1e-3, **batch(i)).loss for i in range(4)], rtol=5e-3)
    assert moments_of((), variant=variant, optimizer=optimizer)[1] == pytest.approx(losses, rel=1e-4)


def test_a_parameter_takes_ten_bytes_with_its_copy():
    how = {"choice": Choice("optimized"), "fuse": tuple(FUSIONS), "moments": "bfloat16", "dtype": "bfloat16"}
    built = build(GPT2(TINY), specs(B, T), **how)
    plan, parameters = built.plan().describe(), built.program.parameters
    n = sum(p.nbytes // 4 for p in parameters)
    read = sum(p.nbytes // 4 for p in parameters if len(p.shape) == 2 and "wpe" not in p.name)
    assert plan["parameters"] + plan["moments"] + plan["copies"] == 8 * n + 2 * read
