"""What processes leave behind: no child outlives its parent, however that ends and whatever the child runs."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bad import HEAD, text
from verbs import ended, wait

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


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_worker_in_a_kernel_that_never_returns_ends_with_its_parent(name):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, **streams) as parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(getattr(signal, name))
        wait(lambda: ended(parent.pid) and ended(worker), 10)


def test_an_inspection_ends_with_its_parent(tmp_path):
    (tmp_path / "sleeps.py").write_text("import ctypes\nopen('began', 'w').close()\nctypes.PyDLL(None).sleep(60)\n")
    with subprocess.Popen([sys.executable, "-c", INSPECTING], cwd=tmp_path) as parent:
        wait((tmp_path / "began").exists)
        (compiler,) = psutil.Process(parent.pid).children()
        parent.kill()
        wait(lambda: ended(compiler.pid), 5)


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
