"""Several ranks without MPI: promises of launchers, cores, agreement, the launcher and the watchdog."""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verbs import ended, fails, wait

from cpuopt.cli import ranks
from cpuopt.comm import Comm
from cpuopt.comm.agree import Agreement, CommonError
from cpuopt.comm.launch import FOLDER, Launch, Link, mpiexec
from cpuopt.comm.places import LAUNCHERS, Here, Promise, keeps, part, places, promised, suits
from cpuopt.comm.watchdog import Watchdog
from cpuopt.errors import UserError

ROOT = Path(__file__).parents[1]
MPIEXEC_IN_SRUN = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "2", "PMI_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "promise"),
    [
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, Promise("mpiexec of MPICH", 4, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, Promise("mpiexec of Open MPI", 2, 0)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7"}, Promise("srun", 8, 7)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script, outside of any step
        (MPIEXEC_IN_SRUN, Promise("mpiexec of MPICH", 2, 1)),
        *(({"PMI_SIZE": "many", "PMI_RANK": "0"}, None), ({}, None)),
    ],
)
def test_a_launcher_is_known_by_its_environment(environment, promise):
    assert promised(environment) == promise


def test_a_rank_that_is_alone_against_the_promise_is_refused():
    keeps(Promise("srun", 4, 0), 4)
    fails(r"srun promised 4 ranks, and MPI sees 1 rank: mpi4py belongs to another MPI", keeps, Promise("srun", 4, 0), 1)
    for launcher, size, rank in LAUNCHERS:
        left = f"{size} and {rank} say that {launcher} started this; if it did not, unset them$"
        fails(left, keeps, Promise(launcher, 4, 0), 1)
    suits(Promise("mpiexec of Open MPI", 4, 0), "Open MPI v5.0.11")
    fails("the MPI here is MPICH 5", suits, Promise("mpiexec of Open MPI", 4, 0), "MPICH 5.0.2")


def here(*masks, host="a", quota=None):
    return [Here(host, tuple(mask), quota) for mask in masks]


def test_ranks_of_one_host_share_the_cores_that_all_of_them_may_use():
    assert [p.cores for p in places(here(range(5), range(5)))] == [(0, 1), (2, 3, 4)]
    assert [p.threads for p in places(here(range(5), range(5)))] == [2, 3]
    apart = places([*here([0, 1]), *here([0, 1], host="b")])
    assert [p.cores for p in apart] == [(0, 1), (0, 1)]  # the same numbers, of two hosts
    assert [p.cores for p in places(here([0, 1], [2, 3], [0, 1]))] == [(0,), (2, 3), (1,)]


def test_a_quota_of_a_container_limits_threads_and_ranks():
    assert [p.threads for p in places(here(range(8), range(8), quota=2.0))] == [1, 1]
    fails("3 ranks on the 2 cores of a", places, here(range(8), range(8), range(8), quota=2.0))


def test_cores_are_shared_only_with_permission():
    for ranks_, message in (
        (here([0], [0]), "2 ranks on the 1 core of a: .* --oversubscribe"),
        (here([0, 1], [1, 2]), "ranks 0 and 1 on a may both use core 1: .* --oversubscribe"),
    ):
        fails(message, places, ranks_)
        assert all(p.threads == 1 for p in places(ranks_, oversubscribe=True) if len(p.cores) == 1)
    assert [p.cores for p in places(here([0, 3], [0, 3], [0, 3]), oversubscribe=True)] == [(0,), (0,), (3,)]


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_of_cores_are_fair(n_cores, n):
    parts = [part(range(n_cores), i, n) for i in range(n)]
    assert {c for p in parts for c in p} == {*range(n_cores)} or n > n_cores
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sum(map(len, parts)) == max(n_cores, n)


def test_fewer_ranks_split_a_step_as_exactly():
    assert [ranks.fewer(8, w) for w in (8, 4, 2, 1)] == [4, 2, 1, None]
    assert [ranks.fewer(6, w) for w in (6, 3)] == [3, 1]


class Others(Comm):
    """Two ranks, of which the other one answers as told."""

    def __init__(self, rank=0, **other):
        self.rank, self.size, self.other = rank, 2, {"host": "b", "error": "", "facts": {}, "kernels": {}} | other

    def everyone(self, what):
        return [what, self.other]


