"""What a run takes, before it starts: ``cpuopt train --dry-run``."""

import json
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from verbs import fails, printed, process, ran, refused

from cpuopt import models, ops
from cpuopt.errors import UserError
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.ops.attention import scored
from cpuopt.program import arena
from cpuopt.report import console as report
from cpuopt.train import forecast
from cpuopt.train.forecast import measured, require_fit
from cpuopt.train.job import build_only, prepare
from cpuopt.train.settings import Settings

ROOFS = Roofs(1, (Level("memory", None),), 10.0, {"memory": {"read": 5.0}}, 1.0, bf16_gflops=20.0, bf16_by="pairs")
TINY = {"model": "llama-tiny", "B": 2, "T": 16, "threads": 1, "steps": 40}


def test_memory_is_that_of_the_run_and_time_that_of_the_roofs():
    found, built = forecast.forecast(Settings(**TINY), ROOFS), build_only(Settings(**TINY))
    assert (found.memory, found.tokens) == (built.plan().describe(), 32)
    bounds = [max(c.flops / 10, c.bytes / 5) for c in built.program.step_calls]
    assert found.roof_ms == pytest.approx(sum(bounds) / 1e6)
    assert found.seconds == pytest.approx(40 * found.roof_ms / 1e3)
    whole = forecast.forecast(Settings(**TINY, total_batch=128), ROOFS)
    update = sum(max(c.flops / 10, c.bytes / 5) for c in built.program.step_calls if c.phase == "update") / 1e6
    assert whole.tokens == 128
    assert 3.5 * (found.roof_ms - update) < whole.roof_ms < 5 * found.roof_ms


def test_the_copy_of_the_weights_that_samples_need_counts(monkeypatch):
    ways = ({}, {"sample_every": 1}, {"sample_every": 1, "dtype": "bf16"})
    plain, samples, narrow = (forecast.forecast(Settings(**TINY, **how), ROOFS) for how in ways)
    n = models.parse(TINY["model"]).n_params
    assert samples.memory["samples"] == samples.arena - plain.arena == 4 * n
    assert narrow.memory["samples"] == 2 * n
    there = plain.arena + n
    require_fit(replace(plain, available=there), Settings(**TINY))
    fails("the run needs", require_fit, replace(samples, available=there), Settings(**TINY, sample_every=1))
    monkeypatch.setattr(arena, "available_bytes", lambda: there)
    assert prepare(Settings(**TINY)).engine.plan.total_bytes == plain.arena
    with pytest.raises(UserError, match=f"the arena needs {arena.gb(samples.arena)} and {arena.gb(there)} "):
        prepare(Settings(**TINY, sample_every=1))


def test_options_take_less_memory_and_say_what_they_take():
    found = forecast.forecast(Settings(**TINY), ROOFS)
    options = {o.flags: o for o in found.options}
    assert {"--moments bf16", "--lora r=8", "-B 1", "-T 8"} <= options.keys()
    assert all(o.arena < found.arena for o in found.options)
    assert options["-B 1"].arena == build_only(Settings(**{**TINY, "B": 1})).plan().describe()["arena"]
    tried = forecast.forecast(Settings(**TINY, lora="r=8", dtype="bf16", moments="bf16"), ROOFS)
    assert {o.flags.split()[0] for o in tried.options} <= {"-B", "-T", "--fuse", "--recompute", "--base"}


def test_weights_in_bf16_are_an_option_wherever_a_run_can_have_them():
    def offered(**how):
        found = [o.flags for o in forecast.forecast(Settings(**TINY, **how), ROOFS).options]
        assert len(found) == len({*found})
        return [flags for flags in found if "--weights" in flags]

    assert offered() == ["--weights bf16 --dtype bf16 --moments bf16"]  # without moments it takes more, this small
    assert offered(dtype="bf16") == ["--weights bf16", "--weights bf16 --moments bf16"]
    assert offered(dtype="bf16", moments="bf16") == ["--weights bf16"]
    assert offered(dtype="bf16", moments="bf16", weights="bf16") == offered(lora="r=8") == []


