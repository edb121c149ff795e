"""The training loop: what it records, that the same seed gives the same bits, and what an interrupt leaves."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from listening import Listener
from verbs import SQUARES, fails, strict

from cpuopt.check import gate
from cpuopt.kernels import registry
from cpuopt.lab import ab
from cpuopt.machine import peak_rss_bytes
from cpuopt.profiler import profile
from cpuopt.train import first, job
from cpuopt.train.trainer import train

FILES = {"config.json", "machine.json", "metrics.jsonl", "main.log", "profile.json", "summary.json"}


@pytest.fixture
def prepare(tmp_path):
    (tmp_path / "text.txt").write_text(SQUARES)

    def prepare(**settings):
        small = {"model": "gpt2-tiny", "data": str(tmp_path / "text.txt"), "B": 2, "T": 16, "steps": 3, "val_every": 0}
        return job.prepare(job.Settings(**{"variant": "vanilla", "lr": 1e-2} | small | settings))

    return prepare


def read(folder):
    """A run's metrics, profile and summary, read as strictly as the standard asks."""
    steps = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    profile, summary = (strict((folder / f"{name}.json").read_text()) for name in ("profile", "summary"))
    assert {path.name for path in folder.iterdir()} == FILES
    return steps, profile, summary


@pytest.fixture
def numbers(prepare, tmp_path):
    """Train; give the loss and the norm of each step."""

    def numbers(**settings):
        train(prepare(**settings), tmp_path, listener := Listener())
        return [(m["loss"], m["grad_norm"]) for m in listener.steps]

    return numbers


# The same bits


def test_profiling_and_validation_change_no_number(numbers, prepare):
    plain = prepare()
    batches, losses = plain.corpus.batches("train", 2, 16, seed=0), []
    for i in range(3):
        tokens, targets = batches.at(i)
        done = plain.engine.step(lr=1e-2, tokens=tokens, targets=targets)
        losses.append((done.loss, done.grad_norm))
    assert losses == numbers() == numbers(val_every=1)


def test_every_setting_of_the_update_has_an_effect(numbers):
    changes = {"seed": 0, "lr": 2e-2, "beta1": 0.5, "beta2": 0.5, "eps": 1e-2, "weight_decay": 0.5, "clip": 1e-2}
    losses = {name: tuple(loss for loss, _ in numbers(**{"eps": 1e-3, name: x})) for name, x in changes.items()}
    assert len(set(losses.values())) == len(losses)


# Learning and validation


VALIDATED = [(5, 2, [0, 2, 4, 5]), (4, 2, [0, 2, 4]), (2, 10, [0, 2]), (2, 0, []), (2, 1, [0, 1, 2])]


@pytest.mark.parametrize(("steps", "every", "at"), VALIDATED)
def test_validation_comes_first_every_so_often_and_last(prepare, tmp_path, steps, every, at):
    result = train(prepare(steps=steps, val_every=every), tmp_path, listener := Listener())
    metrics, profile, summary = read(result.path)
    assert ([step for step, _ in listener.vals], [m["step"] for m in metrics]) == (at, list(range(1, steps + 1)))
    assert [m["step"] for m in metrics if "val_loss" in m] == [step for step in at if step]
    log = (result.path / "main.log").read_text().splitlines()
    assert [int(line.split()[0][2:]) for line in log if "tel:" in line] == at
    assert [int(line.split()[0][2:]) for line in log if "trl:" in line] == list(range(1, steps + 1))
    assert (summary["val_loss"].keys(), profile["steps"] + profile["warmup"]) == ({str(n) for n in at}, steps)


def test_validation_is_over_the_first_batches_of_the_held_out_text(prepare, tmp_path):
    ready, losses = prepare(steps=1, val_every=1, val_batches=3), []
    for i in range(3):
        tokens, targets = ready.corpus.batches("val", 2, 16).batch(0, i)
        losses.append(ready.engine.forward(tokens=tokens, targets=targets))
    result = train(ready, tmp_path, Listener())
    assert result.summary["val_loss"]["0"] == pytest.approx(sum(losses) / 3, rel=1e-12)
    few = prepare(steps=1, val_every=1, val_batches=10**6)
    assert train(few, tmp_path, Listener()).summary["val_loss"]["0"] != result.summary["val_loss"]["0"]


