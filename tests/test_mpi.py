"""Real MPI, in an environment of its own (`make test-mpi`): bits, signals, deaths, errors, with 2 and 4 ranks."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from cpuopt.comm.launch import mpiexec
from cpuopt.train.checkpoint import Stored
from cpuopt.weights.tensors import TensorFile

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).parents[1]
PATH, STEPS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), 40
TRAIN = ["train", "--model", "gpt2-tiny", "-B", "2", "-T", "16", "--total-batch", "128", "--val-every", "20"]
TRAIN += ["--steps", str(STEPS), "--save-every", "5", "--keep", "9", "--seed", "1", "--log-every", "1"]
CPUOPT = [sys.executable, "-P", "-m", "cpuopt"]


def run(command, messages=False, **environment):
    more = {"PYTHONPATH": PATH, "CPUOPT_MESSAGES": "1" if messages else "", "TERM": "dumb", **environment}
    how = {"timeout": 170, "env": {**os.environ, **more}, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, **how)


def errors(done):
    """The lines of our own on stderr; an mpiexec adds remarks."""
    return [line for line in done.stderr.splitlines() if line.startswith(("cpuopt: ", "warning: "))]


def result(runs, steps=STEPS):
    """All that a run computed: the tensors of the last checkpoint, and the log of losses and norms."""
    (folder,) = Path(runs).iterdir()
    saved = folder / "checkpoints" / f"step-{steps:08d}"
    shapes = {name: t.shape for name, t in TensorFile(saved / "params.safetensors").tensors.items()}
    found = {"log": (folder / "main.log").read_text()}
    for file in ("params.safetensors", "adam_m.safetensors", "adam_v.safetensors"):
        stored = Stored(saved, file, shapes)
        for name, shape in shapes.items():
            stored.read(name, x := np.empty(shape, np.float32))
            found[f"{file} {name}"] = x.tobytes()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process."""
    runs = tmp_path_factory.mktemp("alone")
    done = run([*CPUOPT, *TRAIN, "--runs", str(runs)])
    assert done.returncode == 0, done.stderr
    return result(runs)


def exchanged(size, messages, *more):
    done = run(mpiexec(size, [sys.executable, str(ROOT / "tests/mpi/exchange.py"), *more]), messages)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_ranks_exchange_the_same_bits_by_memory_and_by_messages():
    (crc, *_) = exchanged(1, False)
    assert [exchanged(n, m) for n in (2, 4) for m in (False, True)] == [[crc, "memory"], [crc, "messages"]] * 2
    assert exchanged(4, False, "in_order")[0] != crc


def test_two_ranks_of_a_foreign_launcher_train_to_the_same_bits(alone, tmp_path):
    done = run(mpiexec(2, [*CPUOPT, *TRAIN, "--runs", str(tmp_path), "--oversubscribe"]), messages=True)
    assert done.returncode == 0, done.stderr
    assert (result(tmp_path), len(re.findall("run folder ", done.stdout))) == (alone, 1)
    assert re.search(r"rank +host +cores +threads\n +0 ", done.stdout)


