"""What a run keeps when something goes wrong around it: signals, names that are taken, folders that are links."""

import errno
import importlib
import itertools
import json
import linecache
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from fcntl import LOCK_EX, flock, ioctl
from pathlib import Path

import numpy as np
import pytest
from listening import Listener, raising

from cpuopt import cli, engine, files, weights
from cpuopt.data import batches
from cpuopt.data.corpus import load_corpus
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.compile import jit
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.report import console
from cpuopt.train import checkpoint, job, provenance, record, samples
from cpuopt.train import trainer as training
from cpuopt.train.trainer import stop_flag, train

SIZES = '{"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "block_size": 16}'


@pytest.fixture(autouse=True)
def _here(here):
    Path("text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(400)))


def prepare(**more):
    base = {"model": SIZES, "data": "text.txt", "B": 2, "T": 8, "steps": 3, "val_every": 0, "variant": "vanilla"}
    return job.prepare(job.Settings(**{**base, **more}))


def run(listener=None, change=lambda ready: None, **more):
    ready, listener = prepare(**more), listener or Listener()
    change(ready)
    ticks = itertools.count(step=0.25)
    return train(ready, Path("runs"), listener, lambda: next(ticks)), ready, listener


# What `--save` writes, and where


def test_what_a_killed_save_left_costs_no_weights_and_goes_away():
    pid = os.getpid()  # in a container, the next process has the same number
    for name in (f".tmp-out-{pid}", ".tmp-out-0123abcd", ".tmp-out-more-0123abcd", ".tmp-out"):
        Path(name).mkdir()
        Path(name, "model.safetensors").write_bytes(b"half")
    Path(".tmp-model.bin-0123abcd").write_bytes(b"half")
    _, ready, listener = run(save="out")
    assert listener.notes == ["removed .tmp-out-0123abcd, left by an interrupted save"]
    read = weights.open_weights(Path("out")).read
    assert all(np.array_equal(read(n), p) for n, p in ready.engine.parameters().items())
    _, _, listener = run(save="model.bin")
    assert listener.notes == ["removed .tmp-model.bin-0123abcd, left by an interrupted save"]
    left = {p.name for p in Path.cwd().iterdir() if p.name.startswith(".tmp")}
    assert left == {f".tmp-out-{pid}", ".tmp-out-more-0123abcd", ".tmp-out"}  # not of the form that is ours


def test_convert_removes_what_a_killed_one_has_left(capsys):
    run(save="out")
    Path(".tmp-again-0123abcd").mkdir()
    assert cli.main(["convert", "out", "again"]) == 0
    assert "removed .tmp-again-0123abcd" in capsys.readouterr().err
    assert not Path(".tmp-again-0123abcd").exists()


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
    monkeypatch.setattr("cpuopt.weights.huggingface.write_synced", full)
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


def test_a_link_in_the_place_of_weights_is_refused_whatever_it_leads_to():
    Path("disk/empty").mkdir(parents=True)
    for name, target in (("out", "disk/empty"), ("out2", "disk/new"), ("model.bin", "disk/m.bin"), ("round", "round")):
        os.symlink(target, name)
        with pytest.raises(UserError, match="is there already"):
            prepare(save=name)
    assert os.listdir("disk") == ["empty"]


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
    assert listener.notes == ["removed .tmp-step-00000009-0123abcd, left by an interrupted save"]
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
        where, name = (ready.engine, "forward") if "val_every" in more else (samples, "generate")
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


@pytest.mark.parametrize("e", [KeyboardInterrupt(), UserError("it does not compile")], ids=["interrupt", "error"])
def test_an_interrupt_or_a_compilers_error_does_not_wait_until_all_weights_are_drawn(monkeypatch, e):
    drawn, begun = [], threading.Event()
    model = GPT2(PRESETS["gpt2-tiny"])
    for _, parameter in model.named_parameters():

        def init(rng, out):
            begun.set()
            time.sleep(0.1)
            drawn.append(out)

        monkeypatch.setattr(parameter, "init", init)

    def compiled(*args, **named):
        begun.wait()
        raise e

    monkeypatch.setattr(jit, "compile_kernels", compiled)
    with pytest.raises(type(e)):
        engine.Engine(model, specs(1, 4), threads=1)
    assert 0 < len(drawn) < len(list(model.named_parameters()))


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


def unread(*words):
    """Run a command whose output goes to a pipe that is closed, as behind ``| head -1``."""
    ours, theirs = os.pipe()
    os.close(ours)
    environment = {name: v for name, v in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    command = [sys.executable, "-m", "cpuopt", *words]
    try:
        return subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment, timeout=300)
    finally:
        os.close(theirs)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_run_whose_output_nobody_reads_goes_on(more):
    words = ["train", "--model", SIZES, "--data", "text.txt", "-B", "2", "-T", "8", "--variant", "vanilla"]
    done = unread(*words, "--steps", "3", "--val-every", "0", "--save", "out", *more)
    assert done.returncode == 0, done.stderr
    assert "Broken" not in done.stderr
    (path,) = Path("runs").iterdir()
    assert json.loads((path / "summary.json").read_text())["steps"] == 3
    assert weights.open_weights(Path("out")).config.n_embd == 16


def test_only_output_that_is_lost_is_survived():
    with console.surviving_hangup():
        raise OSError(errno.EIO, "gone")
    with pytest.raises(BrokenPipeError), console.surviving_hangup():
        raise BrokenPipeError(errno.EPIPE, "no reader")


# What a resumed run may differ in

KERNELS = """
import numpy as np
from cpuopt import kernel, ops
{more}

@kernel(ops.gelu_forward, "mine", jit=False)
def gelu_forward(out, inp):
    out[:] = {half} * inp * (1 + np.tanh(np.sqrt(2 / np.pi) * (inp + 0.044715 * inp**3)))
"""
WORDS = ["train", "--model", SIZES, "--data", "text.txt", "-B", "2", "-T", "8", "--variant", "vanilla"]
WORDS += ["--val-every", "0", "--swap", "gelu_forward=mine", "--steps", "2", "--save-every", "1"]


@pytest.fixture
def own(monkeypatch):
    """A run whose kernel file can change, as if each command were a process of its own."""
    before = registry.KERNELS.copy()

    def command(*flags, half=0.5, more=""):
        registry.KERNELS.clear()
        registry.KERNELS.update(before)
        mine = str(Path("mine.py").resolve())
        for name in [n for n, m in sys.modules.items() if getattr(m, "__file__", None) == mine]:
            del sys.modules[name]
        linecache.clearcache()
        Path("mine.py").write_text(KERNELS.format(half=half, more=more))
        importlib.invalidate_caches()
        return cli.main(["train", *flags] if "--resume" in flags else [*WORDS, *flags])

    assert command("--kernels", "mine.py") == 0
    return command


def test_an_edited_kernel_is_refused_and_accepted_on_demand(own, capsys):
    resume = ["--resume", "--kernels", "mine.py", "--steps", "3"]
    assert own(*resume, half=0.5000001) == 2
    err = capsys.readouterr().err
    assert "kernel 'gelu_forward[mine]' is not what it was" in err
    assert "--accept-changes" in err
    (run,) = Path("runs").iterdir()
    assert checkpoint.newest(run).state["step"] == 2
    assert own(*resume) == 0
    assert checkpoint.newest(run).state["changes"] == []
    assert own("--resume", "--kernels", "./mine.py", "--steps", "4", "--accept-changes", half=0.5000001) == 0
    state = checkpoint.newest(run).state
    assert (state["step"], len(state["changes"])) == (4, 1)
    assert state["changes"][0].startswith("after step 3: kernel 'gelu_forward[mine]")
    assert (
        own("--resume", "--kernels", "mine.py", "--steps", "5", half=0.5000001) == 0
    )  # what was accepted is the kernel now
    assert len(json.loads((run / "summary.json").read_text())["changes"]) == 1


def test_another_line_of_the_file_is_said_and_no_more(own, capsys):
    assert own("--resume", "--kernels", "mine.py", "--steps", "3", more="# a comment") == 0
    assert "'mine.py' has changed, but none of its kernels that run" in capsys.readouterr().err


def test_no_file_runs_that_a_checkpoint_alone_names(own, capsys):
    trap = "open('trap', 'w').close()"
    assert own("--resume", "--steps", "3", more=trap) == 2
    err = capsys.readouterr().err
    assert "if you trust these files, name them: --kernels 'mine.py'" in err
    assert not Path("trap").exists()
    assert own("--resume", "--steps", "3", "--kernels", "mine.py", more=trap) == 0
    assert Path("trap").exists()


def altered(change):
    """The newest checkpoint, as if its state said something else."""
    (path,) = Path("runs").iterdir()
    found = checkpoint.newest(path)
    change(found.state)
    return found


def test_versions_processor_and_threads_are_notes():
    run(steps=2, save_every=1)

    def change(state):
        state["made_by"]["versions"] |= {"numba": "0.1", "gone": "1"}
        state["made_by"]["machine"]["target"] = "generic"
        state["made_by"]["run"]["threads"] = "64"
        state["made_by"]["code"]["gelu_forward[vanilla]"] = "x"

    found = altered(change)
    ready = job.prepare(job.resumed(found, {"steps": 3}), resume=found)
    told = "; ".join(ready.notes)
    for part in (
        "'numba' is '",
        ", and was '0.1'",
        "'gone' is None",
        "and was 'generic'",
        "'threads' is '",
        "of 1 kernel ",
    ):
        assert part in told
    assert ready.changes == ()
    found = altered(lambda state: None)
    assert job.prepare(job.resumed(found, {"steps": 3}), resume=found).notes == ()


@pytest.mark.parametrize("nonsense", [None, 7, [], {"kernels": 3}, {"kernels": {"gelu_forward[vanilla]": None}}])
def test_a_checkpoint_that_says_little_of_its_kernels(nonsense):
    run(steps=2, save_every=1)
    found = altered(lambda state: state.pop("made_by") and nonsense is not None and state.update(made_by=nonsense))
    settings = job.resumed(found, {"steps": 3})
    if isinstance(nonsense, dict):
        with pytest.raises(UserError, match="is not what it was"):
            job.prepare(settings, resume=found)
    else:
        assert "does not say which kernels made it" in job.prepare(settings, resume=found).notes[0]


def test_a_kernel_that_cannot_be_looked_through_is_judged_by_its_file():
    now = {"kernels": {"a[x]": "unknown"}, "code": {}, "files": {"a.py": "1"}, "versions": {}, "machine": {}, "run": {}}
    assert provenance.compare(now, now) == ([], [])
    assert provenance.compare({**now, "files": {"a.py": "2"}}, now) == (["kernel 'a[x]' is not what it was"], [])


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {"guard": "skip"}, "--guard skip leaves out the rewrite 'update', which the run had"),
        ({}, {"guard_z": 6.0}, "--guard-z leaves out the rewrite 'update', which the run had"),
        (
            {"guard": "skip"},
            {"guard": "stop"},
            "without --guard skip the rewrite 'update' comes in, which the run did not have",
        ),
    ],
)
def test_a_guard_that_changes_the_rewrites_is_said_in_place_of_the_kernels(then, now, said):
    run(steps=1, save_every=1, variant="optimized", **then)
    found = altered(lambda state: None)
    settings = job.resumed(found, {"steps": 2, **now})
    with pytest.raises(UserError) as e:
        job.prepare(settings, resume=found)
    assert f": {said}: the run would go on as another one; " in str(e.value)
    assert "--accept-changes" in str(e.value)
    assert job.prepare(settings, resume=found, accept_changes=True).changes == (f"after step 1: {said}",)