def test_a_step_is_timed_by_the_clock_without_its_validation(prepare, tmp_path):
    ticks = itertools.count(start=100, step=0.25)
    metrics, _, summary = read(train(prepare(val_every=1), tmp_path, Listener(), clock=lambda: next(ticks)).path)
    assert [(m["step_ms"], m["tokens_per_s"]) for m in metrics] == [(250, 128)] * 3
    assert (summary["step_ms_median"], summary["tokens_per_s"]) == (250, 128)


def test_a_loss_that_is_no_number_is_recorded_as_json(prepare, tmp_path):
    result = train(prepare(lr=1e30, val_every=3, guard="off"), tmp_path, Listener())
    metrics, _, summary = read(result.path)
    assert metrics[0]["loss"] > 0
    assert (metrics[2]["loss"], metrics[2]["val_loss"], summary["loss_last"]) == (None, None, None)
    assert "s:3 trl:nan" in (result.path / "main.log").read_text()


# Accumulation, decay, schedules, one batch


def weights_of(ready):
    return {name: p.copy() for name, p in ready.engine.parameters().items()}


def test_every_verb_steps_as_the_settings_say(prepare, tmp_path):
    """Also `cpuopt profile` and `cpuopt ab --in-step`, to the bits of training."""
    how = {"schedule": "linear", "warmup_steps": 1, "beta1": 0.5, "weight_decay": 0.1, "clip": 0.5, "total_batch": 64}
    trained, profiled, other = prepare(**how), prepare(**how), prepare(**how, decay="matrices")
    train(trained, tmp_path, Listener())
    profile(profiled, warmup=0)
    vanilla = registry.KERNELS["gelu_forward", "vanilla"]
    compared = ab.InStep(trained.settings, [ab.Change((vanilla, vanilla))])
    for ready in (other, compared.job):
        for _ in range(3):
            ready.take_step()
    want = weights_of(trained)
    for ready in (profiled, compared.job):
        assert all(np.array_equal(p, want[name]) for name, p in ready.engine.parameters().items())
    assert {n for n, p in other.engine.parameters().items() if np.array_equal(p, want[n])} == set()
    assert (trained.done, compared.job.take_step().lr) == (3, 5e-3)  # a step behind the last has its rate


@pytest.mark.parametrize("variant", ["vanilla", "optimized"])
def test_micro_batches_give_the_step_of_the_whole_batch(prepare, tmp_path, variant):
    whole = prepare(B=4, steps=1, seed=3, variant=variant, fuse="none")
    parts = prepare(B=1, steps=1, seed=3, variant=variant, total_batch=64, fuse="none")
    before, batches = weights_of(whole), parts.corpus.batches("train", 1, 16, seed=3)
    rows = [batches.at(i) for i in range(4)]
    tokens, targets = (np.concatenate(x) for x in zip(*rows, strict=True))
    done = whole.engine.step(lr=1e-2, eps=1e-2, tokens=tokens, targets=targets)
    first, *more = [{"tokens": x, "targets": y} for x, y in rows]
    summed = parts.engine.step(lr=1e-2, eps=1e-2, more=more, **first)
    assert summed.loss == pytest.approx(done.loss, rel=1e-6)
    assert summed.grad_norm == pytest.approx(done.grad_norm, rel=1e-5)
    for name, p in whole.engine.parameters().items():
        assert np.abs(parts.engine.parameters()[name] - p).max() < 1e-4 * np.abs(p - before[name]).max() + 1e-8, name


def test_a_run_of_micro_batches_takes_other_tokens_each_time(prepare, tmp_path):
    ready = prepare(B=1, steps=2, total_batch=32)
    seen = [m["tokens"].tobytes() for step in (1, 2) for m in ready.micro_batches(step)]
    batches = ready.corpus.batches("train", 1, 16, seed=0)
    assert seen == [batches.at(i)[0].tobytes() for i in range(4)]
    ticks = itertools.count(step=0.25)
    result = train(ready, tmp_path, listener := Listener(), clock=lambda: next(ticks))
    assert [m["tokens_per_s"] for m in listener.steps] == [128, 128]
    assert result.profile.tokens_per_s > 0


