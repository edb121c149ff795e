"""One engine under Ctrl-C and under several threads: its weights are always those after whole steps."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numba import types

import cpuopt
from cpuopt import Choice, cli
from cpuopt import Engine as Library
from cpuopt.building import run_calls
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.files import private
from cpuopt.kernels.compile import jit, libraries
from cpuopt.models import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.program.fuse import FUSIONS
from cpuopt.signals import deferred, never_lost
from cpuopt.train import trainer

ROOT = Path(cpuopt.__file__).parents[1]
TINY, B, T = PRESETS["gpt2-tiny"], 2, 16
TWO_PASS = tuple(n for n in FUSIONS if n != "update")
STEPS = 3


def batch(seed):
    ids = np.random.default_rng(seed).integers(0, TINY.vocab_size, (B, T + 1))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def engine_of(fuse, kind=Engine, **how):
    given = {"choice": Choice("optimized"), **how} if kind is Engine else how
    return kind(GPT2(TINY), specs(B, T), fuse=fuse, threads=1, **given)


def take(engine, number):
    """One step, and for an engine that trains alone the meeting after it."""
    engine.step(**batch(number), lr=1e-2)
    if engine.alone:
        engine.outer_step()


def bits(engine):
    arrays = [*engine.parameters().values(), *(x for s in engine.states().values() for x in s.values())]
    return engine.step_number, *(x.tobytes() for x in arrays)


MODES = {"two passes": (TWO_PASS, {}), "fused": (tuple(FUSIONS), {}), "local": (TWO_PASS, {"alone": True})}


@pytest.fixture(params=MODES)
def made(request):
    """A function that builds an engine, and the states of an undisturbed one after 0, 1, ... steps."""
    fuse, how = MODES[request.param]
    undisturbed = engine_of(fuse, **how)
    states = [bits(undisturbed)]
    for number in range(STEPS):
        take(undisturbed, number)
        states.append(bits(undisturbed))
    return lambda: engine_of(fuse, **how), states


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
        if engine._left:  # between the step and the meeting
            engine.outer_step()
        found = bits(engine)
        assert found in states[:2], after
        for number in range(found[0], STEPS):
            take(engine, number)
        assert bits(engine) == states[-1], after
    assert cuts > 10


def test_a_storm_of_ctrl_c_leaves_the_weights_of_whole_steps(made):
    build, states = made
    engine, ended = build(), threading.Event()

    def storm():
        while not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.0007)

    hit, sender = 0, threading.Thread(target=storm)
    usual = signal.getsignal(signal.SIGINT)
    deadline = time.monotonic() + 60
    try:
        sender.start()
        while engine.step_number < STEPS and time.monotonic() < deadline:
            try:
                if engine._left:
                    engine.outer_step()
                engine.step(**batch(engine.step_number), lr=1e-2)
            except KeyboardInterrupt:
                hit += 1
    except KeyboardInterrupt:
        hit += 1
    finally:
        while True:
            with suppress(KeyboardInterrupt):
                ended.set()
                sender.join()
                break
    if engine._left:
        engine.outer_step()
    assert hit
    assert bits(engine) == states[engine.step_number]
    assert signal.getsignal(signal.SIGINT) is usual


def test_signals_wait_for_the_end_of_a_block_and_none_is_lost():
    seen = []

    def leave(number, frame):
        seen.append(number)
        raise SystemExit(number)

    handlers = {signal.SIGTERM: leave, signal.SIGUSR1: lambda number, frame: seen.append(number)}
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()}
    done = False
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
    assert sorted(seen) == sorted([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    assert found == handlers
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
        with pytest.raises(UserError, match=r"step\(\) ended within its update, .* build a new engine"):
            call()


def test_a_batch_that_is_refused_leaves_the_engine_usable(made):
    build, states = made
    engine = build()
    with pytest.raises(UserError, match="holds 999"):
        engine.step(**{**batch(0), "tokens": np.full((B, T), 999)}, lr=1e-2)
    take(engine, 0)
    assert bits(engine) == states[1]


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
        with pytest.raises(UserError, match="^" + call + r": this engine is in a call already, .* take turns$"):
            getattr(engine, call)(*(["forward"] if call == "run" else []), **({} if call == "run" else batch(1)))
    finally:
        go.set()
        first.join()
    assert bits(engine) == states[1]


def test_two_threads_at_full_speed_train_as_one(made):
    engine, alone = made[0](), made[0]()
    taken, others = [], []

    def work():
        for _ in range(40):
            try:
                engine.step(**batch(0), lr=1e-3)
                taken.append(1)
            except UserError as e:
                others.append(str(e))

    both = [threading.Thread(target=work) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert all("in a call already" in text for text in others)
    for _ in taken:
        alone.step(**batch(0), lr=1e-3)
    assert taken
    assert bits(engine) == bits(alone)


def test_a_call_from_within_a_step_is_refused():
    engine = engine_of(TWO_PASS)

    def accept(done):
        engine.forward(**batch(1))  # would overwrite the gradients
        return True

    before = bits(engine)
    with pytest.raises(UserError, match=r"^forward: this engine is in a call already"):
        engine.step(**batch(0), accept=accept)
    assert bits(engine) == before
    engine.step(**batch(0))


def test_a_profile_puts_back_all_that_its_steps_changed(monkeypatch):
    engine = engine_of("auto", Library)
    engine.step(**batch(0), lr=1e-2)
    changed = bits(engine)
    right = np.copyto

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


@pytest.mark.parametrize("module", ["cpuopt.signals", "cpuopt.cli", "cpuopt.cli.profile", "numba"])
def test_a_ctrl_c_while_the_command_is_imported(module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.replace("MODULE", module))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", "cpuopt", "profile", "--model", "gpt2-tiny"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cpuopt: interrupted\n")


def test_a_ctrl_c_before_the_first_step_says_what_is_not_written(monkeypatch, capsys):
    usual = trainer.opened

    def opened(*given):
        signal.raise_signal(signal.SIGINT)
        return usual(*given)

    monkeypatch.setattr(trainer, "opened", opened)
    words = ["train", "--model", "gpt2-tiny", "--steps", "3", "--val-every", "0", "--threads", "1"]
    assert cli.main([*words, "--trace", "t.json"]) == 130
    assert "--trace t.json: not written, because no step was done" in capsys.readouterr().err


def test_a_ctrl_c_on_the_way_to_a_folder_of_the_cache_is_not_lost(monkeypatch, tmp_path):
    usual, closed = os.close, []

    def close(descriptor):
        usual(descriptor)
        closed.append(descriptor)
        if len(closed) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(KeyboardInterrupt), private.opened(tmp_path):
        pass
    assert len(closed) == 2