def test_measured_steps_replace_the_roofs_and_validations_count(tmp_path):
    settings = Settings(**TINY, val_every=10, val_batches=3)
    planned, ticks = forecast.forecast(settings, ROOFS), count(step=0.5)
    found = measured(planned, prepare(settings), tmp_path, 3.0, clock=lambda: next(ticks))
    assert (found.step_ms, found.start_s, found.saving_s) == (500, 3, 0)
    assert found.validation_s == 5 * 3 * 0.5  # before the first step, and after each ten of forty
    assert found.seconds == 3 + 40 * 0.5 + 7.5
    slow_start = iter([t for n, d in enumerate([0.3] * 4 + [0.1] * 60) for t in (n, n + d)])
    found = measured(planned, prepare(settings), tmp_path, clock=lambda: next(slow_start))
    assert (found.step_ms, found.start_s) == (pytest.approx(100), pytest.approx(4 * 0.2))
    silent = measured(planned, prepare(Settings(**TINY, val_every=0)), tmp_path, clock=lambda: next(ticks))
    assert silent.validation_s == 0


def batches(ignored):
    targets = np.zeros((TINY["B"], TINY["T"]), np.int32)
    targets[:, :ignored] = -100
    return [{"tokens": np.zeros_like(targets), "targets": targets}]


