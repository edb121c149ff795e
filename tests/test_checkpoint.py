"""Checkpoints: a resumed run is the run, bit for bit, and nothing that breaks one is lost or taken for whole."""

import errno
import importlib
import itertools
import json
import linecache
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from listening import KilledError, Listener, die, raising
from small_runs import FLAGS, command, only, prepare, run, sealed, steps_of, wait_for_steps
from verbs import fails, process, ran, refused, spy

from cpuopt import cli, files
from cpuopt.data import batches
from cpuopt.data.corpus import load_corpus
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.models.gpt2 import PRESETS
from cpuopt.train import checkpoint, job, provenance
from cpuopt.train.record import Run
from cpuopt.train.resume import resumed
from cpuopt.weights import open_weights

FAULTS = Path(__file__).parent / "faults"
TENSORS = checkpoint.TENSORS["adamw"]
ALL_FILES = (*TENSORS, checkpoint.STATE, checkpoint.MANIFEST)
LONG = {"steps": 20, "val_every": 4, "lr": 1e-2, "save_every": 5}
"""Settings of a run of several epochs."""


pytestmark = pytest.mark.usefixtures("small_text")


def small(root="runs", die_after=None, resume=None, change=lambda ready: None, **more):
    """Run twenty steps, or go on with them; a run that died has no result."""
    given = more if resume else {**LONG, **more}
    listener, kept = Listener(die_after, die), []
    try:
        return run(listener, lambda ready: (kept.append(ready), change(ready)), root, resume, **given)
    except KilledError:
        return None, kept[0], listener


def content(run, step=20):
    """What a run leaves that must be the same byte for byte."""
    path = run / "checkpoints" / f"step-{step:08d}"
    parts = {name: (path / name).read_bytes() for name in TENSORS}
    return parts | {name: (run / name).read_bytes() for name in ("metrics.jsonl", "main.log")}


# Exact resume


@pytest.mark.parametrize("more", [
    {}, {"total_batch": 32, "clip": 0.5, "weight_decay": 0.1, "decay": "matrices"},
    {"schedule": "cosine", "warmup_steps": 3, "guard_z": 3.0, "seed": 5}, {"variant": "optimized"},
    {"variant": "optimized", "dtype": "bf16"},
])  # fmt: skip
def test_ten_steps_and_ten_more_are_twenty(more):
    small("whole", **more)
    small("cut", die_after=13, **more)
    assert steps_of("cut") == 13
    found = checkpoint.newest(only("cut"))
    assert (found.state["step"], found.passed_over) == (10, ())
    result, _, _ = small(resume=found)
    assert content(only("cut")) == content(only("whole"))
    whole, cut = (checkpoint.newest(only(name)).state["guard"] for name in ("whole", "cut"))
    assert whole == cut  # what a step is held against
    assert (result.summary["steps"], len(whole["windows"]["loss"])) == (20, 20)
    assert result.summary["loss_first"] > result.summary["loss_last"]
    assert list(result.summary["val_loss"]) == ["0", "4", "8", "12", "16", "20"]


def test_resumed_twice_on_other_numbers_of_threads():
    small("whole", threads=2, variant="optimized")
    small("cut", threads=1, die_after=7, variant="optimized")
    small(resume=checkpoint.newest(only("cut")), threads=4, die_after=18)
    assert checkpoint.newest(only("cut")).state["step"] == 15
    small(resume=checkpoint.newest(only("cut")), threads=2)
    assert content(only("cut")) == content(only("whole"))


def test_other_settings_or_text_are_refused_with_what_differs():
    small(die_after=7)
    found = checkpoint.newest(only())
    with pytest.raises(UserError, match=r"the run has B 2, not 4, lr 0.01, not 0.5; leave that out"):
        resumed(found, {"B": 4, "lr": 0.5, "steps": 50, "T": 8})
    Path("text.txt").write_text(Path("text.txt").read_text().replace("a", "b"))
    fails("holds other text", small, resume=found)


# Damage