def test_accumulation_needs_every_gradient_before_the_first_update(prepare):
    fails(r"--total-batch 64 with --fuse update", prepare, B=2, total_batch=64, fuse="update", variant="optimized")
    fails(r"multiple of 32.*the nearest is 64", prepare, total_batch=63)
    ready = prepare(variant="optimized", total_batch=64)
    assert "update" not in ready.engine.options.fuse
    assert ready.engine.two_pass
    once = prepare()
    given = dict(zip(("tokens", "targets"), once.corpus.batches("train", 2, 16).at(0), strict=True))
    fails("micro_batches=", once.engine.step, **given, more=[given])


@pytest.mark.parametrize(("variant", "fuse"), [("vanilla", "none"), ("optimized", "all")])
def test_decay_of_matrices_leaves_vectors_alone(prepare, tmp_path, variant, fuse):
    def run(**more):
        ready = prepare(steps=1, variant=variant, fuse=fuse, lr=1e-2, **more)
        train(ready, tmp_path, Listener())
        return weights_of(ready)

    free, every, matrices = run(), run(weight_decay=0.5), run(weight_decay=0.5, decay="matrices")
    start = weights_of(prepare())
    for name, p in free.items():
        assert np.allclose(every[name], p - 1e-2 * 0.5 * start[name], atol=1e-6), name
        assert np.array_equal(matrices[name], every[name] if p.ndim == 2 else p), name
        assert p.ndim == 1 or not np.array_equal(matrices[name], p), name


def test_one_batch_is_learnt_by_heart(prepare, tmp_path):
    result = train(prepare(steps=60, lr=1e-2, overfit=True), tmp_path, Listener())
    assert result.summary["loss_first"] > 5
    assert result.summary["loss_last"] < 0.5
    assert train(prepare(steps=60, lr=1e-2), tmp_path, Listener()).summary["loss_last"] > 1


def test_the_schedule_sets_the_rate_of_each_step(prepare, tmp_path):
    train(prepare(steps=4, schedule="linear", warmup_steps=2, lr=0.4, lr_end=0.5), tmp_path, listener := Listener())
    assert [m["lr"] for m in listener.steps] == pytest.approx([0.2, 0.4, 0.4, 0.3])


def test_samples_come_every_so_often_and_change_no_number(prepare, tmp_path, numbers):
    ready = prepare(steps=4, sample_every=2, sample_tokens=10, prompt="1 sq")
    train(ready, tmp_path, listener := Listener())
    (two, first), (four, second) = listener.notes
    assert (two, four) == (2, 4)
    assert first.startswith("1 sq")
    assert first != second
    assert [(m["loss"], m["grad_norm"]) for m in listener.steps] == numbers(steps=4)
    train(prepare(steps=4, sample_every=2, sample_tokens=10, prompt="1 sq"), tmp_path, again := Listener())
    assert again.notes == listener.notes


# The guard


def poison(engine, at, value=np.nan, layer="h.1.mlp.c_proj", op="matmul_forward"):
    """Spoil what a kernel gives in some of its calls, counted from 1; a bad step is computed once more."""
    calls = itertools.count(1)

    def spoil(bound):
        right = bound.kernel.function

        def function(*args):
            right(*args)
            if next(calls) in at:
                engine.array(bound.call.writes[0]).reshape(-1)[5] = value

        bound.kernel = replace(bound.kernel, function=function)

    bounds = {id(b): b for b in itertools.chain(engine.calls, *engine.backwards)}.values()
    found = [b for b in bounds if (b.call.op.name, b.call.layer) == (op, layer)]
    assert found
    for bound in found:
        spoil(bound)


@pytest.mark.parametrize(("op", "layer", "value", "micro"), [
    ("matmul_forward", "h.1.mlp.c_proj", np.nan, None),
    ("matmul_forward", "h.1.mlp.c_proj", np.inf, 1),
    ("matmul_backward_weight", "h.0.attn.c_attn", np.inf, None),
    ("matmul_forward", "h.1.mlp.c_proj", np.nan, 0),
])  # fmt: skip
def test_a_step_that_is_not_finite_is_skipped_and_its_place_named(prepare, tmp_path, op, layer, value, micro):
    """In step 3, or in one of its two micro-batches, and again when they are computed once more."""
    ready = prepare(steps=6, total_batch=None if micro is None else 64)
    poison(ready.engine, [3, 4] if micro is None else [5 + micro, 7 + micro], value, layer, op)
    result = train(ready, tmp_path / "runs", listener := Listener())
    steps, _, summary = read(result.path)
    assert [("skipped" in m) for m in steps] == [False, False, True, False, False, False]
    assert (summary["skipped"], result.diagnosis, ready.engine.step_number) == (1, "", 5)
    (note,) = listener.notes
    assert f"{op}[vanilla] in layer '{layer}' gave {value}" in note
    assert "its update is skipped (1 so far)" in note
    assert micro is None or f"micro-batch {micro}" in note
    assert all(np.isfinite(p).all() for p in ready.engine.parameters().values())


