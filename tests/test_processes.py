"""What processes leave behind: no child outlives its parent, however that ends and whatever the child runs."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bad import HEAD, text

from cpuopt import cli

ROOT = Path(__file__).parents[1]
BUSY = """
import ctypes
from cpuopt.isolate.serve import serve

def kernel(request, say):  # holds the interpreter, as a kernel does, and does not come back
    say("busy")
    ctypes.PyDLL(None).sleep(60)

serve({"kernel": kernel})
"""
PARENT = f"""
import sys
from cpuopt.isolate.process import Side, Worker

def busy(text):
    print(worker.pid, flush=True)

with Worker(Side("child", (sys.executable, "-c", {BUSY!r})), busy) as worker:
    worker.ask("kernel")
"""


INSPECTING = """
from cpuopt.lab.inspect import inspect

inspect("gelu_forward", "vanilla", ["sleeps.py"])
"""


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends in time; one that nobody has waited for counts as ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_worker_in_a_kernel_that_never_returns_ends_with_its_parent(name):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    with parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(getattr(signal, name))
        assert gone(parent.pid)
        assert gone(worker)


def test_an_inspection_ends_with_its_parent(tmp_path):
    (tmp_path / "sleeps.py").write_text("import ctypes\nopen('began', 'w').close()\nctypes.PyDLL(None).sleep(60)\n")
    with subprocess.Popen([sys.executable, "-c", INSPECTING], cwd=tmp_path) as parent:
        end = time.monotonic() + 60
        while not (tmp_path / "began").exists() and time.monotonic() < end:
            time.sleep(0.05)
        (compiler,) = psutil.Process(parent.pid).children()
        parent.kill()
        assert gone(compiler.pid)


STRAY = "import sys; print('a stray line', file=sys.stderr, flush=True)\n...\nSEEN[len(SEEN)] = 1\n"
SAID = "import sys, warnings; print('out of paper', file=sys.stderr); warnings.warn('thin paper')\n"
ENDS = {"silent": f"{STRAY}if len(SEEN) > 250: os._exit(0)  # when it is timed", "loud": f"{SAID}os._exit(7)"}


def test_a_kernel_that_ends_its_process_is_named_without_stray_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    (tmp_path / "ends.py").write_text(HEAD + "".join(text("residual_forward", ENDS[v], v) for v in ENDS))
    size = ["--kernels", str(tmp_path / "ends.py"), "--model", "gpt2-tiny", "--sizes", "1x8", "--threads", "1"]
    said = {}
    for variant in ENDS:
        assert cli.main(["ab", "residual_forward", "vanilla", variant, *size, "--rounds", "6"]) == 1
        (said[variant],) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("cpuopt: "))
    assert re.search(r"its process ended with status 0 during 'ab', in residual_forward\[silent\] \(", said["silent"])
    assert "stray" not in said["silent"]
    assert "ended with status 7 during 'check', in residual_forward[loud]: out of paper" in said["loud"]


FORKING = """
import os
from cpuopt import UserError
from cpuopt.kernels.toolkit.threads import set_threads, threading_layer

if EARLY == "after":
    set_threads(1)
if pid := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), threading_layer())
else:
    try:
        set_threads(1)
    except UserError as e:
        print(e, flush=True)
        os._exit(3)
    os._exit(0)
"""


@pytest.mark.parametrize(("when", "status"), [("before", 0), ("after", 3)])
def test_a_process_forked_after_kernels_ran_says_so(when, status):
    """Without the error, libgomp ends the child at its first parallel kernel, and its parent waits for its result."""
    code = FORKING.replace("EARLY", repr(when))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    *said, last = done.stdout.splitlines()
    assert last.split()[0] == str(status), done.stdout + done.stderr
    assert ("do not survive a fork" in "".join(said)) == bool(status)
