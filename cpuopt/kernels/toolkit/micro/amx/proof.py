"""Whether this process may use AMX, on a processor that has it.

Linux must permit it, once in each process. And it must have been proved on this machine: where kernels are first
imported, a child process (``prove``) compares products on AMX with their model of plain multiply-adds, bit by bit,
those of int8 with NumPy's, and their speed with that of the next micro-kernel. If it crashes, errs or is slower, AMX
is passed over. The outcome is kept beside the compiled kernels; `cpuopt machine` shows it. ``CPUOPT_AMX=off`` passes
AMX over, and ``on`` uses it without a proof.
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

import llvmlite.binding as llvm

from .....errors import UserError
from .....isolate.process import Side, Worker
from ....compile import entries
from ....compile.dependencies import settings, sha
from ....compile.progress import proving
from ..targets import VARIABLE as TARGET

VARIABLE = "CPUOPT_AMX"
PERMISSION = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), since Linux 5.16
LIMIT_S = 300.0
"""Seconds that the proof may take; most of them are compilation."""
TEXTS = (
    *(f"toolkit/{name}.py" for name in ("blocks", "pairs", "quads", "simd")),
    *(f"toolkit/micro/{name}.py" for name in ("__init__", "generic", "amx/__init__", "amx/proof", "amx/prove")),
    *(f"compile/{name}.py" for name in ("jit", "storage")),
)
"""What a proof depends on, besides the machine and `settings`."""
FINAL = "SIGILL", "SIGSEGV", "SIGBUS"
"""How a process ends that cannot use AMX. Others that give no answer are tried again by the next one."""


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
    """Return whether this process may use AMX; prove it if nobody did.

    Raises
    ------
    UserError
        For a setting that is neither on nor off.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "on", "off"):
        raise UserError(f"{VARIABLE}={asked}: expected on or off; unset it to let AMX be proved")
    if asked == "off":
        return Proof(False, f"{VARIABLE}=off")
    if reason := refused():
        return Proof(False, reason)
    return Proof(True, f"{VARIABLE}={asked}") if asked == "on" else kept()


def kept() -> Proof:
    """Return the proof that is kept, or make and keep one; processes that this one starts use it too."""
    here = Path(__file__).parents[3]
    texts = [(here / name).read_text() for name in TEXTS]
    machine = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), platform.release()
    key = sha(repr((machine, settings(), texts)).encode())
    folder = entries.folder_in_use()
    if folder and (payload := entries.read(folder, key)):
        return Proof(**json.loads(payload))
    proving("AMX")
    side = Side.module("proof", "cpuopt.kernels.toolkit.micro.amx.prove", **{VARIABLE: "on", TARGET: ""})
    proof, final = proved(side)
    if folder and final:
        with suppress(OSError):
            entries.write(folder, key, json.dumps(asdict(proof)).encode())
    os.environ[VARIABLE] = "on" if proof.use else "off"
    return proof


def proved(side: Side, limit_s: float = LIMIT_S) -> tuple[Proof, bool]:
    """Let a process prove AMX; return what came of it, and whether another attempt would say the same."""
    try:
        with Worker(side, limit_s=limit_s) as worker:
            said = worker.ask("prove")
            return Proof(said["use"] is True, str(said["reason"])), True
    except (UserError, OSError, KeyError, TypeError) as e:
        text = f"not proved: {str(e).removeprefix(side.name + ': ')}"
        return Proof(False, text), any(name in text for name in FINAL)