def test_a_fault_that_does_not_come_again_is_said_to_be_one(prepare, tmp_path):
    ready = prepare(steps=2)
    poison(ready.engine, [2])
    train(ready, tmp_path, listener := Listener())
    assert "suspect the memory or the processor" in listener.notes[0]


@pytest.mark.parametrize(("variant", "two_pass"), [("vanilla", True), ("optimized", False)])
def test_squares_that_overflow_are_no_fault_of_the_machine(prepare, tmp_path, variant, two_pass):
    ready = prepare(steps=1, lora="r=2,alpha=1e38", variant=variant)
    assert ready.engine.two_pass == two_pass
    result = train(ready, tmp_path, listener := Listener())
    (said,) = listener.notes if two_pass else [result.diagnosis]
    assert "grad_norm is inf; the gradients are finite, but float32 cannot hold the sum of their squares" in said
    assert "a lower alpha of --lora" in said


def test_ten_skips_end_the_run_with_a_diagnosis(prepare, tmp_path):
    ready = prepare(steps=50, save=str(tmp_path / "never.bin"))
    poison(ready.engine, range(4, 100))
    result = train(ready, tmp_path / "runs", Listener())
    assert result.summary["steps"] == 13
    assert "10 of the last 13 steps were skipped" in result.diagnosis
    assert "h.1.mlp.c_proj" in result.summary["diagnosis"]
    assert not (tmp_path / "never.bin").exists()


def test_a_fused_update_cannot_be_skipped_so_the_run_stops(prepare, tmp_path):
    ready = prepare(steps=5, fuse="all", variant="optimized")
    poison(ready.engine, range(2, 100), op="attention_forward", layer="h.0.attn")
    result = train(ready, tmp_path, Listener())
    assert result.summary["steps"] == 2
    assert all(x in result.diagnosis for x in ("parameter", "--guard skip goes on"))
    fails(r"--guard skip with --fuse all", prepare, fuse="all", guard="skip", variant="optimized")
    assert "update" not in prepare(variant="optimized", guard="skip").engine.options.fuse


# What judging leaves


def test_a_first_step_that_is_judged_leaves_no_copy_of_a_weight_behind(prepare, monkeypatch):
    """The weights are put back, and their copies in bfloat16 follow."""
    monkeypatch.setattr(first, "recall", lambda key, case: None)
    how = {"dtype": "bf16", "fuse": "none", "swap": ["layernorm_backward=generated"]}
    judged, plain = prepare(**how), None
    with monkeypatch.context() as m:
        m.setattr(job, "judge_first_step", lambda job: [])
        plain = prepare(**how)
    assert any(c["kernel"] == "layernorm_backward[generated]" for c in judged.checked[len(plain.checked) :])
    assert [judged.take_step().loss for _ in range(2)] == [plain.take_step().loss for _ in range(2)]


def test_the_peak_of_a_run_begins_behind_the_judging_of_its_kernels(monkeypatch, prepare):
    """A judgement in the midst of a run does not hide what the run held before."""
    monkeypatch.setattr(gate, "recall", lambda key, case: None)
    np.ones(1 << 26, np.float32).sum()  # 268 MB, gone again
    before, made = peak_rss_bytes(), prepare()
    assert before - peak_rss_bytes() > 1 << 27
    assert any("GB, and the results are kept" in note for note in made.engine.notes)
    np.ones(1 << 26, np.float32).sum()
    before = peak_rss_bytes()
    assert any(r.seconds for r in gate.require_right(made.engine.kernels[:1], threads=1))
    assert peak_rss_bytes() >= before


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bf16", 2)])
def test_the_planned_memory_has_what_samples_need(prepare, dtype, size):
    made = prepare(sample_every=1, dtype=dtype)
    assert made.planned_bytes - made.engine.predicted_peak_bytes == size * made.config.n_params
