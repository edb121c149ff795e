"""Threads that follow the load: the choice as a function of what others use, and libgomp's threads as they wait."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from cpuopt import machine
from cpuopt.kernels.toolkit import waiting

SECOND = round(1 / waiting.PERIOD_S)


def seconds(*loads):
    return [x for x in loads for _ in range(SECOND)]


LOADS = {  # what others use at each look, the cores that are left to them, whether threads spin at the end, and changes
    "quiet": (seconds(*[0.0] * 20), 0, True, 0), "loaded": (seconds(*[2.0] * 20), 0, False, 1),
    "load comes": (seconds(*[0.0] * 10, *[1.5] * 10), 0, False, 1),
    "load goes": (seconds(*[1.5] * 10, *[0.1] * 10), 0, True, 2),
    "a little": (seconds(*[0.2, 0.4, 0.3] * 7), 0, True, 0), "less than is left": ([8.3] * 40, 8, True, 0),
    "more than is left": ([8.6] * 40, 8, False, 1), "every other look": ([2, 0] * 40, 0, True, 0),
    "pairs of looks": ([2, 2, 0, 0] * 40, 0, False, 1), "threes of looks": ([2, 2, 2, 0, 0, 0] * 40, 0, False, 1),
    "less and less": ([0.6, 0.3] * 40, 0, True, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_the_choice_follows_the_load_and_does_not_flap(name):
    looks, room, ends, changed = LOADS[name]
    choice = waiting.Waits(room)
    ways = [choice.look(x) for x in looks]
    assert (ways[-1], sum(a != b for a, b in pairwise([True, *ways]))) == (ends, changed)


def test_a_wrong_guess_is_mended_within_a_second():
    for load, right in (2.0, False), (0.0, True):
        choice = waiting.Waits(0)
        for _ in range(20):
            choice.look(2.0 - load)
        assert choice.spins is not right
        assert [choice.look(load) for _ in range(SECOND)][-1] is right


def test_two_runs_side_by_side_both_leave_cores_and_return_when_one_ends():
    first, second, spins = waiting.Waits(0), waiting.Waits(0), []
    uses = {True: 1.0, False: 0.8}  # of two cores, beside another run
    for _ in range(10 * SECOND):
        a, b = uses[first.spins], uses[second.spins]
        spins.append((first.look(b), second.look(a)))
    assert spins[SECOND:] == [(False, False)] * len(spins[SECOND:])
    assert [first.look(0.0) for _ in range(SECOND)][-1]


BURNT = """
import json, os, sys, threading as python, time
from contextlib import suppress
import numpy as np
from cpuopt import machine
from cpuopt.kernels.toolkit import waiting, threads
from cpuopt.kernels.watch import python_threads
load = [0.0]
machine.Others.cores = lambda self: load[0]
os.cpu_count = lambda: 2
os.sched_getaffinity = lambda pid: {0, 1}
machine.cores = lambda: 2
threads.start(2)
from numba import njit, prange
@njit(parallel=True)
def region(x):
    for i in prange(2):
        x[i] += 1
def workers():  # ns of the processor that threads which are not Python's have used
    theirs = {*os.listdir("/proc/self/task")} - {str(thread.native_id) for thread in python.enumerate()}
    ns = 0
    for i in theirs:
        with suppress(OSError):  # it ended meanwhile
            ns += int(open(f"/proc/self/task/{i}/schedstat").read().split()[0])
    return ns
def burnt():
    x, rounds = np.zeros(2), []
    for _ in range(12):
        began = workers()
        region(x)
        time.sleep(0.05)
        rounds.append(workers() - began)
    return 1e-6 * float(np.median(rounds))
def until(now):
    end = time.monotonic() + 60
    while machine._waiting["now"] != now and time.monotonic() < end:
        time.sleep(0.05)
    return [now, burnt(), dict(machine._waiting), sorted(python_threads()), python.active_count()]
region(np.zeros(2))
if machine._waiting["now"] == "runtime":
    sys.exit("the threads of this machine are not libgomp's")
found = [until("spin")]
for load[0], now in (2.0, "sleep"), (0.0, "spin"):
    found.append(until(now))
for now in "sleep", "spin":
    waiting.tell(now)
    found.append(until(now))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def burnt(clean_environment):
    environment = {**clean_environment, "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", BURNT], env=environment, capture_output=True, text=True, timeout=300)
    if "not libgomp's" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def clean_environment():
    return {k: v for k, v in os.environ.items() if k not in (*machine.THEIRS, machine.WAITING)}


def test_threads_of_libgomp_burn_processor_time_only_while_they_spin(burnt):
    for now, ms, state, *_ in burnt:
        assert state["now"] == now
        assert (ms > 1) == (now == "spin"), burnt
    assert [state["changes"] for _, _, state, *_ in burnt] == [0, 1, 2, 3, 4]


def test_a_kernel_is_not_accused_of_the_threads_that_make_others_sleep(burnt):
    alive = {now: count for now, *_, count in burnt}
    assert alive["sleep"] > alive["spin"]
    assert all(watched == burnt[0][3] for *_, watched, _ in burnt)


TRAINED = """
import numpy as np
from cpuopt import Engine, models
from cpuopt.kernels.toolkit import waiting
config, module = models.load("gpt2-tiny")
ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 17))
for switch in True, False:
    engine = Engine(module, config.specs(2, 16), threads=2)
    for i in range(6):
        if switch:
            waiting.tell("sleep" if i % 2 else "spin")
        print(float(engine.step(tokens=ids[:, :-1], targets=ids[:, 1:]).loss).hex())
"""


def test_how_threads_wait_changes_no_bit(clean_environment):
    environment = {**clean_environment, "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", TRAINED], env=environment, capture_output=True, text=True, timeout=300)
    losses = done.stdout.split()
    assert (done.returncode, len(losses)) == (0, 12), done.stderr
    assert losses[:6] == losses[6:]


def test_without_libgomp_the_runtime_waits_as_it_does(monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(machine, "_waiting", {"how": "follow", "now": "spin", "changes": 0})
    for text in "", "7f 0 0 0 0 /lib/libomp.so\n", "7f 0 0 0 0 /a/libgomp.so.1\n7f 0 0 0 0 /b/libgomp.so.1\n":
        (tmp_path / "maps").write_text(text)
        waiting.follow(2)
        assert machine._waiting == {"how": "follow", "now": "runtime", "changes": 0}
    waiting.tell("sleep")  # does nothing
