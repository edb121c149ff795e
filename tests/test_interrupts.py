"""Ctrl-C and other signals, and several threads: weights are always those after whole steps, and nothing is lost."""

import itertools
import json
import os
import pty
import secrets
import signal
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from listening import Listener, raising
from numba import types
from small_models import batch
from small_runs import FLAGS, command, only, prepare, run, steps_of, wait_for_steps
from verbs import SQUARES, fails, process, spy

import cpuopt
from cpuopt import Choice, cli, files
from cpuopt.building import run_calls
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.kernels.compile import jit, libraries
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.program.fuse import FUSIONS
from cpuopt.signals import deferred, never_lost
from cpuopt.train import checkpoint, record, samples, trainer
from cpuopt.weights import open_weights

pytestmark = pytest.mark.usefixtures("small_text")

ROOT = Path(cpuopt.__file__).parents[1]
TINY, B, T = PRESETS["gpt2-tiny"], 2, 16
TWO_PASS, STEPS = tuple(n for n in FUSIONS if n != "update"), 3


def engine_of(fuse, make=Engine.from_options, **how):
    given = how if make is Engine else {"choice": Choice("optimized"), **how}
    return make(GPT2(TINY), specs(B, T), fuse=fuse, threads=1, **given)


def take(engine, number):
    engine.step(**batch(number), lr=1e-2)


def bits(engine):
    arrays = [*engine.parameters().values(), *(x for s in engine.states().values() for x in s.values())]
    return engine.step_number, *(x.tobytes() for x in arrays)


MODES = {"two passes": TWO_PASS, "fused": tuple(FUSIONS)}


@cache
def undisturbed(mode):
    """Return the states of an engine after 0, 1, ... steps."""
    engine = engine_of(MODES[mode])
    states = [bits(engine)]
    for number in range(STEPS):
        take(engine, number)
        states.append(bits(engine))
    return states


@pytest.fixture(params=MODES)
def made(request):
    """A function that builds an engine, and the states of an undisturbed one."""
    return lambda: engine_of(MODES[request.param]), undisturbed(request.param)


def interrupting(engine, after, times=1):
    """Send Ctrl-C after the call of that number, and after each of the next ones; return the count of calls."""
    count = [0]

    def run(calls):
        for bound in calls:
            run_calls([bound])
            count[0] += 1
            if after <= count[0] < after + times:
                signal.raise_signal(signal.SIGINT)

    engine.runner = run
    return count


def test_a_batch_that_is_refused_leaves_the_engine_usable(made):
    build, states = made
    engine = build()
    fails("holds 999", engine.step, **{**batch(0), "tokens": np.full((B, T), 999)}, lr=1e-2)
    take(engine, 0)
    assert bits(engine) == states[1]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("times", [1, 1000])
def test_a_ctrl_c_at_any_call_leaves_the_weights_of_a_whole_step(made, times):
    build, states = made
    engine = build()
    count, cuts = interrupting(engine, 10**9), 0
    take(engine, 0)
    for after in range(1, count[0] + 1, 3):
        engine = build()
        interrupting(engine, after, times)
        with pytest.raises(KeyboardInterrupt):
            take(engine, 0)
        engine.runner = run_calls
        cuts += 1
        found = bits(engine)
        assert found in states[:2], after
        for number in range(found[0], STEPS):
            take(engine, number)
        assert bits(engine) == states[-1], after
    assert cuts > 10


