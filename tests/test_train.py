"""The training loop: what it records, that the same seed gives the same bits, and what an interrupt leaves."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpuopt import job
from cpuopt.train import train

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
FILES = {"config.json", "machine.json", "metrics.jsonl", "main.log", "profile.json", "summary.json"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(1000)))
    return str(path)


@pytest.fixture
def prepare(text):
    def prepare(**settings):
        small = {"model": "gpt2-tiny", "data": text, "B": 2, "T": 16, "steps": 3, "val_every": 0, "lr": 1e-2}
        return job.prepare(job.Settings(**{"variant": "vanilla"} | small | settings))

    return prepare


class Listener:
    """Hears of a run; sends `signals` when `after` steps are done."""

    def __init__(self, after=None, signals=()):
        self.steps, self.vals, self.after, self.signals = [], [], after, signals

    def step(self, metrics):
        self.steps.append(metrics)
        if len(self.steps) == self.after:
            self.send()

    def validation(self, step, loss):
        self.vals.append(step)
        if self.after == 0:
            self.send()

    def send(self):
        for number in self.signals:
            signal.raise_signal(number)


def read(folder):
    """A run's metrics, profile and summary, read as strictly as the standard asks."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    def strict(line):
        return json.loads(line, parse_constant=refuse)

    steps = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {path.name for path in folder.iterdir()} == FILES
    return steps, *(strict((folder / f"{name}.json").read_text()) for name in ("profile", "summary"))


@pytest.fixture
def numbers(prepare, tmp_path):
    """Train; give the loss and the norm of each step."""

    def numbers(**settings):
        train(prepare(**settings), tmp_path, listener := Listener())
        return [(m["loss"], m["grad_norm"]) for m in listener.steps]

    return numbers


# The same bits


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(numbers):
    one = numbers(seed=7)
    assert one == numbers(seed=7)
    assert not {loss for loss, _ in one} & {loss for loss, _ in numbers(seed=8)}


def test_profiling_and_validation_change_no_number(numbers, prepare):
    plain = prepare()
    batches = plain.corpus.batches("train", 2, 16, seed=0)
    losses = []
    for i in range(3):
        tokens, targets = batches.at(i)
        done = plain.engine.step(lr=1e-2, tokens=tokens, targets=targets)
        losses.append((done.loss, done.grad_norm))
    assert losses == numbers() == numbers(val_every=1)


def test_clipping_scales_what_is_applied_and_reports_what_was_there(numbers):
    free, loose, tight = numbers(eps=1.0), numbers(eps=1.0, clip=1e3), numbers(eps=1.0, clip=1e-2)
    assert free == loose
    assert free[0] == tight[0]
    assert not {*free[1:]} & {*tight[1:]}
    assert all(norm > 1 for _, norm in tight)


def test_every_setting_of_the_update_has_an_effect(numbers):
    losses = {
        name: tuple(loss for loss, _ in numbers(**{name: value}))
        for name, value in {"seed": 0, "lr": 2e-2, "beta1": 0.5, "beta2": 0.5, "eps": 1e-2, "weight_decay": 0.5}.items()
    }
    assert len(set(losses.values())) == len(losses)


# Learning and validation


def test_validation_falls(prepare, tmp_path):
    result = train(prepare(B=4, T=32, steps=30, lr=1e-3, val_every=10), tmp_path, Listener())
    val = result.summary["val_loss"]
    assert list(val) == ["0", "10", "20", "30"]
    assert val["0"] == pytest.approx(math.log(256), rel=0.05)
    assert val["0"] > val["10"] > val["20"] > val["30"]
    assert val["30"] < val["0"] - 1


@pytest.mark.parametrize(
    ("steps", "every", "at"), [(5, 2, [0, 2, 4, 5]), (4, 2, [0, 2, 4]), (2, 10, [0, 2]), (2, 0, []), (2, 1, [0, 1, 2])]
)
def test_validation_comes_first_every_so_often_and_last(prepare, tmp_path, steps, every, at):
    result = train(prepare(steps=steps, val_every=every), tmp_path, listener := Listener())
    metrics, profile, summary = read(result.path)
    assert listener.vals == at
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert [m["step"] for m in metrics if "val_loss" in m] == [step for step in at if step]
    log = (result.path / "main.log").read_text().splitlines()
    assert [int(line.split()[0][2:]) for line in log if "tel:" in line] == at
    assert [int(line.split()[0][2:]) for line in log if "trl:" in line] == list(range(1, steps + 1))
    assert summary["val_loss"].keys() == {str(n) for n in at}
    assert profile["steps"] + profile["warmup"] == steps