def test_an_error_of_one_rank_is_that_of_all():
    with pytest.raises(CommonError, match=r"^rank 1 on b: no such file$"), Agreement(Others(error="no such file")):
        pass
    with pytest.raises(CommonError, match=r"^too large$"), Agreement(Others(error="too large")):
        raise UserError("too large")
    with pytest.raises(CommonError, match=r"^rank 0 on .*: too large$"), Agreement(Others()):
        raise UserError("too large")
    with pytest.raises(CommonError, match="of all"), Agreement(Others(error="late")):
        raise CommonError("of all")  # no other rank waits for a second word
    with pytest.raises(KeyboardInterrupt), Agreement(Others(error="late")):
        raise KeyboardInterrupt


def test_ranks_that_differ_are_named():
    other = Agreement(Others(facts={"--lr": 0.1}))
    other.settle({"--lr": 0.1})
    with pytest.raises(CommonError, match=r"^rank 1 on b has --lr 0\.1, and rank 0 on \S+ 0\.2: "):
        other.settle({"--lr": 0.2})
    with pytest.raises(CommonError, match="rank 1 on b has --clip None"), Agreement(Others()) as agreement:
        agreement.settle({"--clip": 1.0})


FAKE = """
import os, subprocess, sys
size, program = int(sys.argv[1]), sys.argv[2:]
ranks = [subprocess.Popen([sys.executable, *program], env={**os.environ, "PMI_SIZE": str(size), "PMI_RANK": str(r)})
         for r in range(size)]
sys.exit(max(abs(r.wait()) for r in ranks))
"""
"""Starts ranks as an mpiexec does; where one ends, the others go on."""
BEGIN = """
import os, signal, sys, time
from cpuopt.comm.launch import Link
from cpuopt.comm.places import promised
rank = promised().rank
link = Link(rank)
"""


def command(program, size=2):
    return [sys.executable, "-c", FAKE, str(size), "-c", BEGIN + program]


def launched(program, size=2):
    said, start = [], time.monotonic()
    job = Launch(command(program, size), size, said.append)
    job.status = job.run()
    return job, said, time.monotonic() - start


def test_ranks_print_where_the_launcher_prints_and_the_status_is_that_of_the_first(capfd):
    ended, said, _ = launched("os.write(1, b'rank %d\\n' % rank); link.tell(run='x'); link.tell(status=3 - rank)")
    assert (ended.status, ended.died, ended.told, said) == (3, False, {"run": "x"}, [])
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "rank 0", "rank 1"]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("end", [KILL, "os._exit(0)", "import ctypes; ctypes.string_at(0)"])
def test_a_rank_that_ends_without_a_word_ends_all(end):
    ended, said, took = launched(f"if rank == 1: {end}\ntime.sleep(60)")
    assert (ended.status, ended.died, len(said)) == (1, True, 1)
    assert re.match(r"rank 1 on \S+: ended without a word", said[0])
    assert took < 20


def test_a_launcher_that_starts_nothing_is_quoted():
    said, broken = [], [sys.executable, "-c", "print('-----'); print('no slots'); raise SystemExit(5)"]
    assert (Launch(broken, 2, said.append).run(), said) == (1, ["mpiexec ended with status 5: no slots"])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_reaches_all_ranks(name, tmp_path):
    program = f"""
hit = []
signal.signal(signal.{name}, lambda *more: hit.append(1))
open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
while not hit: time.sleep(0.01)
link.tell(status=128 + signal.{name})
"""

    def send():
        wait(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), getattr(signal, name))

    threading.Thread(target=send).start()
    ended, said, _ = launched(program)
    assert (ended.status, said) == (128 + getattr(signal, name), [])


def test_a_killed_launcher_takes_its_ranks_along(tmp_path):
    program = BEGIN + f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(60)"
    started = [sys.executable, "-c", FAKE, "2", "-c", program]
    launcher = f"from cpuopt.comm.launch import Launch; Launch({started!r}, 2, print).run()"
    (temporary := tmp_path.parent / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, env=environment) as process:
        wait(lambda: len(list(tmp_path.iterdir())) == 2)
        ranks = [int(p.name) for p in tmp_path.iterdir()]
        process.kill()
    wait(lambda: all(map(ended, ranks)))
    assert list(temporary.iterdir()) == []


def test_a_rank_without_its_launcher_says_so_and_removes_only_what_is_a_launchers(tmp_path):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / f"{FOLDER}x"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "ranks"))
    for address in (tmp_path / "file", folder / "ranks"):
        fails(r"^CPUOPT_LAUNCHER=.*: no launcher is there", Link, 0, str(address))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


HYDRA = ["-launcher", "fork", "-hosts", "localhost"]


