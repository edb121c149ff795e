"""Names of kernels for Linux ``perf``, which sees only addresses in memory.

``CPUOPT_PERF_MAP=1`` writes ``/tmp/perf-PID.map``, which ``perf report`` reads: a line for each function of a loaded
kernel.

Source: perf's ``jit-interface.txt``; the ELF-64 format of the System V ABI.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import UserError
from . import entries

VARIABLE = "CPUOPT_PERF_MAP"
MODE = os.environ.get(VARIABLE, "")
FOLDER = Path("/tmp")
PART = re.compile(r"(\d+)")
LOOP, WRAPPERS = "__gufunc__.", {"_ZN7cpython": "python", "cfunc.": "c"}
"""How numba marks the function around a parallel loop, and those by which others call a kernel."""
SYMTAB, EXECUTABLE, FUNCTION = 2, 4, 2
"""The type of a section of symbols, the flag of one with code, and the type of a symbol that is a function."""
UNDEFINED, RESERVED = 0, 0xFF00
"""The section of a symbol from elsewhere, and the first number that is no section."""


@dataclass(frozen=True)
class Function:
    """A function of an object file: its symbol, and its bytes in a section of code."""

    symbol: str
    section: int
    offset: int
    size: int


def functions(content: bytes) -> list[Function]:
    """List the functions that a little-endian ELF-64 file defines, by section and offset; none of another file."""
    if content[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count = struct.unpack_from("<Q10xHH", content, 0x28)
    heads = [struct.unpack_from("<IIQQQQI", content, start + i * size) for i in range(count)]
    found = []
    for _, type_, _, _, at, length, link in heads:
        if type_ != SYMTAB:
            continue
        texts = heads[link][4]
        for name, info, _, section, value, n in struct.iter_unpack("<IBBHQQ", content[at : at + length]):
            if info & 15 == FUNCTION and UNDEFINED < section < RESERVED and heads[section][2] & EXECUTABLE and n:
                symbol = content[texts + name : content.index(0, texts + name)].decode("utf-8", "replace")
                found.append(Function(symbol, section, value, n))
    return sorted(found, key=lambda f: (f.section, f.offset))


def checked() -> bool:
    """Return whether to write the map.

    Raises
    ------
    UserError
        For another value of the variable.
    """
    if MODE not in ("", "0", "1"):
        raise UserError(f"{VARIABLE}={MODE}: expected 1, or nothing")
    return MODE == "1"


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


def loaded(title: str, content: bytes, address_of: Callable[[str], int]) -> None:
    """Write down a kernel whose object code is in memory.

    Parameters
    ----------
    title : the name of the kernel.
    content : the object file.
    address_of : returns the address of a symbol that other objects may use; 0 for another one.
    """
    if not checked():
        return
    found = functions(content)
    bases = {f.section: at - f.offset for f in found if (at := address_of(f.symbol))}
    found = [f for f in found if f.section in bases]
    try:
        file = _map_of_this_process()
    except OSError as e:
        entries.warn(f"{VARIABLE}={MODE}: {e.filename or FOLDER}: {e.strerror or e}; perf will not name kernels")
        return
    for name, f in zip(names(title, found), found, strict=True):
        file.write(f"{bases[f.section] + f.offset:x} {f.size:x} {name}\n".encode())
    file.flush()


_maps: dict[int, BinaryIO] = {}
"""The open map of this process, by its id; a fork of another has that one's too."""


def _map_of_this_process() -> BinaryIO:
    pid = os.getpid()
    if pid not in _maps:
        _maps[pid] = _opened(FOLDER / f"perf-{pid}.map")
    return _maps[pid]


def _opened(path: Path) -> BinaryIO:
    """Open a new file for writing; one of this user's from an earlier process is replaced."""
    try:
        old = os.lstat(path)
        if old.st_uid == os.getuid() and stat.S_ISREG(old.st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")


checked()  # a wrong value is refused before any kernel is compiled