def test_an_edited_kernel_is_named_beside_other_rewrites():
    now = {"kernels": {"a[x]": "1", "b[x]": "1"}, "code": {}, "files": {}, "versions": {}, "machine": {}, "run": {}}
    then = {**now, "kernels": {"a[x]": "2", "c[x]": "1"}}
    assert provenance.compare(then, now, "why") == (["why", "kernel 'a[x]' is not what it was"], [])


def test_files_of_kernels_of_one_name_are_all_seen():
    for folder, text in (("a", "x"), ("b", "y")):
        Path(folder).mkdir()
        Path(folder, "k.py").write_text(text)
    engine = prepare().engine
    both = ("a/k.py", "b/k.py")
    before = provenance.made_by(engine, both)["files"]
    for folder in "ab":
        text = Path(folder, "k.py").read_text()
        Path(folder, "k.py").write_text("other")
        assert provenance.made_by(engine, both)["files"].keys() == before.keys() == {"k.py"}
        assert provenance.made_by(engine, both)["files"] != before
        Path(folder, "k.py").write_text(text)
    assert provenance.made_by(engine, both)["files"] == before
    Path("a/k.py").unlink()
    assert provenance.made_by(engine, both)["files"] != before


def test_a_change_in_the_middle_of_a_large_text_is_refused():
    text = bytearray(b"abcdefgh" * (6 << 17))
    Path("large.txt").write_bytes(text)
    run(steps=1, save_every=1, data="large.txt")
    found = altered(lambda state: None)
    text[3 << 20 : 4 << 20] = b"z" * (1 << 20)
    Path("large.txt").write_bytes(text)
    with pytest.raises(UserError, match="holds other text"):
        job.prepare(job.resumed(found, {"steps": 2}), resume=found)
    corpus = load_corpus("large.txt", vocab_size=256, T=8, B=2)
    found.state["corpus"] = corpus.ends  # as an older checkpoint has it
    assert "ends of its text only" in job.prepare(job.resumed(found, {"steps": 2}), resume=found).notes[0]