@pytest.mark.parametrize(
    ("versions", "taken", "more"),
    [
        ({"mpiexec": "HYDRA build details"}, "mpiexec", HYDRA),
        ({"mpiexec": "HYDRA build details", "mpiexec.gforker": ""}, "mpiexec.gforker", []),  # which opens no port
        ({"mpiexec": "mpirun (Open MPI) 5.0.11"}, "mpiexec", ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]),
    ],
)
def test_each_mpiexec_gets_its_own_flags(versions, taken, more, tmp_path, monkeypatch):
    for name, version in versions.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{version}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    made = [word for word in mpiexec(3, ["x"]) if word != "--allow-run-as-root"]
    assert made == [str(tmp_path / taken), *more, "-n", "3", "x"]
    for name in versions:
        (tmp_path / name).unlink()
    monkeypatch.setenv("PATH", "")
    fails(r"no mpiexec; install it with: pip install 'cpuopt\[mpi\]'", mpiexec, 3, [])


def test_the_libraries_of_ranks_are_told_to_take_the_loopback_interface(here, monkeypatch):
    monkeypatch.setenv("FI_TCP_IFACE", "eth7")
    show = "import os; print(os.environ['UCX_NET_DEVICES'], os.environ['FI_TCP_IFACE'], file=open('shown', 'w'))"
    Launch([sys.executable, "-c", show], 1, lambda text: None).run()
    assert Path("shown").read_text() == "lo eth7\n"


HANGS = """
import ctypes
from cpuopt.comm.watchdog import Watchdog

def kernel():
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter, as a kernel does

with Watchdog(first_s=0.5, file=link.fileno()) as dog:
    with dog.watch_step():
        STEP
    kernel() if rank else time.sleep(60)
"""


@pytest.mark.parametrize("step", ["kernel() if rank else time.sleep(60)", "pass"])
def test_what_does_not_end_shows_the_stacks_of_all_ranks(step):
    ended, said, took = launched(HANGS.replace("STEP", step))
    assert (ended.status, ended.died) == (1, False)
    assert {f"rank {r}: a step, or what follows it, did not end; the stacks:" for r in (0, 1)} <= {*said}
    assert any(re.match(r"rank 1: .*line \d+ in kernel", line) for line in said)
    assert took < 20


def test_a_step_that_does_not_end_ends_its_process_without_a_launcher():
    program = "import time\nfrom cpuopt.comm.watchdog import Watchdog\ndef stuck(): time.sleep(60)\n"
    program += "with Watchdog(first_s=0.2) as dog, dog.watch_step(): stuck()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGALRM
    assert "in stuck" in done.stderr


def test_the_watchdog_waits_for_twenty_medians():
    now = [0.0]
    dog = Watchdog(least_s=60, times=20, first_s=1800, clock=lambda: now[0])
    limits = [dog.limit_s]
    with dog:
        for seconds in (1.0, 5.0, 5.0):
            with dog.watch_step():
                now[0] += seconds
            assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(1802, abs=60)
            limits.append(dog.limit_s)
    assert (limits, signal.getitimer(signal.ITIMER_REAL)) == ([1800, 60, 60, 100], (0.0, 0.0))


DIES = """
link.tell(micro_batches=4, total_batch=256)
if not rank: link.tell(run="runs/r")
size = promised().size
if size == 4: os.kill(os.getpid(), signal.SIGKILL) if rank == 3 else time.sleep(60)
if not rank: open(os.environ["SAID"], "a").write(" ".join(sys.argv[1:]) + "\\n")
if size == 2: os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(60)
link.tell(status=0)
"""


@pytest.mark.parametrize("there", [True, False])
def test_elastic_goes_on_with_the_ranks_that_are_left(there, tmp_path, monkeypatch, capfd):
    def newest(run):
        if not there:
            raise UserError("there is none")

    monkeypatch.setattr("cpuopt.train.checkpoint.newest", newest)
    monkeypatch.setattr(ranks, "mpiexec", lambda size, program: [*command(DIES, size), *program])
    monkeypatch.setattr(ranks, "module", lambda name, *args: [*args])
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    args = argparse.Namespace(ranks=4, elastic=True, oversubscribe=False, command=["train", "--ranks", "4"])
    assert ranks.run(args, lambda rank: 1) == 0
    more = "--resume runs/r" if there else "--total-batch 256"
    assert (tmp_path / "said").read_text().splitlines() == [f"train --ranks 4 --ranks {n} {more}" for n in (2, 1)]
    said = [line for line in capfd.readouterr().err.splitlines() if "--elastic" in line]
    how = "from runs/r" if there else "from the beginning, for there is no checkpoint"
    assert said == [f"cpuopt: --elastic: of {n} ranks one died; the run goes on with {n // 2}, {how}" for n in (4, 2)]