def test_validation_is_over_the_first_batches_of_the_held_out_text(prepare, tmp_path):
    ready = prepare(steps=1, val_every=1, val_batches=3)
    losses = []
    for i in range(3):
        tokens, targets = ready.corpus.batches("val", 2, 16).batch(0, i)
        losses.append(ready.engine.forward(tokens=tokens, targets=targets))
    result = train(ready, tmp_path, Listener())
    assert result.summary["val_loss"]["0"] == pytest.approx(sum(losses) / 3, rel=1e-12)
    few = prepare(steps=1, val_every=1, val_batches=10**6)
    assert train(few, tmp_path, Listener()).summary["val_loss"]["0"] != result.summary["val_loss"]["0"]


def test_a_step_is_timed_by_the_clock_without_its_validation(prepare, tmp_path):
    ticks = itertools.count(start=100, step=0.25)
    result = train(prepare(val_every=1), tmp_path, Listener(), clock=lambda: next(ticks))
    metrics, _, summary = read(result.path)
    assert [(m["step_ms"], m["tokens_per_s"]) for m in metrics] == [(250, 128)] * 3
    assert (summary["step_ms_median"], summary["tokens_per_s"]) == (250, 128)


def test_a_loss_that_is_no_number_is_recorded_as_json(prepare, tmp_path):
    result = train(prepare(lr=1e30, val_every=3), tmp_path, Listener())
    metrics, _, summary = read(result.path)
    assert metrics[0]["loss"] > 0
    assert (metrics[2]["loss"], metrics[2]["val_loss"], summary["loss_last"]) == (None, None, None)
    assert "s:3 trl:nan" in (result.path / "main.log").read_text()


# Interrupts


@pytest.mark.parametrize("number", INTERRUPTS)
def test_a_signal_ends_the_run_after_its_step(prepare, tmp_path, number):
    before = [signal.getsignal(n) for n in INTERRUPTS]
    result = train(prepare(steps=9, val_every=2), tmp_path, Listener(after=4, signals=[number]))
    metrics, profile, summary = read(result.path)
    assert (result.stopped_by, summary["interrupted"]) == (number, True)
    assert len(metrics) == summary["steps"] == profile["steps"] + profile["warmup"] == 4
    assert summary["val_loss"].keys() == {"0", "2", "4"}
    assert [signal.getsignal(n) for n in INTERRUPTS] == before


def test_a_signal_before_the_first_step(prepare, tmp_path):
    result = train(prepare(steps=9, val_every=2), tmp_path, Listener(after=0, signals=[signal.SIGINT]))
    metrics, profile, summary = read(result.path)
    assert (metrics, profile, summary["steps"], summary["interrupted"]) == ([], {}, 0, True)
    assert (summary["loss_last"], summary["step_ms_median"]) == (None, None)


def test_a_second_signal_ends_the_run_at_once(prepare, tmp_path):
    before = [signal.getsignal(n) for n in INTERRUPTS]
    listener = Listener(after=2, signals=[signal.SIGTERM, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        train(prepare(steps=9), tmp_path, listener)
    assert len(listener.steps) == 2
    assert [signal.getsignal(n) for n in INTERRUPTS] == before


@pytest.mark.parametrize("number", INTERRUPTS)
def test_ctrl_c(text, tmp_path, number):
    job = ["--model", "gpt2-tiny", "--data", text, "-B", "2", "-T", "16", "--steps", "100000", "--val-every", "7"]
    running = subprocess.Popen(
        [sys.executable, "-m", "cpuopt", "train", *job, "--json"],
        cwd=tmp_path,
        env={name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while sum(len(p.read_text().splitlines()) for p in tmp_path.glob("runs/*/metrics.jsonl")) < 3:
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(number)
        out, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    (folder,) = Path(tmp_path, "runs").iterdir()
    metrics, profile, summary = read(folder)
    assert running.returncode == 128 + number
    assert json.loads(out) == {**summary, "path": str(folder.relative_to(tmp_path))}
    assert summary["interrupted"] is True
    assert 3 <= summary["steps"] == len(metrics) < 100000
    assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1))
    assert profile["steps"] >= 2
    assert (folder / "main.log").read_text().count("trl:") == len(metrics)