def test_signals_wait_for_the_end_of_a_block_and_none_is_lost():
    seen = []

    def leave(number, frame):
        seen.append(number)
        raise SystemExit(number)

    handlers = {signal.SIGTERM: leave, signal.SIGUSR1: lambda number, frame: seen.append(number)}
    before, done = {s: signal.signal(s, handler) for s, handler in handlers.items()}, False
    try:
        try:
            with deferred():
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                    signal.raise_signal(number)
                assert seen == []
                done = True
        except KeyboardInterrupt:
            seen.append(signal.SIGINT)
        time.sleep(0)
    except SystemExit:
        pass
    finally:
        found = {s: signal.signal(s, handler) for s, handler in before.items()}
    assert done
    assert (sorted(seen), found) == (sorted([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]), handlers)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_an_error_within_an_update_is_the_last_call_of_the_engine(made):
    engine = made[0]()

    def run(calls):
        for bound in calls:
            run_calls([bound])
            if any(a.kind == "state" for a in bound.call.op.args):
                raise MemoryError

    engine.runner = run
    with pytest.raises(MemoryError):
        take(engine, 0)
    engine.runner = run_calls
    for call in (lambda: take(engine, 0), lambda: engine.forward(**batch(0)), lambda: engine.run("forward")):
        fails(r"step\(\) ended within its update, .* build a new engine", call)


@pytest.mark.parametrize("call", ["step", "forward", "load", "run"])
def test_a_second_thread_is_refused(made, call):
    build, states = made
    engine, inside, go = build(), threading.Event(), threading.Event()

    def run(calls):
        inside.set()
        go.wait(60)
        run_calls(calls)

    engine.runner = run
    first = threading.Thread(target=take, args=(engine, 0))
    first.start()
    assert inside.wait(60)
    try:
        said = rf"^{call}: this engine is in a call already, .* serialize the calls$"
        fails(said, getattr(engine, call), *["forward"] * (call == "run"), **({} if call == "run" else batch(1)))
    finally:
        go.set()
        first.join()
    assert bits(engine) == states[1]


def test_a_call_from_within_a_step_is_refused():
    engine = engine_of(TWO_PASS)

    def accept(done):
        engine.forward(**batch(1))  # would overwrite the gradients
        return True

    before = bits(engine)
    fails(r"^forward: this engine is in a call already", engine.step, **batch(0), accept=accept)
    assert bits(engine) == before
    engine.step(**batch(0))


def test_a_profile_puts_back_all_that_its_steps_changed(monkeypatch):
    engine = engine_of("auto", Engine)
    engine.step(**batch(0), lr=1e-2)
    changed, right = bits(engine), np.copyto

    def copyto(to, what, **how):
        right(to, what, **how)
        if to.dtype == np.float32:  # a parameter or a state, which the end of a profile puts back
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(np, "copyto", copyto)
    with pytest.raises(KeyboardInterrupt):
        engine.profile(steps=1, roofs=False)
    assert bits(engine) == changed
    monkeypatch.setattr(np, "copyto", right)
    interrupting(engine, 1, 10**6)
    with pytest.raises(KeyboardInterrupt):
        engine.profile(steps=1, roofs=False)
    engine.runner = run_calls
    assert bits(engine) == changed


def test_a_ctrl_c_in_a_destructor_is_not_lost():
    class Closing:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    before = sys.unraisablehook

    def work():
        Closing()
        time.sleep(5)

    with never_lost(), pytest.raises(KeyboardInterrupt):
        work()
    assert sys.unraisablehook is before


def test_a_ctrl_c_while_llvm_calls_back_comes_after_it(monkeypatch):
    usual, seen = libraries.Library._object_compiled_hook, []

    def hook(module, content):
        signal.raise_signal(signal.SIGINT)
        usual(module, content)
        seen.append(module.name)

    monkeypatch.setattr(libraries.Library, "_object_compiled_hook", hook)
    new = secrets.randbits(30)  # so that the cache has no such function
    add = jit.helper()(lambda a: a + new)
    with pytest.raises(KeyboardInterrupt):
        add.compile((types.int64,))
    assert seen
    monkeypatch.undo()
    assert add(1) == 1 + new


AT_IMPORT = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored

class Finder:
    def find_spec(name, path, target=None):
        if name == "MODULE":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("module", ["cpuopt.signals", "cpuopt.cli.profile", "numba"])