def test_a_run_of_many_rows_goes_on_as_if_it_had_not_been_cut(monkeypatch):
    """Over more than one epoch, shuffled row by row."""
    monkeypatch.setattr(batches, "SORTED", 10)
    _, whole, _ = run(steps=30)
    run(steps=17, save_every=17, run="cut")
    path = next(p for p in Path("runs").iterdir() if p.name.endswith("cut"))
    found = checkpoint.newest(path)
    ready = job.prepare(job.resumed(found, {"steps": 30}), resume=found)
    train(ready, Path("runs"), Listener(), resume=found)
    want = whole.engine.parameters()
    assert all(np.array_equal(p, want[n]) for n, p in ready.engine.parameters().items())


def test_an_older_checkpoint_of_many_rows_had_another_order(monkeypatch):
    run(steps=1, save_every=1)
    found = altered(lambda state: None)
    corpus = load_corpus("text.txt", vocab_size=256, T=8, B=2)
    found.state["corpus"] = corpus.ends
    monkeypatch.setattr(job, "SORTED", 10)
    settings = job.resumed(found, {"steps": 2})
    with pytest.raises(UserError, match="the order of the text, for 44 rows"):
        job.prepare(settings, resume=found)
    assert "order of the text" in job.prepare(settings, resume=found, accept_changes=True).changes[0]


