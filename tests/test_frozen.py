"""Parameters that are not trained: PyTorch's losses, no memory for gradient and states, and what a checkpoint has."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import small_runs
from golden.params import make_batch, make_params
from small_models import Parts
from small_runs import sealed
from verbs import fails

from cpuopt import Choice, nn
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.models.gpt2 import GPT2, Config
from cpuopt.program.fuse import FUSIONS
from cpuopt.train import checkpoint

WANT = json.loads((Path(__file__).parent / "golden" / "frozen.json").read_text())
SIZES, LIMIT = WANT["sizes"], 3e-5  # relative; PyTorch's float32 is as far from its float64
TOKENS, TARGETS = make_batch(WANT["batch"], WANT["time"], SIZES["vocab_size"], seed=WANT["seed"] + 1)
ADAMW = {name: WANT["adamw"][name] for name in ("lr", "eps", "weight_decay")}
ADAMW["beta1"], ADAMW["beta2"] = WANT["adamw"]["betas"]
INPUTS = {"tokens": (TOKENS.shape, "int32"), "targets": (TOKENS.shape, "int32")}
TWO_PASS = [name for name in FUSIONS if name != "update"]


def untied():
    """An embedding, a layer and a head of its own."""
    V, C = SIZES["vocab_size"], SIZES["n_embd"]
    parts = {"wte": nn.Embedding(V, C), "fc": nn.Linear(C, 2 * C), "head": nn.Linear(2 * C, V, bias=False)}
    return Parts(lambda m, tokens, targets: F.cross_entropy(m.head(F.gelu(m.fc(m.wte(tokens)))), targets), **parts)


def engine_of(model, **how):
    """An engine with the golden weights."""
    module = GPT2(Config(**SIZES)) if model == "gpt2" else untied()
    how = {"threads": 1, "choice": Choice("optimized"), "progress": lambda *a: None} | how
    engine, rng = Engine.from_options(module, INPUTS, **how), np.random.Generator(np.random.PCG64(WANT["seed"]))
    golden = make_params(**SIZES, seed=WANT["seed"]) if model == "gpt2" else {}
    for name, p in engine.parameters().items():
        p[...] = golden.get(name, 0) if golden else rng.standard_normal(p.shape, dtype=np.float32) * np.float32(0.1)
    return engine


def frozen_of(engine, patterns):
    return {n: p.copy() for n, p in engine.parameters().items() if any(fnmatchcase(n, x) for x in patterns)}


@pytest.mark.parametrize("fuse", [(), TWO_PASS, tuple(FUSIONS)], ids=["none", "two pass", "all"])
@pytest.mark.parametrize("case", WANT["cases"], ids=lambda c: f"{c['model']} {' '.join(c['freeze'])}")
def test_ten_steps_are_those_of_pytorch(case, fuse):
    how = {"choice": Choice("vanilla")} if not fuse else {}
    engine = engine_of(case["model"], freeze=case["freeze"], fuse=fuse, **how)
    before = frozen_of(engine, case["freeze"])
    got = [engine.step(tokens=TOKENS, targets=TARGETS, **ADAMW).loss for _ in case["losses"]]
    np.testing.assert_allclose(got, case["losses"], rtol=LIMIT)
    assert all(np.array_equal(engine.parameters()[n], x) for n, x in before.items())
    assert not before.keys() & {n for arrays in engine.states().values() for n in arrays}
    assert not before.keys() & {v.name for v in engine.program.adjoint}


@pytest.mark.parametrize("freeze", [["wte.*"], ["fc.*"], ["head.*"], ["wte.*", "fc.*"], ["fc.weight"]])
def test_head_and_loss_are_one_call_whichever_gradient_they_need(freeze):
    program = build(untied(), INPUTS, fuse=("classifier",), freeze=freeze).program
    (call,) = (c for c in program.phase("backward") if c.op.name == "classifier_backward")
    (whole,) = (c for c in build(untied(), INPUTS, fuse=("classifier",)).program.calls if c.op is call.op)
    assert call.absent == {"head.*": {"dweight"}, "wte.* fc.*": {"dinp"}}.get(" ".join(freeze), set())
    tokens, C, V = TOKENS.size, 2 * SIZES["n_embd"], SIZES["vocab_size"]
    assert whole.flops - call.flops == 2 * tokens * C * V * len(call.absent)
    assert whole.bytes - call.bytes == sum(whole.args[n].nbytes for n in call.absent)


@pytest.mark.parametrize(("model", "freeze"), [("gpt2", ["wte.*"]), ("gpt2", ["h.0.*"]), ("untied", ["head.*"])])
def test_a_frozen_parameter_has_no_memory_but_its_own(model, freeze):
    whole, less = (engine_of(model, fuse=TWO_PASS, freeze=x) for x in ([], freeze))
    frozen = sum(x.size for x in frozen_of(less, freeze).values())
    groups = [sum(e.plan.groups.get(g, 0) for g in ("gradient", "moment")) for e in (whole, less)]
    assert (groups[0] - groups[1], whole.plan.groups["parameter"]) == (12 * frozen, less.plan.groups["parameter"])


WHOLE = ("untied", "fc.weight", "matmul_backward_weight"), ("gpt2", "wte.*", "embedding_backward")


@pytest.mark.parametrize(("model", "freeze", "op"), WHOLE)
def test_a_kernel_that_needs_every_gradient_gets_an_array_that_nobody_reads(model, freeze, op):
    case = next(c for c in WANT["cases"] if c["model"] == model and c["freeze"] == [freeze])
    engine = engine_of(model, freeze=[freeze], choice=Choice("optimized", [f"{op}=generated"]))
    got = [engine.step(tokens=TOKENS, targets=TARGETS, **ADAMW).loss for _ in case["losses"]]
    np.testing.assert_allclose(got, case["losses"], rtol=LIMIT)
    calls = [c for c in engine.program.calls if c.op.name == op]
    assert any(v.name.startswith("unused d") for c in calls for v in c.writes)
    engine = engine_of(model, freeze=[freeze])
    bound = next(b for b in engine.calls if b.call.op.name == op and b.call.absent - {"dbias", "dwpe"})
    fails(rf"{op}\[generated\] computes 'd\w+' in any case", engine.rebound, bound, registry.find(op, "generated"))


def test_a_parameter_may_say_that_it_is_not_trained():
    module = untied()
    module.fc.weight.trained = False
    engine = Engine.from_options(module, INPUTS, threads=1)
    assert {p.name for p in engine.program.parameters} - {p.name for p in engine.program.trained} == {"fc.weight"}

    parts = {n: nn.Parameter((4,), nn.constant(2.0), trained=n == "gain") for n in ("scale", "gain")}
    scaled = Parts(lambda m, x: (x * m.scale * m.gain).sum(), **parts)
    engine = Engine.from_options(scaled, {"x": ((3, 4), "float32")}, threads=1)
    engine.step(x=np.ones((3, 4), np.float32), lr=0.1)
    assert (engine.parameters()["scale"] == 2).all()
    assert (engine.parameters()["gain"] < 2).all()


def test_what_cannot_be_frozen_is_refused():
    fails(r"freeze: no parameter matches 'wt.\*'; known: wte.weight", build, untied(), INPUTS, freeze=["wt.*"])
    fails("no parameter that is trained", build, untied(), INPUTS, freeze=["*"])


# Runs and their checkpoints

MODEL = '{"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 256, "block_size": 8}'


def run(resume=None, **more):
    """Train a run, or go on with one; return its folder, and the weights and states."""
    base = {"model": MODEL, "steps": 4, "lr": 1e-2, "threads": 1, "variant": "optimized", "freeze": ("wte.*", "h.0.*")}
    result, job, _ = small_runs.run(resume=resume and checkpoint.newest(resume), **(more if resume else base | more))
    arrays = [job.engine.parameters(), *job.engine.states().values()]
    return result.path, {(i, n): x.copy() for i, of in enumerate(arrays) for n, x in of.items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.fixture
def weights(small_text):
    run(freeze=(), save="start.bin")
    return Path("start.bin")


@pytest.mark.parametrize("init", [False, True])
def test_a_run_goes_on_from_a_checkpoint_without_what_is_frozen(weights, init):
    start = {"init": str(weights), "model": None} if init else {}
    _, whole = run(**start)
    path, _ = run(steps=2, save_every=2, **start)
    (saved,) = (path / "checkpoints").iterdir()
    names = checkpoint.TensorFile(saved / "params.safetensors").tensors
    assert not [n for n in names if fnmatchcase(n, "wte.*") or fnmatchcase(n, "h.0.*")]
    frozen = json.loads((saved / "state.json").read_text())["frozen"]
    assert frozen.keys() | names.keys() == {n for i, n in whole if i == 0}
    _, after = run(path, steps=4)
    assert same(whole, after)
    _, other = run(steps=2)
    assert not same(whole, other)
    found = checkpoint.open_weights(path)
    for (i, name), x in after.items():
        if i == 0:
            np.testing.assert_array_equal(found.read(name), x)


def test_a_source_that_has_changed_is_refused(weights):
    path, _ = run(steps=2, save_every=2, init=str(weights), model=None)
    moved = weights.rename("moved.bin")
    fails(r"start\.bin", run, path, steps=4)
    run(path, steps=3, init=str(moved))
    damaged = bytearray(moved.read_bytes())
    damaged[1024 + 4] ^= 1  # in the embedding
    moved.write_bytes(damaged)
    for more in ({}, {"init": str(moved)}):
        fails(r"'wte.weight' is not what it was in --init .*moved\.bin", run, path, steps=4, **more)
    fails(r"'wte.weight' is not what it was", checkpoint.open_weights(path).read, "wte.weight")


def test_a_run_that_names_itself_as_its_source_is_refused(small_text):
    path, _ = run(steps=2, save_every=2)
    found = checkpoint.newest(path)
    assert found.frozen
    found.state["settings"]["init"] = str(path)
    sealed(found.path, found.state)
    fails("from itself", checkpoint.open_weights, path)
