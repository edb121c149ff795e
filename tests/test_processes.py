"""What processes leave behind: no child outlives its parent, however that ends and whatever the child runs."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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