def test_a_table_that_nobody_reads_ends_the_command_without_a_word():
    found = unread("kernels")
    assert (found.returncode, found.stderr) == (1, "")


def test_an_output_that_no_disk_takes_costs_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "cpuopt", "kernels"]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (1, "cpuopt: cannot write the output: No space left on device\n")


def test_signals_that_follow_the_first_find_no_gap_until_the_summary_is_there(monkeypatch):
    """Of a run that is the last work of its process: at each file that is written, and after the end."""
    right, written = record.write_json, []

    def write(path, content, indent):
        if path.name in ("profile.json", "summary.json"):
            raising(signal.SIGTERM, signal.SIGHUP)()
        right(path, content, indent)
        written.append(path.name)

    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    ready = prepare(steps=9)
    monkeypatch.setattr(record, "write_json", write)
    try:
        result = train(ready, Path("runs"), Listener(2, raising(*[signal.SIGTERM] * 6)), last=True)
        raising(signal.SIGTERM, signal.SIGHUP)()
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    assert written[-2:] == ["profile.json", "summary.json"]
    assert (result.status, result.summary["steps"]) == (128 + signal.SIGTERM, 2)
    result, _, _ = run(Listener(1, raising(signal.SIGTERM)))
    assert {s: signal.getsignal(s) for s in before} == before


def test_a_run_whose_last_checkpoint_is_missing_fails(monkeypatch):
    right = checkpoint.save

    def refuse(path, engine, state, keep):
        if state["step"] in bad:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(path, engine, state, keep)

    monkeypatch.setattr(checkpoint, "save", refuse)
    for bad, status in (({1, 2, 3, 4}, 1), ({4}, 1), ({1, 3}, 0)):
        result, _, _ = run(steps=4, save_every=1, save=f"out{len(bad)}{status}")
        assert result.status == status, bad
        assert weights.open_weights(Path(f"out{len(bad)}{status}")).config.n_embd == 16
        newest = "the newest is that of step 3" if len(bad) == 1 else "there is none"
        want = f"no checkpoint after step 4: No space left on device; {newest}"
        assert result.diagnosis == (want if status else "")
    bad = {2}
    result, _, _ = run(Listener(2, raising(signal.SIGTERM)), steps=4)
    assert (result.status, result.stopped_by) == (1, signal.SIGTERM)
