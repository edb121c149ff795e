"""Names of kernels for Linux ``perf``, which sees only addresses in memory.

``CPUOPT_PERF_MAP=1`` writes ``/tmp/perf-PID.map``, which ``perf report`` reads: a line for each function of a loaded
kernel. ``CPUOPT_PERF_MAP=jitdump`` also writes ``/tmp/jit-PID.dump``, with machine code and lines of source, for
``perf inject --jit`` and ``perf annotate``. The kernels are then compiled with line tables, under cache entries of
their own; the instructions are the same.

Source: perf's ``jitdump-specification.txt`` and ``jit-interface.txt``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import BinaryIO

from ...errors import UserError
from . import entries
from .objects import Function, functions

VARIABLE = "CPUOPT_PERF_MAP"
MODES = ("", "0", "1", "jitdump")
MODE = os.environ.get(VARIABLE, "")
FOLDER = Path("/tmp")
MAGIC, VERSION, HEADER = 0x4A695444, 1, 40
CODE_LOAD, CODE_DEBUG_INFO = 0, 2
MACHINES = {"x86_64": 62, "aarch64": 183}
"""The numbers of processors in ELF."""
PART = re.compile(r"(\d+)")
LOOP, WRAPPERS = "__gufunc__.", {"_ZN7cpython": "python", "cfunc.": "c"}
"""How numba marks the function around a parallel loop, and those by which others call a kernel."""


def checked() -> str:
    """Return the mode.

    Raises
    ------
    UserError
        For another value of the variable.
    """
    if MODE not in MODES:
        raise UserError(f"{VARIABLE}={MODE}: expected 1, or jitdump for lines of source too")
    return MODE.strip("0")


def with_lines() -> bool:
    """Return whether kernels are compiled with line tables."""
    return checked() == "jitdump"


def short(symbol: str) -> str:
    """Return the name of the function in numba's symbol, as in ``pack_tokens``; ``loop`` for a parallel loop."""
    for start, name in WRAPPERS.items():
        if symbol.startswith(start):
            return name
    if "__numba_parfor_gufunc" in symbol:
        return "loop" if symbol.startswith(LOOP) else "body"
    name, rest = symbol, symbol.removeprefix("_ZN")
    while found := PART.match(rest) if symbol.startswith("_ZN") else None:
        start = found.end()
        name, rest = rest[start : start + int(found[1])], rest[start + int(found[1]) :]
    return name


def names(title: str, found: Sequence[Function]) -> list[str]:
    """Name the functions of a kernel: its own has the kernel's name, the others that and their own."""
    many: Counter[str] = Counter()
    given = []
    for f in found:
        name = short(f.symbol)
        many[name] += 1
        again = f".{many[name]}" if many[name] > 1 else ""
        own = f.offset == 0 or name == title.partition("[")[0]
        given.append(title if own and not again else f"{title}:{name}{again}")
    return given


def placed(rows: Sequence[tuple[int, str, int]], code: CodeType) -> list[tuple[int, str, int]]:
    """Return the rows of a line table with whole paths.

    A file beside the kernel's has no folder there, and numba gives the body of a parallel loop a file of its own: its
    lines are the kernel's, and what numba wrote around them has no source.
    """
    first = code.co_firstlineno
    last = max(line or 0 for _, _, line in code.co_lines())
    folder, found = os.path.dirname(code.co_filename), []
    for offset, file, line in rows:
        path = code.co_filename if file.startswith("<") and first < line <= last else os.path.join(folder, file)
        if line and not os.path.basename(path).startswith("<"):
            found.append((offset, path, line))
    return found


def loaded(title: str, code: CodeType, content: bytes, address_of: Callable[[str], int]) -> None:
    """Write down a kernel whose object code is in memory.

    Parameters
    ----------
    title : the name of the kernel.
    code : of the Python function that it was compiled from.
    content : the object file.
    address_of : returns the address of a symbol that other objects may use; 0 for another one.
    """
    if not (mode := checked()):
        return
    found = functions(content)
    bases = {f.section: at - f.offset for f in found if (at := address_of(f.symbol))}
    found = [f for f in found if f.section in bases]
    try:
        writer = _Writers.of_this_process(mode)
    except OSError as e:
        entries.warn(f"{VARIABLE}={MODE}: {e.filename or FOLDER}: {e.strerror or e}; perf will not name kernels")
        return
    for name, f in zip(names(title, found), found, strict=True):
        writer.add(name, replace(f, lines=placed(f.lines, code)), bases[f.section])


class _Writers:
    """The files of a process."""

    _mine: tuple[int, _Writers] | None = None

    def __init__(self, mode: str) -> None:
        pid = os.getpid()
        self.map = _opened(FOLDER / f"perf-{pid}.map")
        self.dump = Dump(_opened(FOLDER / f"jit-{pid}.dump"), pid) if mode == "jitdump" else None

    @classmethod
    def of_this_process(cls, mode: str) -> _Writers:
        """Return those of this process, which may be a fork of another."""
        if cls._mine is None or cls._mine[0] != os.getpid():
            cls._mine = os.getpid(), cls(mode)
        return cls._mine[1]

    def add(self, name: str, f: Function, base: int) -> None:
        """Write down one function."""
        at = base + f.offset
        self.map.write(f"{at:x} {f.size:x} {name}\n".encode())
        self.map.flush()
        if self.dump:
            self.dump.add(name, at, f.size, [(base + offset, file, line) for offset, file, line in f.lines])


def _opened(path: Path) -> BinaryIO:
    """Open a new file for reading and writing; one of this user's from an earlier process is replaced."""
    try:
        old = os.lstat(path)
        if old.st_uid == os.getuid() and stat.S_ISREG(old.st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w+b")


class Dump:
    """A jitdump file. perf finds it by an executable mapping of its first page."""

    def __init__(self, file: BinaryIO, pid: int) -> None:
        self.file, self.pid, self.count = file, pid, 0
        machine = MACHINES.get(platform.machine(), 0)
        file.write(struct.pack("<IIIIIIQQ", MAGIC, VERSION, HEADER, machine, 0, pid, time.monotonic_ns(), 0))
        file.flush()
        self.marker = mmap.mmap(file.fileno(), HEADER, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)

    def add(self, name: str, at: int, size: int, lines: Sequence[tuple[int, str, int]]) -> None:
        """Write the lines of a function, then its machine code, which comes after them."""
        if lines:
            rows = b"".join(struct.pack("<QII", a, line, 0) + file.encode() + b"\0" for a, file, line in lines)
            self._record(CODE_DEBUG_INFO, struct.pack("<QQ", at, len(lines)) + rows)
        head = struct.pack("<IIQQQQ", self.pid, self.pid, at, at, size, self.count)
        self._record(CODE_LOAD, head + name.encode() + b"\0" + ctypes.string_at(at, size))
        self.count += 1
        self.file.flush()

    def _record(self, kind: int, body: bytes) -> None:
        self.file.write(struct.pack("<IIQ", kind, 16 + len(body), time.monotonic_ns()) + body)