class Started:
    """``train --ranks`` in progress; `end` is to be called."""

    def __init__(self, size, runs, *more):
        command = [*CPUOPT, *TRAIN, "--ranks", str(size), "--oversubscribe", "--runs", str(runs), *more]
        environment = {**os.environ, "PYTHONPATH": PATH, "TERM": "dumb"}
        self.seen, self.files = [], set()
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **streams)

    def until(self, step):
        for line in self.process.stdout:
            if (at := re.match(r"step (\d+)/", line)) and int(at[1]) >= step:
                return

    def ranks(self):
        """The processes of the ranks that live."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "mpi4py" in process.cmdline()[1:4]:
                    found.append(process)
                    self.files |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
        self.seen += found
        return found

    def end(self):
        """Wait; return the status and the errors, and check that nothing is left."""
        self.ranks()
        with self.process:
            _, said = self.process.communicate(timeout=120)
        assert psutil.wait_procs(self.seen, timeout=5)[1] == [f for f in self.files if os.path.exists(f)] == []
        return self.process.returncode, said


def test_elastic_ranks_that_are_killed_end_in_the_same_bits(alone, tmp_path):
    started = Started(4, tmp_path, "--elastic")
    for step, size in ((8, 4), (23, 2)):
        started.until(step)
        ranks = started.ranks()
        assert len(ranks) == size
        ranks[-1].kill()
    status, said = started.end()
    assert status == 0, said
    told = "cpuopt: --elastic: of {} ranks one died; the run goes on with {}, from {}".format
    elastic = [line for line in said.splitlines() if "--elastic" in line]
    assert elastic == [told(n, n // 2, next(tmp_path.iterdir())) for n in (4, 2)]
    assert result(tmp_path) == alone


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_launcher_ends_all_ranks_with_a_checkpoint(name, alone, tmp_path):
    started = Started(2, tmp_path)
    started.until(7)
    started.process.send_signal(getattr(signal, name))
    start = time.monotonic()
    status, said = started.end()
    assert (status, said) == (128 + getattr(signal, name), "")
    assert time.monotonic() - start < 60
    if name == "SIGTERM":
        resumed = Started(4, tmp_path, "--resume")
        resumed.until(STEPS)
        assert (resumed.end(), result(tmp_path)) == ((0, ""), alone)


def test_a_killed_rank_ends_all_and_no_process_listened_on_another_interface_than_loopback(tmp_path):
    started = Started(2, tmp_path)
    started.until(3)
    ranks = started.ranks()
    processes = [*ranks, *psutil.Process(started.process.pid).children(recursive=True)]
    listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    ranks[0].kill()
    status, said = started.end()
    assert ({ip for ip in listening if not ip.startswith("127.") and ip != "::1"}, status) == (set(), 1)
    assert re.fullmatch(r"cpuopt: rank [01] on \S+: ended without a word: [^\n]+\n", said)


def test_an_error_that_all_ranks_meet_comes_once(tmp_path):
    bad = [*TRAIN, "--runs", str(tmp_path / "runs"), "--lr", "-1"]
    for command in (mpiexec(2, [*CPUOPT, *bad, "--oversubscribe"]), [*CPUOPT, *bad, "--ranks", "2", "--oversubscribe"]):
        done = run(command)
        assert (done.returncode, errors(done)) == (2, ["cpuopt: --lr -1.0: expected a positive number"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "others", "message"),
    [
        (["--lr", "0.1"], ["--lr", "0.2"], r"has --lr 0\.2, and rank 0 on \S+ 0\.1"),
        (["--data", "text"], ["--data", "text"], r"has text of --data with the fingerprint '\w+', and rank 0 on"),
        (["--ranks", "4"], ["--ranks", "4"], ""),
    ],
)
def test_ranks_that_differ_are_refused_in_one_line(flags, others, message, tmp_path):
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(f"{folder} and so on. " * 1000)
    runs = ["--runs", str(tmp_path / "runs"), "--oversubscribe"]
    within = "import os, sys; os.chdir(sys.argv.pop(1)); from cpuopt.cli import main; sys.exit(main())"
    first, second = ([sys.executable, "-c", within, str(tmp_path / folder), *TRAIN, *runs] for folder in "01")
    done = run([*mpiexec(1, [*first, *flags]), ":", "-n", "1", *second, *others])
    assert done.returncode == 2, done.stderr
    (said,) = errors(done)
    assert re.match(rf"cpuopt: rank 1 on \S+ {message}", said) if message else "--ranks 4: mpiexec of " in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_under_a_launcher_says_so(rank, tmp_path):
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(rank)}
    done = run([*CPUOPT, *TRAIN, "--runs", str(tmp_path / "runs")], **slurm)
    assert done.returncode == 2
    said = ["cpuopt: srun promised 4 ranks, and MPI sees 1 rank: "] * (rank == 0)
    assert [line[: len(said[0])] for line in errors(done)] == said
    assert not (tmp_path / "runs").exists()