def test_flops_count_as_far_as_the_batches_ask_for_them():
    settings, T = Settings(**TINY), TINY["T"]
    every, half = (forecast.forecast(settings, ROOFS, 10**9, batches(n)) for n in (0, T // 2))
    assert every == forecast.forecast(settings, ROOFS, 10**9)
    assert (every.of_work, every.roof_ms > half.roof_ms) == (100, True)
    built = build_only(settings)
    (call,) = [c for c in built.program.step_calls if c.op.name == "classifier_update"]
    step = call.op.fixed(call.sizes)  # the optimizer's, whatever counts
    assert forecast.share(call, batches(T // 2)) == pytest.approx((step + (call.flops - step) / 2) / call.flops)
    saved = 100 * (call.flops - step) / 2 / sum(c.flops for c in built.program.step_calls)
    assert half.of_work == pytest.approx(100 - saved)
    text = "\n".join(map(str, report.forecast(half, datetime(2026, 1, 1))[:2]))
    assert f"at the roofs of this machine, with the {half.of_work:.0f} % of the FLOPs that its data ask for" in text


def test_packed_examples_ask_for_the_pairs_inside_them():
    rng, T = np.random.default_rng(0), 16
    for window in (0, 3, 40):
        starts = np.minimum(np.sort(rng.integers(0, T, (3, T)), axis=1), np.arange(T)).astype(np.int32)
        hidden, of_all = (scored(np.zeros((3, 1, T, T)), s, window)[2] for s in (starts, None))
        want = (~np.broadcast_to(hidden, (3, 1, T, T))).sum() / (3 * (~of_all).sum())
        assert ops.gqa_forward.asked(starts, window) == pytest.approx(want)
    assert ops.attention_backward.asked(np.empty(0, np.int32), 0) == 1


def test_steps_faster_than_the_roofs_take_them_out_of_the_plan(tmp_path):
    settings = Settings(**TINY, val_every=0)
    planned = forecast.forecast(settings, replace(ROOFS, gflops=1e-6))
    assert planned.roof_ms > 500
    ticks = count(step=0.5)
    found = measured(planned, prepare(settings), tmp_path, clock=lambda: next(ticks))
    assert (found.step_ms, found.mean_ms, found.roof_ms) == (500, 500, None)
    assert {o.roof_ms for o in found.options} == {None}
    with report.OUT.capture() as shown:
        report.show(report.forecast(found, datetime(2026, 1, 1)))
    assert "at the roofs" not in shown.get()


def test_checkpoints_and_final_weights_count_and_none_stays(tmp_path, monkeypatch):
    settings = Settings(**TINY, save_every=10, keep_best=True, val_every=15, save=str(tmp_path / "tuned"))
    planned, job, ticks = forecast.forecast(settings, ROOFS), prepare(settings), count(step=0.5)
    found = measured(planned, job, tmp_path / "runs" / "there", clock=lambda: next(ticks))
    # after 10, 15, 20, 30 and 40 steps; the weights are a third of what a checkpoint has with the moments
    assert found.saving_s == pytest.approx(0.5 * (5 + 1 / 3), rel=0.01)
    assert not [*tmp_path.iterdir()]
    job.settings = replace(settings, steps=44)  # then also after the last step
    found = measured(planned, job, tmp_path, clock=lambda: next(ticks))
    assert found.saving_s == pytest.approx(0.5 * (6 + 1 / 3), rel=0.01)

    def full(*given):
        raise UserError("No space left on device")

    monkeypatch.setattr(forecast.checkpoint, "save", full)
    fails(r"no checkpoint can be written in '.*': No space left on device", measured, planned, job, tmp_path)


def test_a_run_that_does_not_fit_is_refused_with_what_does(monkeypatch):
    found = forecast.forecast(Settings(**TINY), ROOFS)
    small = forecast.replace(found, available=max(o.arena for o in found.options))
    fails(r"the run needs .* and .* of memory are available; take --", require_fit, small, Settings(**TINY))
    fails("no B and T fit", require_fit, forecast.replace(found, available=1000), Settings(**TINY))
    require_fit(found, Settings(**TINY))


def test_a_dry_run_prints_a_plan_and_writes_nothing(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cpuopt.measure.rates.roofs", lambda n, say: ROOFS)
    flags = ["train", "--dry-run", "--model", "llama-tiny", "-T", "16", "--threads", "1", "--steps", "30"]
    found = ran(capsys, *flags)
    assert found["fits"]
    assert found["step_ms"] > 0
    seconds = 30 * found["step_ms"] / 1e3 + found["start_s"] + found["validation_s"] + found["saving_s"]
    assert found["seconds"] == pytest.approx(seconds)
    text = printed(capsys, *flags)
    assert all(x in text for x in ("memory: ", "started now, it ends 2"))
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(forecast, "available_bytes", lambda: 10_000)
    assert "are available; no B and T fit" in refused(capsys, *flags)


QUESTIONS = Path(__file__).parents[1] / "examples" / "questions.jsonl"
SIZES = {"model": "llama", "vocab_size": 256, "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1536}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 128}


def said_by(folder, *flags):
    """What a training on chats, in a process of its own, prints as JSON."""
    words = ["train", "--model", json.dumps(SIZES), "--data", str(QUESTIONS), "-B", "2", "-T", "112", "--steps", "3"]
    done = process(*words, "--threads", "1", "--val-every", "0", "--runs", str(folder), "--json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"lora": "r=8", "dtype": "bf16"}])
def test_the_peak_of_a_plan_is_that_of_the_run(tmp_path, how):
    """Of 14 million parameters. Here their kernels are compiled and judged, for both: either takes memory."""
    prepare(Settings(model=json.dumps(SIZES), data=str(QUESTIONS), B=2, T=112, threads=1, **how))
    flags = [word for name, x in how.items() for word in (f"--{name}", x)]
    said_by(tmp_path, *flags, "--dry-run")  # the first on a machine measures its roofs, which takes memory too
    planned, run = said_by(tmp_path, *flags, "--dry-run"), said_by(tmp_path, *flags)
    assert planned["peak"] == pytest.approx(run["peak_rss_bytes"], rel=0.05)
    assert "1,706 of 4,584 tokens count" in planned["data"]
    assert planned["epoch_steps"] == 23
