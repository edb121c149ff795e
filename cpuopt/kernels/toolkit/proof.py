"""Whether this process may use AMX, on a processor that has it.

Linux must permit it, once in each process. And it must have been proved on this machine: at first use, a child process
(``compile.prove``) compares products on AMX with their model of plain multiply-adds, bit by bit, and their speed with
that of the next micro-kernel. If it crashes, errs or is slower, AMX is passed over. The outcome is kept beside the
compiled kernels; `cpuopt machine` shows it. ``CPUOPT_AMX=off`` passes AMX over.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from ...errors import UserError
from ...isolate.process import Side, Worker
from ..compile import entries
from ..compile.dependencies import sha
from ..compile.progress import proving

VARIABLE = "CPUOPT_AMX"
PERMISSION = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), since Linux 5.16
LIMIT_S = 300.0
"""Seconds that the proof may take; most of them are compilation."""
TEXTS = *(f"toolkit/{name}.py" for name in ("amx", "blocks", "micro", "proof", "simd")), "compile/prove.py"
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
    proving("AMX")
    proof = proved(Side.module("proof", "cpuopt.kernels.compile.prove", **{VARIABLE: "on"}))
    if folder:
        with suppress(OSError):
            entries.write(folder, key, json.dumps(asdict(proof)).encode())
    return proof


def proved(side: Side, limit_s: float = LIMIT_S) -> Proof:
    """Let a process prove AMX, and say what came of it."""
    try:
        with Worker(side, limit_s=limit_s) as worker:
            said = worker.ask("prove")
            return Proof(said["use"] is True, str(said["reason"]))
    except (UserError, KeyError, TypeError) as e:
        return Proof(False, f"not proved: {str(e).removeprefix(side.name + ': ')}")
