"""Whether this process may use AMX, on a processor that has it.

Linux must permit it, once in each process. And it must have been proved on this machine: at first use, a child process
compares products on AMX with their model of plain multiply-adds, bit by bit, and with the speed of the next
micro-kernel (``python -m cpuopt.kernels.prove``). If it crashes, errs or is slower, AMX is passed over. The outcome is
kept beside the compiled kernels; `cpuopt machine` shows it. ``CPUOPT_AMX=off`` passes AMX over.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from ..compile import entries
from ..compile.dependencies import sha

VARIABLE = "CPUOPT_AMX"
PERMISSION = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), since Linux 5.16
LIMIT_S = 300.0
"""Seconds that the proof may take; most of them are compilation."""
TEXTS = "toolkit/amx.py", "toolkit/simd.py", "toolkit/proof.py", "prove.py"
"""What a proof depends on."""


@dataclass(frozen=True)
class Proof:
    """Whether AMX is used, and why."""

    use: bool
    reason: str


def refused() -> str:
    """Ask Linux for the tiles; return why it does not give them, or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.machine() != "x86_64" or libc.syscall(*map(ctypes.c_long, PERMISSION)) == 0:
        return ""
    return f"Linux does not permit it: {os.strerror(ctypes.get_errno())}"


@functools.cache
def found() -> Proof:
    """Return whether this process may use AMX; prove it if nobody did."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "off":
        return Proof(False, f"{VARIABLE}=off")
    if reason := refused():
        return Proof(False, reason)
    return Proof(True, f"{VARIABLE}={asked}") if asked == "on" else kept()


def kept() -> Proof:
    """Return the proof that is kept, or make and keep one."""
    here = Path(__file__).parents[1]
    texts = [(here / name).read_text() for name in TEXTS]
    key = sha(repr((llvm.get_host_cpu_name(), llvmlite.__version__, platform.release(), texts)).encode())
    folder = entries.folder_in_use()
    if folder and (payload := entries.read(folder, key)):
        return Proof(**json.loads(payload))
    sys.stderr.write("cpuopt: proving AMX on this machine, once\n")
    proof = proved([sys.executable, "-m", "cpuopt.kernels.prove"])
    if folder:
        entries.write(folder, key, json.dumps(asdict(proof)).encode())
    return proof


def proved(command: list[str]) -> Proof:
    """Run the program that proves AMX, and say what came of it."""
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, VARIABLE: "on", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Proof(False, f"its proof took longer than {LIMIT_S:.0f} s")
    if ended.returncode < 0:
        return Proof(False, f"its proof was ended by signal {-ended.returncode}")
    try:
        said = json.loads(ended.stdout.splitlines()[-1])
        return Proof(bool(said["use"]), str(said["reason"]))
    except (IndexError, KeyError, TypeError, ValueError):
        last = (ended.stderr.splitlines() or ["it said nothing"])[-1]
        return Proof(False, f"its proof failed: {last}")