@pytest.fixture(scope="module")
def _twelve(tmp_path_factory):
    """The folder of a run that ended after twelve steps, and its text."""
    home = tmp_path_factory.mktemp("twelve")
    (home / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(400)))
    small(home / "runs", die_after=12, data=str(home / "text.txt"))
    return only(home / "runs")


@pytest.fixture
def two(_twelve):
    """A run with checkpoints of steps 5 and 10."""
    shutil.copytree(_twelve, f"runs/{_twelve.name}")
    return only()


@pytest.mark.parametrize("how", ["first bit", "middle bit", "last bit", 0, 1, "half", "one less", "gone"])
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_damaged_file_is_found_and_the_checkpoint_before_it_taken(two, name, how):
    path = two / "checkpoints" / "step-00000010" / name
    damaged = bytearray(path.read_bytes())
    n, bit = len(damaged), ["first bit", "middle bit", "last bit"]
    if how == "gone":
        path.unlink()
    elif how in bit:
        damaged[[0, n // 2, -1][bit.index(how)]] ^= 1 << bit.index(how)
        path.write_bytes(damaged)
    else:
        os.truncate(path, {"half": n // 2, "one less": n - 1}.get(how, how))
    found = checkpoint.newest(two)
    assert (found.state["step"], len(found.passed_over)) == (5, 1)
    (passed_over,) = found.passed_over
    assert "step-00000010" in passed_over
    assert name in passed_over or (how in bit and "manifest" in passed_over)


def test_files_of_two_steps_are_no_checkpoint(two):
    one, other = (two / "checkpoints" / f"step-000000{n}" for n in ("05", "10"))
    shutil.copy(one / "adam_m.safetensors", other / "adam_m.safetensors")
    assert checkpoint.newest(two).state["step"] == 5
    other.rename(two / "checkpoints" / "step-00000011")
    assert "expected" not in checkpoint.newest(two).passed_over[0]
    shutil.rmtree(two / "checkpoints" / "step-00000011")
    shutil.copytree(one, other)
    fails("has the state of step 5", checkpoint.verify, other)


def test_what_is_no_checkpoint_is_ignored_and_leftovers_are_removed(two):
    for name in ("step-abc", "step-99999999999", "notes", ".tmp-step-00000015-1"):
        (two / "checkpoints" / name).mkdir()
    (two / "checkpoints" / "step-00000099").write_text("a file")
    assert checkpoint.newest(two).state["step"] == 10
    _, _, listener = small(resume=checkpoint.newest(two))
    assert listener.notes == ["removed .tmp-step-00000015-1, left by an interrupted save"]
    assert not list((two / "checkpoints").glob(".tmp-*"))
    (two / "checkpoints" / "step-00000050").mkdir()
    assert checkpoint.newest(two).state["step"] == 20


def test_a_run_of_an_earlier_version_goes_on_unless_it_has_local_steps(two):
    path = two / "checkpoints" / "step-00000010"
    state = json.loads((path / checkpoint.STATE).read_text())
    state["settings"] |= {"local_steps": 0, "outer_lr": 0.7, "outer_momentum": 0.9}
    sealed(path, state)
    assert resumed(checkpoint.newest(two), {"steps": 12}).steps == 12
    for file in (f"{name}-{n}-of-2.safetensors" for name in ("adam_m", "adam_v", "outer_velocity") for n in (1, 2)):
        shutil.copy(path / "params.safetensors", path / file)  # as two ranks wrote them
    for name in ("adam_m", "adam_v"):
        (path / f"{name}.safetensors").unlink()
    state["settings"]["local_steps"] = 2
    sealed(path, state)
    found = checkpoint.newest(two)
    assert found.path == path
    fails(r"the run has local steps, with which this version cannot go on; .*--init '", resumed, found, {})
    assert checkpoint.open_weights(two).config == found.config


def test_where_none_is_whole_each_fault_is_named(two):
    for path in (two / "checkpoints").iterdir():
        (path / "params.safetensors").write_bytes(b"")
    fails(r"no checkpoint to go on from: .*step-00000010.*step-00000005", checkpoint.newest, two)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_filled(two):
    engine = prepare(model="gpt2-tiny").engine
    before = {n: p.copy() for n, p in engine.parameters().items()}
    fails("tensors of this model", checkpoint.load, checkpoint.newest(two), engine)
    assert all(np.array_equal(p, before[n]) for n, p in engine.parameters().items())


def test_every_file_is_on_the_disk_before_it_has_its_name_and_the_old_go_last(two, monkeypatch):
    engine, calls = prepare(**LONG).engine, []
    name_of = lambda fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: E731
    spy(monkeypatch, os, "fsync", lambda fd: calls.append(("fsync", name_of(fd))))
    spy(monkeypatch, os, "rename", lambda a, b: calls.append(("rename", Path(b).name)))
    spy(monkeypatch, shutil, "rmtree", lambda p, **kw: calls.append(("rmtree", Path(p).name)))
    checkpoint.save(two, engine, {"step": 15}, keep=1)
    part = calls[5][1]
    assert part.startswith(".tmp-step-00000015-")
    there = [("fsync", part), ("rename", "step-00000015"), ("fsync", "checkpoints")]
    assert calls[:8] == [*[("fsync", name) for name in ALL_FILES], *there]
    removed = [name for what, name in calls[8:] if what == "rename"]
    assert [name.split("-")[2] for name in removed] == ["00000010", "00000005"]
    assert os.listdir(two / "checkpoints") == ["step-00000015"]


def test_saving_the_same_step_again_replaces_it(two):
    (two / "checkpoints" / "step-00000010" / "state.json").write_text("damaged")
    state = {**checkpoint.newest(two).state, "step": 10}  # of step 5
    checkpoint.save(two, prepare(seed=3, **LONG).engine, state, keep=2)
    found = checkpoint.newest(two)
    assert (found.state, found.passed_over) == (state, ())


def test_a_torn_last_line_is_dropped(two):
    log, metrics = (two / "main.log").read_text(), (two / "metrics.jsonl").read_text()
    (two / "metrics.jsonl").write_text(f'{metrics}not json\n{{"step": 13, "lo')
    (two / "main.log").write_text(f"{log}s:1")
    with Run.reopen(two, 12)[0]:
        pass
    assert ((two / "metrics.jsonl").read_text(), (two / "main.log").read_text()) == (metrics, log)


# A state of other types


STATE = {
    "step": 3, "updates": 3, "model": "gpt2-tiny", "sizes": vars(PRESETS["gpt2-tiny"]), "corpus": "0" * 8,
    "settings": vars(job.Settings()), "val": {"0": 5.0, "3": None}, "tokenizer": "bytes",
    "guard": {"skipped": 0, "recent": [False], "windows": {"loss": [5.0], "grad_norm": [1.0]}},
}  # fmt: skip
OTHER = [None, 0, -1, "x", [], {}, True, 1e308, [[]], {"x": 1}]


def saved(state):
    """A checkpoint whose checksums are right, whatever its state."""
    path = Path("run", checkpoint.FOLDER, "step-00000003")
    path.mkdir(parents=True, exist_ok=True)
    for name in TENSORS:
        (path / name).write_bytes(b"x")
    return sealed(path, state)


@pytest.mark.parametrize("name", STATE)
def test_a_state_with_other_types_is_taken_or_refused(name):
    assert checkpoint.verify(saved(STATE)).state == json.loads(json.dumps(STATE))
    inner = STATE[name] if isinstance(STATE[name], dict) else {}
    changed = [{**STATE, name: x} for x in OTHER]
    changed += [{**STATE, name: {**inner, k: OTHER[i % len(OTHER)]}} for i, k in enumerate(inner)]
    refused = 0
    for state in [*changed, {k: v for k, v in STATE.items() if k != name}]:
        try:
            assert np.isfinite(resumed(checkpoint.verify(saved(state)), {}).lr)
        except UserError:
            refused += 1
    assert refused > len(changed) * 0.4 or name in ("tokenizer", "settings", "model", "corpus", "updates")


# Disks that fail


def failing(monkeypatch, number, times):
    """Let fsync fail some times, but not that of the record."""
    left = itertools.count(1)

    def fsync(fd):
        if next(left) <= times:
            raise OSError(number, os.strerror(number))

    spy(monkeypatch, files.os, "fsync", fsync)
    monkeypatch.setattr("cpuopt.train.record.write_whole", lambda path, parts: path.write_bytes(b"".join(parts)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_save_that_fails_costs_one_line_and_is_tried_again(monkeypatch, number):
    small("whole")
    failing(monkeypatch, number, 1)
    result, _, listener = small()
    (note,) = listener.notes
    assert note.startswith(f"no checkpoint after step 5: {os.strerror(number)}; there is none before it")
    assert content(only()) == content(only("whole"))
    assert sorted(os.listdir(only() / "checkpoints")) == ["step-00000015", "step-00000020"]
    assert result.checkpoint.name == "step-00000020"


def test_the_old_checkpoint_stays_while_none_can_be_written(monkeypatch):
    def kept():
        return {p: p.read_bytes() for p in (only() / "checkpoints").rglob("*") if p.is_file()}

    small(die_after=7)
    before = kept()
    failing(monkeypatch, errno.ENOSPC, 10**6)
    result, _, listener = small(resume=checkpoint.newest(only()))
    assert [n[:28] for n in listener.notes] == [f"no checkpoint after step {n}: "[:28] for n in (10, 15, 20)]
    assert all("step-00000005 stays" in n for n in listener.notes)
    assert (kept(), result.checkpoint.name) == (before, "step-00000005")


def at_step(number, act):
    """A change of a job: do something before a step."""

    def change(ready):
        right, calls = ready.engine.step, itertools.count(1)

        def step(**more):
            if next(calls) == number:
                act()
            return right(**more)

        ready.engine.step = step

    return change


def test_a_folder_that_vanishes_does_not_end_the_training():
    result, ready, listener = small(change=at_step(8, lambda: shutil.rmtree(only())))
    assert result.summary["steps"] == ready.engine.step_number == 20
    assert "cannot write" in listener.notes[0]
    assert (result.checkpoint.name, checkpoint.newest(result.path).state["step"]) == ("step-00000020", 20)
    log = (result.path / "main.log").read_text()
    assert [int(x.split()[0][2:]) for x in log.splitlines() if "trl" in x] == [*range(8, 21)]


def test_a_parameter_that_is_no_number_is_not_saved_over_good_ones(two):
    engine = prepare(**LONG).engine
    engine.parameters()["ln_f.bias"][2] = np.inf
    fails(r"ln_f\.bias is not finite", checkpoint.save, two, engine, {"step": 15}, keep=1)
    assert checkpoint.newest(two).state["step"] == 10


def test_a_run_whose_last_checkpoint_is_missing_fails(monkeypatch):
    def refuse(path, engine, state, keep):
        if state["step"] in bad:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spy(monkeypatch, checkpoint, "save", refuse)
    for bad, newest in (({1, 2, 3, 4}, "there is none"), ({4}, "the newest is that of step 3"), ({1, 3}, "")):
        result, _, _ = run(steps=4, save_every=1, save=f"out{len(bad)}")
        assert result.status == bool(newest), bad
        assert open_weights(Path(f"out{len(bad)}")).config.n_embd == 16
        assert result.diagnosis == (f"no checkpoint after step 4: No space left on device; {newest}" if newest else "")
    bad = {2}
    result, _, _ = run(Listener(2, raising(signal.SIGTERM)), steps=4)
    assert (result.status, result.stopped_by) == (1, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "last", "said"), [
    (["-o", "size=220k"], 5, "No space left"),  # for one checkpoint
    (["-o", "size=1m"], 5, "no checkpoint after step 10: Read-only file system"),  # in the middle of the run
])  # fmt: skip
def test_a_real_disk_that_is_full_or_becomes_read_only(options, last, said):
    Path("disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", *options, "none", "disk"]).returncode:
        pytest.skip("needs the right to mount")
    remount = partial(subprocess.run, ["mount", "-o", "remount,ro", "disk"], check=True)
    change = at_step(8, remount) if "Read-only" in said else lambda ready: None
    try:
        result, ready, listener = small("disk/runs", change=change)
        assert result.summary["steps"] == ready.engine.step_number == 20
        assert any(said in note for note in listener.notes)
        assert checkpoint.newest(only("disk/runs")).state["step"] == last
    finally:
        subprocess.run(["umount", "disk"], check=True)


# Two processes, signals, the command line


def test_a_second_process_is_refused(two):
    code = f"from cpuopt.train.record import Run; from pathlib import Path; Run.reopen(Path({str(two)!r}), 10)"
    second = partial(process, code=code)
    open_run, _ = Run.reopen(two, 5)
    before = (two / "main.log").read_bytes()
    with open_run:
        assert "another process is writing to the run" in second().stderr
        assert (two / "main.log").read_bytes() == before
    assert second().returncode == 0


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(name, capsys):
    number, first = getattr(signal, name), ["train", *FLAGS, "--save-every", "5"]
    running = command(*first, "--steps", "1000000", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for_steps(7, running)
        twice = number != signal.SIGINT  # what ends a machine sends it to the group, and once more to each
        for each in (signal.SIGSTOP, signal.SIGCONT, *[number] * (1 + twice)):
            running.send_signal(each)
        out, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    done, saved = steps_of(), checkpoint.newest(only()).state["step"]
    if number == signal.SIGKILL:
        assert saved in (done // 5 * 5, done // 5 * 5 - 5)
    else:
        assert (running.returncode, saved) == (128 + number, done)
        summary = json.loads((only() / "summary.json").read_text())
        assert (summary["interrupted"], summary["steps"]) == (True, done)
        assert json.loads(out) == {**summary, "path": str(only())}
    steps = str(done + 8)
    assert ran(capsys, "train", "--resume", "--steps", steps)["steps"] == done + 8
    assert cli.main([*first, "--steps", steps, "--runs", "whole"]) == 0
    one, two = content(only(), done + 8), content(only("whole"), done + 8)
    assert {n: one[n] for n in (*TENSORS, "main.log")} == {n: two[n] for n in (*TENSORS, "main.log")}


def test_the_command_line_passes_over_a_bad_checkpoint_and_says_so(two, capsys):
    os.truncate(two / "checkpoints" / "step-00000010" / "adam_v.safetensors", 100)
    assert cli.main(["train", "--resume"]) == 0
    out, err = capsys.readouterr()
    assert "passed over a checkpoint" in err
    assert "adam_v.safetensors" in err
    assert "goes on after step 5" in out
    assert "the run has lr 0.01, not 3.0" in refused(capsys, "train", "--resume", two.name, "--lr", "3")
    assert (cli.main(["train", "--resume", "nowhere"]), cli.main(["train", "--resume", "--runs", "nowhere"])) == (2, 2)


def counted(script, *words):
    """Run a script that kills a process many times; return what it counts."""
    done = subprocess.run([sys.executable, FAULTS / script, *words], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("runs", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_no_instant_of_a_save_is_a_bad_one_to_be_killed_in(runs):
    seen = counted("kill_saves.py", str(runs))
    assert (seen["runs"], seen["lost"], seen["mixed"]) == (runs, 0, 0)
    assert seen["killed_in_a_save"] > runs // 4


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--lora", "r=2"]])
def test_kills_in_epochs_of_chats_change_no_byte_of_the_end(flags):
    seen = counted("kill_runs.py", "6", *flags)
    assert (seen["kills"], seen["lost"], seen["differ"]) == (6, 0, 0)
    assert seen["in_an_epoch"] > 2


def test_a_run_that_cannot_be_resumed_says_why():
    Path("short").mkdir()
    fails("short' has kept no checkpoint; train with --save-every N", checkpoint.find_run, Path.cwd(), "short")
    fails(r"there is no run .*other'; list the runs with cpuopt runs list", checkpoint.find_run, Path.cwd(), "other")
    fails("cannot read the run 'nowhere'", Run.reopen, Path("nowhere"), 1)


# What a resumed run may differ in

KERNELS = """
import numpy as np
from cpuopt import kernel, ops
{more}
@kernel(ops.gelu_forward, "mine", jit=False)
def gelu_forward(out, inp):
    out[:] = {half} * inp * (1 + np.tanh(np.sqrt(2 / np.pi) * (inp + 0.044715 * inp**3)))
"""


@pytest.fixture
def own():
    """A run whose kernel file can change, as if each command were a process of its own."""
    before = registry.KERNELS.copy()

    def own(*flags, half=0.5, more=""):
        registry.KERNELS.clear()
        registry.KERNELS.update(before)
        mine = str(Path("mine.py").resolve())
        for name in [n for n, m in sys.modules.items() if getattr(m, "__file__", None) == mine]:
            del sys.modules[name]
        Path("mine.py").write_text(KERNELS.format(half=half, more=more))
        linecache.checkcache()
        importlib.invalidate_caches()
        return cli.main(["train", *flags])

    first = ["--swap", "gelu_forward=mine", "--steps", "2", "--save-every", "1", "--kernels", "mine.py"]
    assert own(*FLAGS, *first) == 0
    return partial(own, "--resume", "--steps")


def test_an_edited_kernel_is_refused_and_accepted_on_demand(own, capsys):
    edited = partial(own, half=0.5000001)
    assert edited("3", "--kernels", "mine.py") == 2
    err = capsys.readouterr().err
    assert "kernel 'gelu_forward[mine]' is not what it was" in err
    assert "--accept-changes" in err
    assert checkpoint.newest(only()).state["step"] == 2
    assert own("3", "--kernels", "mine.py") == 0
    assert checkpoint.newest(only()).state["changes"] == []
    assert edited("4", "--kernels", "./mine.py", "--accept-changes") == 0
    state = checkpoint.newest(only()).state
    assert (state["step"], len(state["changes"])) == (4, 1)
    assert state["changes"][0].startswith("after step 3: kernel 'gelu_forward[mine]")
    assert edited("5", "--kernels", "mine.py") == 0  # what was accepted is the kernel now
    assert len(json.loads((only() / "summary.json").read_text())["changes"]) == 1


def test_no_file_runs_that_a_checkpoint_alone_names_and_another_line_of_it_is_said(own, capsys):
    trapped = partial(own, "3", more="open('trap', 'w').close()")
    assert trapped() == 2
    assert "if you trust these files, name them: --kernels 'mine.py'" in capsys.readouterr().err
    assert not Path("trap").exists()
    assert trapped("--kernels", "mine.py") == 0
    assert Path("trap").exists()
    assert "'mine.py' has changed, but none of its kernels that run" in capsys.readouterr().err


def found(**state):
    """The newest checkpoint of the one run, as if its state said something else."""
    newest = checkpoint.newest(only())
    newest.state.update(state)
    return newest


def test_versions_processor_and_threads_are_notes():
    run(steps=2, save_every=1)
    assert prepare(found(), steps=3).notes == ()
    made_by = found().state["made_by"]
    made_by["versions"] |= {"numba": "0.1", "gone": "1"}
    made_by["machine"]["target"] = "generic"
    made_by["run"]["threads"] = "64"
    made_by["code"]["gelu_forward[vanilla]"] = "x"
    ready = prepare(found(made_by=made_by), steps=3)
    told = "; ".join(ready.notes)
    was = ("'numba' is '", ", and was '0.1'", "'gone' is None", "and was 'generic'", "'threads' is '", "of 1 kernel ")
    assert ([part for part in was if part not in told], ready.changes) == ([], ())


def test_a_checkpoint_that_says_little_of_its_kernels():
    run(steps=2, save_every=1)
    for nonsense in ({"kernels": 3}, {"kernels": {"gelu_forward[vanilla]": None}}):
        fails("is not what it was", prepare, found(made_by=nonsense), steps=3)
    without = found()
    del without.state["made_by"]
    for little in (without, found(made_by=7), found(made_by=[])):
        assert "does not say which kernels made it" in prepare(little, steps=3).notes[0]


NOW = {"kernels": {"a[x]": "1"}, "code": {}, "files": {"a.py": "1"}, "versions": {}, "machine": {}, "run": {}}
WAS = "kernel 'a[x]' is not what it was"


@pytest.mark.parametrize(("then", "now", "why", "said"), [
    ({}, {"kernels": {"a[x]": "unknown"}}, "", []),
    ({"files": {"a.py": "2"}}, {"kernels": {"a[x]": "unknown"}}, "", [WAS]),  # it cannot be looked through
    ({"kernels": {"a[x]": "2", "c[x]": "1"}}, {"kernels": {"a[x]": "1", "b[x]": "1"}}, "why", ["why", WAS]),
])  # fmt: skip
def test_a_kernel_is_judged_by_its_text_or_its_file(then, now, why, said):
    assert provenance.compare({**NOW, **now, **then}, {**NOW, **now}, why) == (said, [])


@pytest.mark.parametrize(("then", "now", "said"), [
    ({}, {"guard": "skip"}, "--guard skip leaves out the rewrite 'update'"),
    ({"guard": "skip"}, {"guard": "stop"}, "without --guard skip the rewrite 'update' comes in"),
])  # fmt: skip
def test_a_guard_that_changes_the_rewrites_is_said_in_place_of_the_kernels(then, now, said):
    run(steps=1, save_every=1, variant="optimized", **then)
    settings = resumed(found(), {"steps": 2, **now})
    said += f", which the run {'did not have' if then else 'had'}"
    fails(rf": {said}: resuming would change the run; .*--accept-changes", job.prepare, settings, resume=found())
    assert job.prepare(settings, resume=found(), accept_changes=True).changes == (f"after step 1: {said}",)


def test_files_of_kernels_of_one_name_are_all_seen():
    engine, seen = prepare().engine, []
    for texts in (("x", "y"), ("other", "y"), ("x", "other"), (None, "y"), ("x", "y")):
        for folder, text in zip("ab", texts, strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
            if text:
                Path(folder, "k.py").write_text(text)
        seen.append(provenance.made_by(engine, ("a/k.py", "b/k.py"))["files"])
    assert all(files.keys() == {"k.py"} for files in seen[:3])
    assert seen[0] == seen[4]
    assert all(files != seen[0] for files in seen[1:4])


def test_a_change_in_the_middle_of_a_large_text_is_refused():
    text = bytearray(b"abcdefgh" * (6 << 17))
    Path("large.txt").write_bytes(text)
    run(steps=1, save_every=1, data="large.txt")
    text[3 << 20 : 4 << 20] = b"z" * (1 << 20)
    Path("large.txt").write_bytes(text)
    fails("holds other text", prepare, found(), steps=2)
    older = found(corpus=load_corpus("large.txt", vocab_size=256, T=8, B=2).ends)
    assert "ends of its text only" in prepare(older, steps=2).notes[0]


def test_a_run_of_many_rows_goes_on_and_an_older_checkpoint_had_another_order(monkeypatch):
    """Over more than one epoch, shuffled row by row."""
    monkeypatch.setattr(batches, "SORTED", 10)
    _, whole, _ = run(steps=30, root="whole")
    run(steps=17, save_every=17)
    _, ready, _ = run(resume=found(), steps=30)
    want = whole.engine.parameters()
    assert all(np.array_equal(p, want[n]) for n, p in ready.engine.parameters().items())
    older = found(corpus=load_corpus("text.txt", vocab_size=256, T=8, B=2).ends)
    monkeypatch.setattr("cpuopt.train.resume.SORTED", 10)
    fails("the order of the text, for 44 rows", prepare, older, steps=31)
    settings = resumed(older, {"steps": 31})
    assert "order of the text" in job.prepare(settings, resume=older, accept_changes=True).changes[0]