def test_a_ctrl_c_while_the_command_is_imported(module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.replace("MODULE", module))
    done = process("profile", "--model", "gpt2-tiny", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cpuopt: interrupted\n")


def test_a_ctrl_c_before_the_first_step_says_what_is_not_written(monkeypatch, capsys):
    spy(monkeypatch, trainer, "opened", lambda *given: signal.raise_signal(signal.SIGINT))
    words = ["train", "--model", "gpt2-tiny", "--steps", "3", "--val-every", "0", "--threads", "1"]
    assert cli.main([*words, "--trace", "t.json"]) == 130
    assert "--trace t.json: not written, because no step was done" in capsys.readouterr().err


# Runs


def test_a_flood_of_signals_ends_the_run_after_its_step_with_a_checkpoint():
    """What ends a session sends several; only a second Ctrl-C is meant to interrupt."""
    flood = raising(signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)
    for after in (2, 0):  # at the validation before the first step
        result, _, listener = run(Listener(after, flood), root=f"runs-{after}", steps=9, save="out", val_every=2)
        assert (result.stopped_by, result.summary["interrupted"]) == (signal.SIGHUP, True)
        assert result.summary["steps"] == len(listener.steps) == steps_of(f"runs-{after}") == after
        assert not Path("out").exists()
    assert checkpoint.newest(only("runs-2")).state["step"] == 2


def test_what_was_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    result, _, _ = run(Listener(1, raising(signal.SIGHUP)))
    assert (result.stopped_by, result.summary["steps"], signal.getsignal(signal.SIGHUP)) == (0, 3, signal.SIG_IGN)


def at_sync(monkeypatch, name, *numbers):
    """Send signals when a folder with a name like this is first synced."""
    sent = []

    def sync(path):
        if not sent and name in str(path):
            sent.append(raising(*numbers)())

    spy(monkeypatch, files, "sync_directory", sync)


def test_ctrl_c_in_a_save_lets_it_finish(monkeypatch):
    at_sync(monkeypatch, ".tmp-", signal.SIGINT)
    result, _, _ = run(steps=5, save_every=2)
    assert (result.stopped_by, result.summary["steps"]) == (signal.SIGINT, 2)
    assert checkpoint.newest(result.path).state["step"] == 2
    at_sync(monkeypatch, ".tmp-", signal.SIGINT)
    result, ready, _ = run(save="out")  # all was done: there is nothing to go on with
    assert (result.stopped_by, result.diagnosis, result.summary["interrupted"]) == (0, "", False)
    read = open_weights(Path("out")).read
    assert all(np.array_equal(read(n), p) for n, p in ready.engine.parameters().items())


def test_a_second_ctrl_c_in_a_save_leaves_the_checkpoint_before_it(monkeypatch):
    at_sync(monkeypatch, "step-00000004", signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(steps=5, save_every=2)
    assert (checkpoint.newest(only()).state["step"], os.listdir(only() / "checkpoints")) == (2, ["step-00000002"])


@pytest.mark.parametrize("more", [{"val_every": 2}, {"sample_every": 2, "sample_tokens": 3}])
def test_ctrl_c_in_a_validation_or_a_sample_costs_no_step(monkeypatch, more):
    def interrupt(ready):
        where, name = (ready.engine, "forward") if "val_every" in more else (samples, "generate")
        calls = itertools.count(1)

        def act(*args, **named):
            if next(calls) == (5 if "val_every" in more else 1):  # three come before the first step
                signal.raise_signal(signal.SIGINT)

        spy(monkeypatch, where, name, act)

    Path("text.txt").write_text(SQUARES)
    result, _, _ = run(change=interrupt, steps=9, val_batches=3, **more)
    assert (result.stopped_by, result.summary["steps"]) == (signal.SIGINT, 2)
    assert steps_of() == checkpoint.newest(result.path).state["step"] == 2
    assert [*result.summary["val_loss"]] == ["0"] * ("val_every" in more)  # that of step 2 was cut short


def test_signals_that_follow_the_first_find_no_gap_until_the_summary_is_there(monkeypatch):
    """Of a run that is the last work of its process: at each file that is written, and after the end."""
    right, written = record.write_json, []

    def write(path, content, indent):
        if path.name in ("profile.json", "summary.json"):
            raising(signal.SIGTERM, signal.SIGHUP)()
        right(path, content, indent)
        written.append(path.name)

    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    run(Listener(1, raising(signal.SIGTERM)))
    assert {s: signal.getsignal(s) for s in before} == before
    ready = prepare(steps=9)
    monkeypatch.setattr(record, "write_json", write)
    result = trainer.train(ready, Path("last"), Listener(2, raising(*[signal.SIGTERM] * 6)), last=True)
    raising(signal.SIGTERM, signal.SIGHUP)()
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    assert written[-2:] == ["profile.json", "summary.json"]
    assert (result.status, result.summary["steps"]) == (128 + signal.SIGTERM, 2)


@pytest.mark.parametrize("e", [KeyboardInterrupt(), UserError("it does not compile")], ids=["interrupt", "error"])
def test_an_interrupt_or_a_compilers_error_does_not_wait_until_all_weights_are_drawn(monkeypatch, e):
    drawn, begun = [], threading.Event()
    model = GPT2(TINY)
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
        Engine.from_options(model, specs(1, 4), threads=1)
    assert 0 < len(drawn) < len(list(model.named_parameters()))


# What nobody reads


def test_a_closed_terminal_ends_the_run_with_a_checkpoint():
    """A session of its own, whose terminal goes away: SIGHUP comes, and nothing can be printed from then on."""
    ours, theirs = pty.openpty()

    def lead():
        os.setsid()
        ioctl(theirs, termios.TIOCSCTTY, 0)

    given = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": lead}
    running = command("train", *FLAGS, "--steps", "1000000", **given)
    try:
        os.close(theirs)
        wait_for_steps(5, running)
        os.kill(running.pid, signal.SIGSTOP)  # stopped and continued on the way
        time.sleep(0.1)
        os.kill(running.pid, signal.SIGCONT)
        os.close(ours)
        assert running.wait(60) == 128 + signal.SIGHUP
    finally:
        running.kill()
    done = json.loads((only() / "summary.json").read_text())["steps"]
    assert checkpoint.newest(only()).state["step"] == done == steps_of()


def unread(*words):
    """Run a command whose output goes to a pipe that is closed, as behind ``| head -1``; return status and errors."""
    ours, theirs = os.pipe()
    os.close(ours)
    with command(*words, stdout=theirs, stderr=subprocess.PIPE) as running:
        os.close(theirs)
        _, said = running.communicate(timeout=300)
    return running.returncode, said


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_run_whose_output_nobody_reads_goes_on(more):
    status, said = unread("train", *FLAGS, "--steps", "3", "--save", "out", *more)
    assert status == 0, said
    assert "Broken" not in said
    assert json.loads((only() / "summary.json").read_text())["steps"] == 3
    assert open_weights(Path("out")).config.n_embd == 16


def test_a_table_that_nobody_reads_ends_the_command_without_a_word():
    assert unread("kernels") == (1, "")


def test_an_output_that_no_disk_takes_costs_one_line():
    with open("/dev/full", "w") as full, command("kernels", stdout=full, stderr=subprocess.PIPE) as running:
        assert running.communicate()[1] == "cpuopt: cannot write the output: No space left on device\n"
    assert running.returncode == 1


def test_a_second_sigterm_ends_at_once():
    code = (
        "import time\nfrom cpuopt.isolate.process import ended_by_sigterm\n"
        "with ended_by_sigterm():\n    try:\n        print('up', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        print('cleaning', flush=True)\n        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for word in ("up", "cleaning"):
            assert process.stdout.readline().strip() == word
            process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - start < 20
