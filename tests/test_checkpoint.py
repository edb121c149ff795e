"""Checkpoints: a resumed run is the run, bit for bit, and nothing that breaks one is lost or taken for whole."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from listening import KilledError, Listener, die

from cpuopt import cli, files
from cpuopt.errors import UserError
from cpuopt.train import checkpoint, job
from cpuopt.train.record import Run
from cpuopt.train.trainer import train

FAULTS = Path(__file__).parent / "faults"
TENSORS = checkpoint.TENSORS["adamw"]
ALL_FILES = (*TENSORS, checkpoint.STATE, checkpoint.MANIFEST)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(chr(97 + i * i % 23) for i in range(200)))
    return str(path)


@pytest.fixture
def small(text, tmp_path):
    """Give the settings of a run of 20 steps over two and a half epochs, and run it or go on with it."""
    sizes = '{"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "block_size": 16}'
    base = {"model": sizes, "data": text, "B": 2, "T": 8, "steps": 20, "val_every": 4, "lr": 1e-2, "save_every": 5}

    def settings(**more):
        return job.Settings(**{**base, "variant": "vanilla", **more})

    def run(root=tmp_path / "runs", die_after=None, resume=None, change=None, **more):
        given = settings(**more)
        if resume is not None:
            given = job.resumed(resume, more)
        ready = job.prepare(given, resume=resume)
        if change:
            change(ready)
        listener = Listener(die_after, die)
        ticks = itertools.count(step=0.25)
        try:
            result = train(ready, root, listener, lambda: next(ticks), resume)
        except KilledError:
            return None, ready, listener
        return result, ready, listener

    run.settings = settings
    return run


def folder(root):
    (path,) = root.iterdir()
    return path


def content(run, step=20):
    """What a run leaves that must be the same byte for byte."""
    path = run / "checkpoints" / f"step-{step:08d}"
    parts = {name: (path / name).read_bytes() for name in TENSORS}
    return parts | {name: (run / name).read_bytes() for name in ("metrics.jsonl", "main.log")}


# Exact resume


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"total_batch": 32, "clip": 0.5, "weight_decay": 0.1, "decay": "matrices"},
        {"schedule": "cosine", "warmup_steps": 3, "guard_z": 3.0, "seed": 5},
        {"variant": "optimized"},
        {"variant": "optimized", "dtype": "bf16"},
    ],
)
def test_ten_steps_and_ten_more_are_twenty(small, tmp_path, more):
    small(tmp_path / "whole", **more)
    small(tmp_path / "cut", die_after=13, **more)
    run = folder(tmp_path / "cut")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 13
    found = checkpoint.newest(run)
    assert (found.state["step"], found.passed_over) == (10, ())
    result, _, _ = small(resume=found)
    assert content(run) == content(folder(tmp_path / "whole"))
    assert result.summary["steps"] == 20
    assert result.summary["loss_first"] > result.summary["loss_last"]
    assert list(result.summary["val_loss"]) == ["0", "4", "8", "12", "16", "20"]


def test_resumed_twice_on_other_numbers_of_threads(small, tmp_path):
    small(tmp_path / "whole", threads=2, variant="optimized")
    small(tmp_path / "cut", threads=1, die_after=7, variant="optimized")
    run = folder(tmp_path / "cut")
    small(resume=checkpoint.newest(run), threads=4, die_after=18)
    assert checkpoint.newest(run).state["step"] == 15
    small(resume=checkpoint.newest(run), threads=2)
    assert content(run) == content(folder(tmp_path / "whole"))


def test_a_skipped_step_and_the_window_are_remembered(small, tmp_path):
    def spoil(ready):
        right = ready.engine.step

        def step(**more):
            done = right(**more)
            return done

        ready.engine.step = step

    _, whole, _ = small(tmp_path / "whole", guard_z=1.0, change=spoil)
    small(tmp_path / "cut", guard_z=1.0, die_after=16)
    _, ready, _ = small(resume=checkpoint.newest(folder(tmp_path / "cut")))
    assert ready.engine.step_number == whole.engine.step_number
    one, two = (checkpoint.newest(folder(tmp_path / name)).state for name in ("whole", "cut"))
    assert one["guard"] == two["guard"]
    assert len(one["guard"]["windows"]["loss"]) == 20 - one["guard"]["skipped"]


def test_more_steps_go_on_from_the_end(small, tmp_path):
    small(tmp_path / "whole", steps=30)
    small(tmp_path / "cut", steps=20)
    run = folder(tmp_path / "cut")
    small(resume=checkpoint.newest(run), steps=30)
    assert [json.loads(x)["step"] for x in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 31)]
    same = TENSORS
    assert {n: content(run, 30)[n] for n in same} == {n: content(folder(tmp_path / "whole"), 30)[n] for n in same}


def test_only_the_newest_are_kept(small, tmp_path):
    small(keep=3)
    assert sorted(p.name for p in (folder(tmp_path / "runs") / "checkpoints").iterdir()) == [
        "step-00000010",
        "step-00000015",
        "step-00000020",
    ]


def test_other_settings_or_text_are_refused_with_what_differs(small, tmp_path, text):
    small(die_after=7)
    found = checkpoint.newest(folder(tmp_path / "runs"))
    with pytest.raises(UserError, match=r"the run has B 2, not 4, lr 0.01, not 0.5; leave that out"):
        job.resumed(found, {"B": 4, "lr": 0.5, "steps": 50, "T": 8})
    before = Path(text).read_text()
    try:
        Path(text).write_text(before.replace("a", "b"))
        with pytest.raises(UserError, match="holds other text"):
            small(resume=found)
    finally:
        Path(text).write_text(before)


# Damage


@pytest.fixture
def two(small, tmp_path):
    """A run with checkpoints of steps 5 and 10."""
    small(die_after=12)
    return folder(tmp_path / "runs")


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("bit", [0, 1, 2])
def test_a_flipped_bit_is_found_and_the_one_before_taken(two, name, bit):
    path = two / "checkpoints" / "step-00000010" / name
    damaged = bytearray(path.read_bytes())
    damaged[[0, len(damaged) // 2, -1][bit]] ^= 1 << bit
    path.write_bytes(damaged)
    found = checkpoint.newest(two)
    assert found.state["step"] == 5
    assert name in found.passed_over[0] or "manifest" in found.passed_over[0]
    assert "step-00000010" in found.passed_over[0]


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("size", ["0", "1", "half", "one less", "gone"])
def test_a_short_file_is_found_and_the_one_before_taken(two, name, size):
    path = two / "checkpoints" / "step-00000010" / name
    n = path.stat().st_size
    if size == "gone":
        path.unlink()
    else:
        os.truncate(path, {"0": 0, "1": 1, "half": n // 2, "one less": n - 1}[size])
    found = checkpoint.newest(two)
    assert (found.state["step"], len(found.passed_over)) == (5, 1)
    assert name in found.passed_over[0]


def test_files_of_two_steps_are_no_checkpoint(two):
    one, other = (two / "checkpoints" / f"step-000000{n}" for n in ("05", "10"))
    shutil.copy(one / "adam_m.safetensors", other / "adam_m.safetensors")
    assert checkpoint.newest(two).state["step"] == 5
    other.rename(two / "checkpoints" / "step-00000011")
    assert "expected" not in checkpoint.newest(two).passed_over[0]
    shutil.rmtree(two / "checkpoints" / "step-00000011")
    shutil.copytree(one, other)
    with pytest.raises(UserError, match="has the state of step 5"):
        checkpoint.verify(other)


def test_what_is_no_checkpoint_is_ignored_and_leftovers_are_removed(two, small):
    for name in ("step-abc", "step-99999999999", "notes", ".tmp-step-00000015-1"):
        (two / "checkpoints" / name).mkdir()
    (two / "checkpoints" / "step-00000099").write_text("a file")
    assert checkpoint.newest(two).state["step"] == 10
    _, _, listener = small(resume=checkpoint.newest(two))
    assert listener.notes == ["removed .tmp-step-00000015-1, left by an interrupted save"]
    assert not list((two / "checkpoints").glob(".tmp-*"))
    (two / "checkpoints" / "step-00000050").mkdir()
    assert checkpoint.newest(two).state["step"] == 20


def test_where_none_is_whole_each_fault_is_named(two):
    for path in (two / "checkpoints").iterdir():
        (path / "params.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint to go on from: .*step-00000010.*step-00000005"):
        checkpoint.newest(two)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_filled(two, small):
    found = checkpoint.newest(two)
    other = job.prepare(small.settings(model="gpt2-tiny"))
    before = {n: p.copy() for n, p in other.engine.parameters().items()}
    with pytest.raises(UserError, match="tensors of this model"):
        checkpoint.load(found, other.engine)
    assert all(np.array_equal(p, before[n]) for n, p in other.engine.parameters().items())


def test_every_file_is_on_the_disk_before_it_has_its_name_and_the_old_go_last(two, small, monkeypatch):
    ready = job.prepare(small.settings())
    calls = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def synced(fd):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(("rename", Path(b).name)), rename(a, b)))
    monkeypatch.setattr(shutil, "rmtree", lambda p, **kw: (calls.append(("rmtree", Path(p).name)), rmtree(p, **kw)))
    checkpoint.save(two, ready.engine, {"step": 15}, keep=1)
    part = calls[5][1]
    assert part.startswith(".tmp-step-00000015-")
    assert calls[:8] == [
        *[("fsync", name) for name in ALL_FILES],
        ("fsync", part),
        ("rename", "step-00000015"),
        ("fsync", "checkpoints"),
    ]
    removed = [name for what, name in calls[8:] if what == "rename"]
    assert [name.split("-")[2] for name in removed] == ["00000010", "00000005"]
    assert os.listdir(two / "checkpoints") == ["step-00000015"]


def test_saving_the_same_step_again_replaces_it(two, small):
    ready = job.prepare(small.settings(seed=3))
    (two / "checkpoints" / "step-00000010" / "state.json").write_text("damaged")
    state = {**checkpoint.newest(two).state, "step": 10}  # of step 5
    checkpoint.save(two, ready.engine, state, keep=2)
    found = checkpoint.newest(two)
    assert (found.state, found.passed_over) == (state, ())


# Disks that fail


def failing(monkeypatch, number, times):
    """Let fsync fail some times."""
    right, left = os.fsync, itertools.count(1)

    def fsync(fd):
        if next(left) <= times:
            raise OSError(number, os.strerror(number))
        right(fd)

    monkeypatch.setattr(files.os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_save_that_fails_costs_one_line_and_is_tried_again(small, tmp_path, monkeypatch, number):
    small(tmp_path / "whole")
    failing(monkeypatch, number, 1)
    monkeypatch.setattr("cpuopt.train.record.write_whole", lambda path, parts: path.write_bytes(b"".join(parts)))
    result, _, listener = small()
    (note,) = listener.notes
    assert note.startswith(f"no checkpoint after step 5: {os.strerror(number)}; there is none before it")
    run = folder(tmp_path / "runs")
    assert content(run) == content(folder(tmp_path / "whole"))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000015", "step-00000020"]
    assert result.checkpoint.name == "step-00000020"


def test_the_old_checkpoint_stays_while_none_can_be_written(small, tmp_path, monkeypatch):
    small(die_after=7)
    run = folder(tmp_path / "runs")
    before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    failing(monkeypatch, errno.ENOSPC, 10**6)
    monkeypatch.setattr("cpuopt.train.record.write_whole", lambda path, parts: path.write_bytes(b"".join(parts)))
    result, _, listener = small(resume=checkpoint.newest(run))
    assert [n[:28] for n in listener.notes] == [f"no checkpoint after step {n}: "[:28] for n in (10, 15, 20)]
    assert all("step-00000005 stays" in n for n in listener.notes)
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == before
    assert result.checkpoint.name == "step-00000005"


def test_a_folder_that_vanishes_does_not_end_the_training(small, tmp_path):
    def vanish(ready):
        right, calls = ready.engine.step, itertools.count(1)

        def step(**more):
            if next(calls) == 8:
                shutil.rmtree(folder(tmp_path / "runs"))
            return right(**more)

        ready.engine.step = step

    result, ready, listener = small(change=vanish)
    assert result.summary["steps"] == 20
    assert ready.engine.step_number == 20
    assert "cannot write" in listener.notes[0]
    assert result.checkpoint.name == "step-00000020"
    found = checkpoint.newest(result.path)
    assert found.state["step"] == 20
    log = (result.path / "main.log").read_text()
    assert [int(x.split()[0][2:]) for x in log.splitlines() if "trl" in x] == [*range(8, 21)]


def test_a_parameter_that_is_no_number_is_not_saved_over_good_ones(two, small):
    ready = job.prepare(small.settings())
    ready.engine.parameters()["ln_f.bias"][2] = np.inf
    with pytest.raises(UserError, match=r"ln_f\.bias is not finite"):
        checkpoint.save(two, ready.engine, {"step": 15}, keep=1)
    assert checkpoint.newest(two).state["step"] == 10


@pytest.mark.slow
def test_a_full_disk(small, tmp_path):
    """On a real file system of 1 MB, where one checkpoint fits and a second does not."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=220k", "none", str(mount)]).returncode:
        pytest.skip("needs the right to mount")
    try:
        result, ready, listener = small(mount / "runs", steps=10)
        assert ready.engine.step_number == 10
        assert "No space left" in listener.notes[0]
        assert checkpoint.newest(folder(mount / "runs")).state["step"] == 5
        assert result.summary["steps"] == 10
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(small, tmp_path):
    """On a real file system, remounted in the middle of a run."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(mount)]).returncode:
        pytest.skip("needs the right to mount")

    def remount(ready):
        right, calls = ready.engine.step, itertools.count(1)

        def step(**more):
            if next(calls) == 8:
                subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
            return right(**more)

        ready.engine.step = step

    try:
        result, ready, listener = small(mount / "runs", change=remount)
        assert ready.engine.step_number == 20
        assert any("no checkpoint after step 10: Read-only file system" in n for n in listener.notes)
        assert checkpoint.newest(folder(mount / "runs")).state["step"] == 5
        assert result.summary["steps"] == 20
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# Two processes, signals, the command line


def test_a_second_process_is_refused(two):
    run, _ = Run.reopen(two, 5)
    before = (two / "main.log").read_bytes()
    code = f"from cpuopt.train.record import Run; from pathlib import Path; Run.reopen(Path({str(two)!r}), 10)"
    with run:
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert "another process is writing to the run" in second.stderr
        assert (two / "main.log").read_bytes() == before
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_torn_last_line_is_dropped(two):
    log, metrics = (two / "main.log").read_text(), (two / "metrics.jsonl").read_text()
    with open(two / "metrics.jsonl", "a") as file:
        file.write('not json\n{"step": 13, "lo')
    with open(two / "main.log", "a") as file:
        file.write("s:1")
    with Run.reopen(two, 12)[0]:
        pass
    assert (two / "metrics.jsonl").read_text() == metrics
    assert (two / "main.log").read_text() == log


@pytest.fixture
def command(text, tmp_path):
    flags = ["--model", '{"n_layer":1,"n_head":2,"n_embd":16,"vocab_size":256,"block_size":16}', "--data", text]
    flags += ["-B", "2", "-T", "8", "--variant", "vanilla", "--val-every", "0", "--save-every", "5"]
    environment = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"}

    def start(*more, job=True):
        words = [sys.executable, "-m", "cpuopt", "train", *(flags if job else []), *more]
        return subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


def wait_for_steps(root, n, running):
    deadline = time.monotonic() + 120
    while sum(len(p.read_text().splitlines()) for p in root.glob("*/metrics.jsonl")) < n:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "more"), [(signal.SIGKILL, []), (signal.SIGTERM, []), (signal.SIGKILL, ["--dtype", "bf16"])]
)
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(command, tmp_path, number, more):
    running = command("--steps", "1000000", *more)
    try:
        wait_for_steps(tmp_path / "runs", 7, running)
        for each in (signal.SIGSTOP, signal.SIGCONT, number, number):
            running.send_signal(each)
        running.communicate(timeout=120)
    finally:
        running.kill()
    run = folder(tmp_path / "runs")
    done = len((run / "metrics.jsonl").read_text().splitlines())
    saved = checkpoint.newest(run).state["step"]
    if number == signal.SIGTERM:  # twice: what ends a machine sends it to the group, and once more to each
        assert (running.returncode, saved) == (128 + number, done)
    else:
        assert saved in (done // 5 * 5, done // 5 * 5 - 5)
    steps = str(done + 8)
    resumed = command("--resume", "--steps", steps, "--json", job=False)
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert json.loads(out)["steps"] == done + 8
    whole = command("--steps", steps, "--runs", "whole", *more)
    whole.communicate(timeout=120)
    one, two = content(run, done + 8), content(folder(tmp_path / "whole"), done + 8)
    assert {n: one[n] for n in TENSORS} == {n: two[n] for n in TENSORS}
    assert one["main.log"] == two["main.log"]


@pytest.mark.usefixtures("here")
def test_the_command_line_passes_over_a_bad_checkpoint_and_says_so(two, capsys):
    os.truncate(two / "checkpoints" / "step-00000010" / "adam_v.safetensors", 100)
    assert cli.main(["train", "--resume"]) == 0
    out, err = capsys.readouterr()
    assert "passed over a checkpoint" in err
    assert "adam_v.safetensors" in err
    assert "goes on after step 5" in out
    assert cli.main(["train", "--resume", two.name, "--lr", "3"]) == 2
    assert "the run has lr 0.01, not 3.0" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "nowhere"]) == 2
    assert cli.main(["train", "--resume", "--runs", "nowhere"]) == 2


# kill -9


@pytest.mark.parametrize("runs", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_no_instant_of_a_save_is_a_bad_one_to_be_killed_in(runs):
    done = subprocess.run(
        [sys.executable, FAULTS / "kill_saves.py", str(runs)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert (seen["runs"], seen["lost"], seen["mixed"]) == (runs, 0, 0)
    assert seen["killed_in_a_save"] > runs // 4


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--lora", "r=2"]])
def test_kills_in_epochs_of_chats_change_no_byte_of_the_end(flags):
    done = subprocess.run(
        [sys.executable, FAULTS / "kill_chats.py", "6", *flags], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert (seen["kills"], seen["lost"], seen["differ"]) == (6, 0, 0)
    assert seen["in_an_epoch"] > 2


def test_a_run_that_cannot_be_resumed_says_why(tmp_path):
    (tmp_path / "short").mkdir()
    with pytest.raises(UserError, match="short' has kept no checkpoint; train with --save-every N"):
        checkpoint.find_run(tmp_path, "short")
    with pytest.raises(UserError, match=r"there is no run .*other'; list the runs with cpuopt runs list"):
        checkpoint.find_run(tmp_path, "other")
