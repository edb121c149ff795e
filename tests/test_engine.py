"""Steps: the same numbers by every route, AdamW and clipping against NumPy, and what a batch must be."""

from dataclasses import replace

import numba
import numpy as np
import pytest
from verbs import error_of

from cpuopt import Choice, nn
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS, Config
from cpuopt.program.fuse import FUSIONS

TINY = PRESETS["gpt2-tiny"]
B, T = 2, 16
ADAMW = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def batch(seed=0, vocab=TINY.vocab_size):
    ids = np.random.default_rng(seed).integers(0, vocab, (B, T + 1))
    return {"tokens": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}


def gpt2(variant="vanilla", swaps=(), threads=1, config=TINY, **kw):
    return Engine.from_options(GPT2(config), specs(B, T), choice=Choice(variant, swaps), threads=threads, **kw)


def bits(engine):
    return {name: array.tobytes() for name, array in engine.parameters().items()}


# The same numbers by every route


ROUTES = [("vanilla", (), 1.0), ("optimized", (), 1.0), ("optimized", tuple(FUSIONS), None)]


@pytest.mark.parametrize(("variant", "fuse", "clip"), ROUTES)
def test_the_same_bits_on_any_number_of_threads(variant, fuse, clip):
    config = replace(TINY, n_embd=96, n_head=3, vocab_size=1003)
    ids, runs = np.random.default_rng(0).integers(0, config.vocab_size, (3, 3, 49)), set()
    for threads in 1, 2, 3, 4:
        engine = Engine.from_options(GPT2(config), specs(3, 48), choice=Choice(variant), fuse=fuse, threads=threads)
        assert engine.threads == threads
        steps = [engine.step(tokens=b[:, :-1], targets=b[:, 1:], lr=1e-2, clip=clip) for b in ids]
        assert len({s.loss for s in steps}) == 3
        runs.add((tuple(steps), *bits(engine).values()))
    assert len(runs) == 1


MIXED = "matmul_backward@lm_head=vanilla", "matmul@h.0.attn.*=vanilla"


@pytest.mark.parametrize(("variant", "swaps"), [("blas", ()), ("vanilla", ("matmul@h.1.*=blas",)), ("blas", MIXED)])
def test_the_same_loss_by_every_route(variant, swaps):
    one, other = gpt2(), gpt2(variant, swaps)
    for i in (0, 1):
        a, b = (e.step(**batch(i), **ADAMW, clip=1.0) for e in (one, other))
        assert (b.loss, b.grad_norm) == (pytest.approx(a.loss, rel=1e-5), pytest.approx(a.grad_norm, rel=1e-4))


def test_the_same_seed_the_same_bits_and_another_seed_others():
    one, two, other = gpt2(seed=3), gpt2(seed=3), gpt2(seed=4)
    assert bits(one) == bits(two)
    differs = {name for name, b in bits(other).items() if b != bits(one)[name]}
    assert differs == {name for name in bits(one) if ".ln_" not in f".{name}" and not name.endswith("bias")}
    assert one.step(**batch()) == two.step(**batch()) != other.step(**batch())
    assert bits(one) == bits(two)


