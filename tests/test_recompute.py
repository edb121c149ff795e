"""Blocks that are computed again in the backward: the same bits, less memory, and inputs that are not stale."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_models import Parts, batch, model_of
from verbs import fails, printed, ran

import cpuopt
from cpuopt import Choice, cli, models, nn
from cpuopt import functional as F
from cpuopt.building import build
from cpuopt.engine import Engine
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.program import arena
from cpuopt.program.fuse import FUSIONS
from cpuopt.program.program import RECOMPUTE
from cpuopt.train import forecast
from cpuopt.train.job import build_only
from cpuopt.train.settings import Settings

ROOT = Path(__file__).parent.parent
B, T = 2, 16
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def train(model, inputs, steps=3, variant="optimized", batch=batch, micro=1, **how):
    """Train from scratch; give losses and norms, and the bytes of all parameters."""
    how = {"fuse": tuple(FUSIONS), "choice": Choice(variant), "threads": 2, "micro_batches": micro} | how
    engine = Engine.from_options(model, inputs, **how)
    every = [[batch(i * micro + n) for n in range(micro)] for i in range(steps)]
    done = [engine.step(**first, more=more, **ADAMW) for first, *more in every]
    engine.collect()
    return [(d.loss, d.grad_norm) for d in done], {n: p.tobytes() for n, p in engine.parameters().items()}


ALL, SUMMED = tuple(FUSIONS), tuple(n for n in FUSIONS if n not in ("update", "residual"))
CASES = {
    "fused": ("gpt2-tiny", {}),
    "bf16": ("llama-tiny", {"dtype": "bfloat16"}),
    "micro-batches, added in a tree": ("llama-tiny", {"fuse": SUMMED, "micro": 3, "dtype": "bfloat16"}),
    "micro-batches, added by the kernels": ("gpt2-tiny", {"fuse": SUMMED, "micro": 2, "reduce": "fast"}),
    "adapters with dropout": ("llama-tiny", {"lora": "r=4,dropout=0.1", "dtype": "bfloat16"}),
    "frozen": ("gpt2-tiny", {"freeze": ["h.0.*", "wte.*"]}),
    "naive, without rewrites": ("gpt2-tiny", {"variant": "vanilla", "fuse": ()}),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_the_same_to_the_last_bit(case):
    name, how = CASES[case]
    lora, how = how.get("lora", ""), {k: v for k, v in how.items() if k != "lora"}
    plain, some, every = (train(*model_of(name, lora), **how, recompute=number) for number in (0, 1, "all"))
    assert some == every == plain
    assert np.isfinite(plain[0]).all()
    assert plain[0][0] != plain[0][1]


def test_an_input_that_changed_is_refused():
    program = built("gpt2-tiny", fuse=()).program
    steps = [next(c for c in program.calls if c.op.name == "adamw" and c.layer == f"h.{i}.attn.c_proj") for i in (0, 1)]
    grad = steps[1].args["grad"]  # of the same shape, and known before block 0 is computed again
    at = next(i for i, c in enumerate(program.calls) if grad in c.writes)
    program.calls.insert(at + 1, replace(steps[0], args=steps[0].args | {"grad": grad}, phase="backward"))
    fails(r"repeats call \d+ and reads h.0.attn.c_proj.weight, which has changed since", program.verify)


# Memory


def built(name, number="all", size=(B, T), **how):
    config, model = models.load(name)
    return build(model, config.specs(*size), choice=Choice("optimized"), recompute=number, **({"fuse": ALL} | how))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_keeps_its_input_alone(dtype):
    plain, some, every = (built("gpt2-nano", n, (4, 64), dtype=dtype) for n in (0, 2, "all"))
    pools = [b.plan().pool_bytes for b in (plain, some, every)]
    assert pools[0] > pools[1] > pools[2]
    program = every.program
    calls, forward = list(program.phase("forward", "backward")), len(list(program.phase("forward")))
    kept = {v for c in calls[:forward] for v in c.writes} & {v for c in calls[forward:] for v in c.reads}
    row = 4 * 64 * 128
    blocks = [v for v in kept if v.name.startswith("h.") and np.prod(v.shape) >= row]
    # the sums that begin the last three blocks, and their normalized rows; the first one begins with the embedding's
    rows = [f"h.{i}.ln_1.layernorm.out" for i in range(1, 4)]
    assert sorted(v.name for v in blocks) == sorted(rows + [f"h.{i}.residual.out.2" for i in range(4)])
    assert all(np.prod(v.shape) == row for v in blocks)
    again = [c for c in program.calls if c.repeats and c.repeats in calls]
    assert ({c.phase for c in again}, {c.shown_phase for c in again}) == ({"backward"}, {RECOMPUTE})
    assert program.work == plain.program.work  # the FLOPs that the mathematics needs
    assert program.repeated_flops > 0.6 * sum(c.flops for c in calls[:forward] if c.layer.startswith("h."))


def test_the_plan_of_124m_falls_as_the_docs_say():
    docs = (ROOT / "docs" / "training.md").read_text()
    pools = [built("gpt2-124M", n, (4, 64)).plan().pool_bytes / 1e6 for n in (0, 6, "all")]
    assert "| " + " | ".join(f"{n:.0f} MB" for n in pools) + " |" in docs


@pytest.mark.parametrize(
    ("how", "row"),
    [
        ({"lora": "r=8", "T": 512}, "| `--lora r=8` at 1x512: planned arena |"),
        ({"moments": "bf16", "T": 256}, "| all weights with `--moments bf16` at 1x256: planned arena |"),
    ],
)
def test_the_plan_of_a_1b_model_is_that_of_the_docs(how, row):
    docs = (ROOT / "docs" / "training.md").read_text()
    settings = Settings(model="llama3.2-1B", B=1, dtype="bf16", recompute="all", **how)
    assert re.search(f"^{re.escape(row)}.*\\| {arena.gb(build_only(settings).plan().total_bytes)} \\|$", docs, re.M)


def test_a_model_without_blocks_and_wrong_numbers_are_refused():
    net = Parts(lambda m, x, y: F.cross_entropy(F.gelu(m.a(x)), y), a=nn.Linear(6, 6))
    inputs = {"x": ((8, 6), "float32"), "y": ((8,), "int32")}
    build(net, inputs, recompute=0)
    fails(r"^recompute all: the model has no blocks, modules in a list", build, net, inputs, recompute="all")
    fails(r"^recompute 3: the model has 2 blocks; expected up to 2, or 'all'$", built, "gpt2-tiny", 3)
    for wrong in (-1, "half"):
        fails(rf"^recompute '?{wrong}'?: expected a number of blocks, or 'all'$", built, "gpt2-tiny", wrong)
    fails("--recompute 'half': expected all, or a number of blocks", Settings(recompute="half").check)


# As a setting


def test_a_run_ends_at_the_same_weights_and_goes_on_without(here, tmp_path, capsys):
    flags = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--threads", "1", "--val-every", "0"]

    def losses(*more):
        ran(capsys, *flags, *more)
        return sorted((tmp_path / "runs").iterdir())[-1]

    plain = losses("--steps", "4", "--save", "plain.bin", "--run", "a")
    half = losses("--steps", "2", "--save-every", "2", "--recompute", "all", "--run", "b")
    assert json.loads((half / "config.json").read_text())["recompute"] == "all"
    assert cli.main(["train", "--resume", str(half), "--steps", "4", "--recompute", "1", "--save", "b.bin"]) == 0
    assert (tmp_path / "plain.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert plain.name != half.name


def test_it_is_shown_in_program_profile_and_forecast(capsys):
    flags = ["--model", "gpt2-tiny", "-B", "2", "-T", "16", "--threads", "1", "--recompute", "all"]
    shown = ran(capsys, "profile", "--program", *flags)
    again = {c["op"] for c in shown["calls"] if c["phase"] == "recompute" and c["layer"] == "h.0.attn"}
    assert again == {"attention_forward"}
    assert shown["repeated"] > 0
    assert " GFLOP a step and 0." in printed(capsys, "profile", "--program", *flags)
    engine = cpuopt.Engine(*model_of("gpt2-tiny"), recompute="all", threads=1)
    rows = engine.profile(steps=2, roofs=False, **batch(0)).profile.layers
    mine = [r for r in rows if r.layer == "h.1.attn.c_attn" and r.op == "matmul_forward"]
    assert sorted(r.phase for r in mine) == ["forward", "recompute"]
    some = Settings(model="gpt2-nano", B=4, T=64, threads=1)
    found = forecast.forecast(some, Roofs(1, (Level("memory", None),), 10.0, {"memory": {"read": 5.0}}, 1.0))
    options = {o.flags: o for o in found.options}
    every, two = options["--recompute all"], options["--recompute 2"]
    assert every.arena < two.arena < found.arena
    assert every.roof_ms > two.roof_ms > found.roof_ms
