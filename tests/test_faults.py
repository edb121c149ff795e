"""What a run keeps when something goes wrong around it: signals, names that are taken, folders that are links."""

import errno
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from fcntl import LOCK_EX, flock, ioctl
from pathlib import Path

import numpy as np
import pytest

from cpuopt import checkpoint, cli, files, job, record, weights
from cpuopt import train as training
from cpuopt.cli import common
from cpuopt.errors import UserError
from cpuopt.report import console
from cpuopt.train import stop_flag, train

SIZES = '{"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "block_size": 16}'


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBA_NUM_THREADS", threads := os.environ["NUMBA_NUM_THREADS"])
    monkeypatch.setattr(common, "cores", lambda: int(threads))
    Path("text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(400)))


class Listener:
    """Hears of a run; calls `act` when some steps are done."""

    def __init__(self, after=None, act=lambda: None):
        self.notes, self.steps, self.after, self.act = [], 0, after, act

    def step(self, metrics):
        self.steps += 1
        if self.steps == self.after:
            self.act()

    def validation(self, step, loss):
        pass

    def sample(self, step, text):
        pass

    def note(self, text):
        self.notes.append(text)


def prepare(**more):
    base = {"model": SIZES, "data": "text.txt", "B": 2, "T": 8, "steps": 3, "val_every": 0, "variant": "vanilla"}
    return job.prepare(job.Settings(**{**base, **more}))


def run(listener=None, change=lambda ready: None, **more):
    ready, listener = prepare(**more), listener or Listener()
    change(ready)
    ticks = itertools.count(step=0.25)
    return train(ready, Path("runs"), listener, lambda: next(ticks)), ready, listener


def raising(*numbers):
    return lambda: [signal.raise_signal(n) for n in numbers]


# What `--save` writes, and where


def test_what_a_killed_save_left_costs_no_weights_and_goes_away():
    pid = os.getpid()  # in a container, the next process has the same number
    for name in (f".tmp-out-{pid}", ".tmp-out-0123abcd", ".tmp-out-more-0123abcd", ".tmp-out"):
        Path(name).mkdir()
        Path(name, "model.safetensors").write_bytes(b"half")
    Path(".tmp-model.bin-0123abcd").write_bytes(b"half")
    _, ready, listener = run(save="out")
    assert listener.notes == ["removed .tmp-out-0123abcd, which an interrupted save has left"]
    read = weights.open_weights(Path("out")).read
    assert all(np.array_equal(read(n), p) for n, p in ready.engine.parameters().items())
    _, _, listener = run(save="model.bin")
    assert listener.notes == ["removed .tmp-model.bin-0123abcd, which an interrupted save has left"]
    left = {p.name for p in Path.cwd().iterdir() if p.name.startswith(".tmp")}
    assert left == {f".tmp-out-{pid}", ".tmp-out-more-0123abcd", ".tmp-out"}  # not of the form that is ours


def test_what_a_living_process_writes_is_not_a_leftover():
    with files.whole_directory(Path("out").absolute()) as part:
        assert files.remove_leftovers(Path("out").absolute()) == []
        assert part.is_dir()
    with open(".tmp-x.bin-0123abcd", "wb") as file:
        flock(file, LOCK_EX)
        assert files.remove_leftovers(Path("x.bin").absolute()) == []
    assert files.remove_leftovers(Path("x.bin").absolute()) == [".tmp-x.bin-0123abcd"]


def test_names_are_not_made_from_the_number_of_the_process(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with files.whole_directory(Path("a/b")) as one, files.whole_directory(Path("a/b")) as other:
        assert one != other


@pytest.mark.parametrize("name", ["out", "model.bin"])
def test_a_place_that_was_taken_meanwhile_is_left_alone_and_another_one_said(name):
    result, _, listener = run(Listener(1, lambda: Path(name).write_text("mine")), save=name)
    assert Path(name).read_text() == "mine"
    other = {"out": "out-2", "model.bin": "model-2.bin"}[name]
    assert result.diagnosis == f"the weights are at {other!r}, not at {name!r}"
    assert "is there already" in listener.notes[0]
    assert result.summary["weights"] == other
    assert weights.open_weights(Path(other)).config.n_embd == 16


def test_a_disk_that_fails_sends_the_weights_to_the_run(monkeypatch):
    right = files.write_synced

    def full(path, parts):
        if "elsewhere" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(path, parts)

    monkeypatch.setattr(files, "write_synced", full)
    monkeypatch.setattr(weights, "write_synced", full)
    for name in ("elsewhere/model.bin", "elsewhere/out"):
        result, _, listener = run(save=name)
        there = result.path / Path(name).name
        assert result.diagnosis == f"the weights are at {str(there)!r}, not at {name!r}"
        assert "No space left" in listener.notes[0]
        assert weights.open_weights(there).config.n_embd == 16
        assert not any(Path("elsewhere").iterdir())


def test_weights_that_nothing_takes_are_a_failure(monkeypatch):
    def refuse(path, *args, **more):
        raise UserError(f"cannot write {str(path)!r}: no")

    monkeypatch.setattr(training, "save_weights", refuse)
    result, _, listener = run(save="out")
    assert result.diagnosis == "the weights are not at 'out', and nowhere else"
    assert len(listener.notes) == 2
    assert result.summary["weights"] is None


@pytest.mark.parametrize("save", [["--save", "out"], []])
def test_weights_that_are_no_numbers_are_not_saved_and_the_status_says_so(capsys, save):
    flags = ["train", "--model", SIZES, "--data", "text.txt", "-B", "2", "-T", "8", "--variant", "vanilla"]
    assert cli.main([*flags, "--steps", "5", "--val-every", "0", "--lr", "1e30", "--guard", "off", *save]) == 1
    assert "the weights are not finite after step 5: " in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_name_that_no_disk_takes_is_refused_before_the_training():
    for name in ("n" * 255, "n" * 240 + ".bin", "n" * 300, "a\0b"):
        with pytest.raises(UserError, match="nothing can be written to"):
            prepare(save=name)


# Links


def test_a_link_is_written_through_and_one_to_nothing_is_made_something():
    Path("disk/empty").mkdir(parents=True)
    for name, target in (("out", "disk/empty"), ("out2", "disk/new"), ("model.bin", "disk/m.bin")):
        os.symlink(target, name)
        run(save=name)
        assert Path(name).is_symlink()
        assert weights.open_weights(Path(target)).config.n_embd == 16
    assert sorted(p.name for p in Path("disk").iterdir()) == ["empty", "m.bin", "new"]
    os.symlink("round", "round")
    for name in ("out", "round"):
        with pytest.raises(UserError, match="is there already"):
            prepare(save=name)


def test_a_folder_of_runs_and_one_of_checkpoints_may_be_links():
    Path("disk/runs").mkdir(parents=True)
    os.symlink("disk/runs", "runs")
    result, _, _ = run(steps=4, save_every=2)
    os.rename(result.path / "checkpoints", "disk/checkpoints")
    os.symlink(Path("disk/checkpoints").absolute(), result.path / "checkpoints")
    outside = Path("disk/outside")
    outside.mkdir()
    (outside / "file").write_text("mine")
    os.symlink(outside.absolute(), result.path / "checkpoints/step-00000001")
    os.symlink(outside.absolute(), result.path / "checkpoints/.tmp-step-00000009-0123abcd")
    found = checkpoint.newest(result.path)
    settings = job.resumed(found, {"steps": 8})
    listener = Listener()
    train(job.prepare(settings, resume=found), Path("runs"), listener, resume=found)
    assert listener.notes == ["removed .tmp-step-00000009-0123abcd, which an interrupted save has left"]
    assert sorted(os.listdir("disk/checkpoints")) == ["step-00000006", "step-00000008"]
    assert (outside / "file").read_text() == "mine"
    assert checkpoint.newest(result.path).state["step"] == 8


def test_a_link_to_no_folder_of_runs_is_refused_at_once():
    os.symlink("nowhere", "runs")
    with pytest.raises(UserError, match="--runs runs: "):
        record.check_root(Path("runs"))


# Two runs


def test_two_runs_of_one_name_at_one_instant_both_have_a_folder(monkeypatch):
    right, names = Path.mkdir, []

    def mkdir(path, *args, **more):
        if path.parent.name == "runs" and not path.exists() and len(names) < 2:
            names.append(path.name)
            right(path)  # the other process was faster
        right(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with record.Run(Path("runs"), "train", {}) as mine:
        assert mine.path.name.endswith("-train.3")
    assert names == [mine.path.name[:-2], f"{mine.path.name[:-2]}.2"]
    assert {p.name for p in Path("runs").iterdir()} == {mine.path.name, *names}


def test_a_run_that_has_gone_is_a_user_error():
    with pytest.raises(UserError, match="cannot read the run 'nowhere'"):
        record.Run.reopen(Path("nowhere"), 1)


# Signals


def test_a_flood_of_signals_ends_the_run_after_its_step_with_a_checkpoint():
    """What ends a session sends several; only a second Ctrl-C is meant to interrupt."""
    flood = raising(signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)
    result, _, _ = run(Listener(2, flood), steps=9, save="out")
    assert (result.stopped_by, result.summary["steps"]) == (signal.SIGHUP, 2)
    assert checkpoint.newest(result.path).state["step"] == 2
    assert not Path("out").exists()


def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    try:
        result, _, _ = run(Listener(1, raising(signal.SIGHUP)))
        assert (result.stopped_by, result.summary["steps"]) == (0, 3)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_in_a_save_lets_it_finish(monkeypatch):
    right = files.sync_directory

    def sync(path):
        if not sent and path.name.startswith(".tmp-"):
            sent.append(signal.raise_signal(signal.SIGINT))
        right(path)

    monkeypatch.setattr(files, "sync_directory", sync)
    sent = []
    result, _, _ = run(steps=5, save_every=2)
    assert (result.stopped_by, result.summary["steps"]) == (signal.SIGINT, 2)
    assert checkpoint.newest(result.path).state["step"] == 2
    sent = []
    result, ready, _ = run(save="out")  # all was done: there is nothing to go on with
    assert (result.stopped_by, result.diagnosis, result.summary["interrupted"]) == (0, "", False)
    read = weights.open_weights(Path("out")).read
    assert all(np.array_equal(read(n), p) for n, p in ready.engine.parameters().items())


def test_a_second_ctrl_c_in_a_save_leaves_the_checkpoint_before_it(monkeypatch):
    right = files.sync_directory

    def sync(path):
        if "step-00000004" in str(path):
            raising(signal.SIGINT, signal.SIGINT)()
        right(path)

    monkeypatch.setattr(files, "sync_directory", sync)
    with pytest.raises(KeyboardInterrupt):
        run(steps=5, save_every=2)
    (path,) = Path("runs").iterdir()
    assert checkpoint.newest(path).state["step"] == 2
    assert os.listdir(path / "checkpoints") == ["step-00000002"]


@pytest.mark.parametrize("more", [{"val_every": 2}, {"sample_every": 2, "sample_tokens": 3}])
def test_ctrl_c_in_a_validation_or_a_sample_costs_no_step(more):
    def interrupt(ready):
        where, name = (ready.engine, "forward") if "val_every" in more else (training, "generate")
        right, calls = getattr(where, name), itertools.count(1)

        def function(*args, **named):
            if next(calls) == ("val_every" in more) + 1:  # one comes before the first step
                signal.raise_signal(signal.SIGINT)
            return right(*args, **named)

        patch.setattr(where, name, function)

    with pytest.MonkeyPatch.context() as patch:
        result, _, _ = run(change=interrupt, steps=9, val_batches=1, **more)
    assert (result.stopped_by, result.summary["steps"]) == (signal.SIGINT, 2)
    assert len((result.path / "metrics.jsonl").read_text().splitlines()) == 2
    assert checkpoint.newest(result.path).state["step"] == 2


def test_the_flag_names_the_first_signal():
    with stop_flag() as stopped:
        assert stopped() == 0
        raising(signal.SIGTERM, signal.SIGHUP)()
        assert stopped() == signal.SIGTERM


def wait_for_steps(running, n):
    deadline = time.monotonic() + 120
    while sum(len(p.read_text().splitlines()) for p in Path("runs").glob("*/metrics.jsonl")) < n:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_closed_terminal_ends_the_run_with_a_checkpoint():
    """A session of its own, whose terminal goes away: SIGHUP comes, and nothing can be printed from then on."""
    ours, theirs = pty.openpty()

    def lead():
        os.setsid()
        ioctl(theirs, termios.TIOCSCTTY, 0)

    environment = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    words = ["train", "--model", SIZES, "--data", "text.txt", "-B", "2", "-T", "8", "--variant", "vanilla"]
    running = subprocess.Popen(
        [sys.executable, "-m", "cpuopt", *words, "--steps", "1000000", "--val-every", "0"],
        stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead, env=environment,
    )  # fmt: skip
    try:
        os.close(theirs)
        wait_for_steps(running, 5)
        os.kill(running.pid, signal.SIGSTOP)  # stopped and continued on the way
        time.sleep(0.1)
        os.kill(running.pid, signal.SIGCONT)
        os.close(ours)
        assert running.wait(60) == 128 + signal.SIGHUP
    finally:
        running.kill()
    (path,) = Path("runs").iterdir()
    done = json.loads((path / "summary.json").read_text())["steps"]
    assert checkpoint.newest(path).state["step"] == done == len((path / "metrics.jsonl").read_text().splitlines())


def test_only_a_lost_terminal_is_survived():
    with console.surviving_hangup():
        raise OSError(errno.EIO, "gone")
    with pytest.raises(BrokenPipeError), console.surviving_hangup():
        raise BrokenPipeError(errno.EPIPE, "no reader")