def test_initial_weights_depend_on_the_name_alone():
    small, deep = gpt2(), gpt2(config=Config(3, 2, 64, 256, 64))
    assert bits(small)["h.0.mlp.c_fc.weight"] == bits(deep)["h.0.mlp.c_fc.weight"]
    assert bits(small)["h.0.mlp.c_fc.weight"] != bits(small)["h.1.mlp.c_fc.weight"]
    weights = gpt2(config=Config(2, 2, 128, 256, 64)).parameters()
    assert weights["wte.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert weights["h.0.mlp.c_proj.weight"].std() == pytest.approx(0.02 / 2, rel=0.02)
    assert (weights["ln_f.weight"] == 1).all()
    assert not weights["h.0.mlp.c_proj.bias"].any()


def test_a_forward_alone_changes_nothing_and_an_engine_may_only_forward():
    engine, only = gpt2(), gpt2(train=False)
    before, loss = bits(engine), engine.forward(**batch())
    assert loss == engine.loss == only.forward(**batch()) == engine.step(**batch()).loss
    assert bits(only) == before != bits(engine)
    assert only.plan.total_bytes < engine.plan.total_bytes
    assert loss == pytest.approx(np.log(TINY.vocab_size), rel=0.05)


# The update


def adamw(state, gradients, step, lr, beta1, beta2, eps, weight_decay):
    """Loshchilov and Hutter 2019, algorithm 2, on a dict of (param, m, v) in float64."""
    for name, g in gradients.items():
        param, m, v = state[name]
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        param = param * (1 - lr * weight_decay) - lr * (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
        state[name] = param, m, v


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_steps_follow_adamw_with_clipping(clip):
    engine, ghost = gpt2(), gpt2()  # the ghost gives the gradients at the same weights
    state = {name: (p.astype(float), np.zeros(p.shape), np.zeros(p.shape)) for name, p in engine.parameters().items()}
    for step in (1, 2, 3):
        for name, p in ghost.parameters().items():
            p[...] = engine.parameters()[name]
        ghost.forward(**batch(step))
        ghost.run("backward")
        gradients = {name: g.astype(float) for name, g in ghost.gradients().items()}
        norm = np.sqrt(sum((g * g).sum() for g in gradients.values()))
        assert 0.5 < norm < 100.0
        scale = min(1, clip / norm) if clip else 1
        adamw(state, {name: g * scale for name, g in gradients.items()}, step, **ADAMW)
        done = engine.step(**batch(step), **ADAMW, clip=clip)
        assert (done.loss, done.grad_norm) == (ghost.loss, pytest.approx(norm, rel=1e-5))
        for name, p in engine.parameters().items():
            want, m, v = state[name]
            assert abs(p - want).max() <= 1e-5 * abs(want).max() + 1e-3 * ADAMW["lr"], (step, name)
            assert abs(engine.array(f"{name}.m") - m).max() <= 1e-5 * abs(m).max() + 1e-8, (step, name)
            assert abs(engine.array(f"{name}.v") - v).max() <= 1e-5 * abs(v).max() + 1e-12, (step, name)
    assert engine.step_number == 3


def test_a_model_with_an_unused_layer_can_be_clipped():
    class Spare(nn.Module):
        def __init__(self):
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, y):
            return F.cross_entropy(self.used(x), y)

    engine = Engine.from_options(Spare(), {"x": ((5, 4), "float32"), "y": ((5,), "int32")}, threads=1)
    engine.step(x=np.ones((5, 4)), y=np.zeros(5, int), clip=1.0)


# Batches


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": None}, "inputs are (tokens); expected (tokens, targets)"),
        ({"mask": 1}, "inputs are (tokens, targets, mask); expected (tokens, targets)"),
        ({"tokens": np.zeros((B, T + 1), int)}, "input 'tokens' has shape (2, 17); expected (2, 16)"),
        ({"targets": np.zeros(B * T, int)}, "input 'targets' has shape (32,); expected (2, 16)"),
        ({"tokens": (1, 5, 256)}, "input 'tokens' holds 256 at (1, 5); expected ids from 0 to 255"),
        ({"tokens": (0, 0, -1)}, "input 'tokens' holds -1 at (0, 0); expected ids from 0 to 255"),
        ({"tokens": (0, 3, -100)}, "input 'tokens' holds -100 at (0, 3)"),
        ({"targets": (1, 15, 256)}, "input 'targets' holds 256 at (1, 15)"),
        ({"targets": (0, 0, -99)}, "input 'targets' holds -99 at (0, 0)"),
        ({"targets": (0, 0, 2**32)}, "input 'targets' holds 4294967296 at (0, 0)"),
        ({"tokens": np.zeros((B, T))}, "input 'tokens' has type float64; expected int32"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(changes, words):
    engine, given = gpt2(train=False), batch()
    for name, change in changes.items():
        if isinstance(change, tuple):
            *at, given[name][tuple(at)] = change
        else:
            given[name] = change
    assert words in error_of(engine.load, **{name: v for name, v in given.items() if v is not None})


def test_ids_of_every_integer_type_are_taken():
    engine = gpt2(train=False)
    losses = {engine.forward(**{n: v.astype(t) for n, v in batch().items()}) for t in ("u1", "i2", "i4", "u4", "i8")}
    assert len(losses) == 1


# FLOPs


def test_the_declared_flops_are_six_a_parameter_and_token():
    config = PRESETS["gpt2-124M"]
    program = build(GPT2(config), specs(4, 64)).program
    assert (config.n_params, program.flops) == (124_439_808, pytest.approx(6 * config.n_params * 4 * 64, rel=0.03))
    forward, backward = (sum(c.flops for c in program.phase(p)) for p in ("forward", "backward"))
    assert backward == pytest.approx(2 * forward, rel=0.02)
    attention = sum(c.flops for c in program.calls if c.layer == "h.0.attn")
    assert attention == pytest.approx(7 * 4 * 64 * 65 * config.n_embd, rel=0.02)  # two products forward, five backward


class One(nn.Module):
    def __init__(self):
        self.fc = nn.Linear(4, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.fc(x), y)


class Copy(nn.Module):
    def __init__(self):
        self.wte, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.wte(tokens)), tokens)


FOREIGN = "not a value of this engine's program"
MISSING = "no value 'lm_head.matmul.output' in the program; did you mean 'lm_head.matmul.out'?"


def load_for_two_uses():
    Engine.from_options(Copy(), {"tokens": ((B, T), "int32")}, threads=1).load(tokens=np.full((B, T), -100))


def of_type(x, **more):
    return Engine.from_options(One(), {"x": ((2, 4), x), "y": ((2,), "int32")} | more, threads=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: of_type("int32"), "argument 'inp' is int32; expected float32"),
        (lambda: of_type("float64"), "argument 'inp' is float64; expected float32"),
        (lambda: of_type("float99"), "input 'x' is declared float99; expected float32, bfloat16, float16"),
        (lambda: of_type("float32", z=((2,), "int32")), "does not take the inputs (x, y, z)"),
        (lambda: gpt2(threads=5), "threads = 5: expected 1 to 4"),
        (lambda: gpt2(threads=5), "set NUMBA_NUM_THREADS=5 before Python starts"),
        (lambda: gpt2(threads=0), "threads = 0"),
        (lambda: gpt2(train=False).step(**batch()), "train=False"),
        *((lambda s=s: gpt2(seed=s), f"seed {s!r}: expected a whole number of 0 or more") for s in (-1, 0.5, "1")),
        (lambda: gpt2(train=False).array("lm_head.matmul.output"), MISSING),
        (lambda: gpt2(train=False).array(gpt2(train=False).program.parameters[0]), FOREIGN),
        (load_for_two_uses, "holds -100"),  # an id must suit every use of its input
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(wrong, words):
    assert words in error_of(wrong)


def test_an_update_runs_on_the_threads_of_its_engine_whatever_accept_has_run():
    engine = gpt2(threads=2)  # all gradients come before the update, since nothing is fused
    counts, runner = [], engine.runner

    def counting(calls):
        counts.append(numba.get_num_threads())
        runner(calls)

    def accept(step):
        numba.set_num_threads(1)
        return True

    engine.runner = counting
    engine.step(**batch(), accept=accept)
    assert {*counts} == {2}
