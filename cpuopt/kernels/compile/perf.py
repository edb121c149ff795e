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
from typing import BinaryIO, NamedTuple

from ...errors import UserError
from . import entries
from .dependencies import sha

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
    """A function of an object file: its symbol, its bytes in a section, and the digest of these."""

    symbol: str
    section: int
    offset: int
    size: int
    digest: str = ""


class ObjectSection(NamedTuple):
    """A section of an object file: numbers of its header, in the order of the format."""

    name: int
    type: int
    flags: int
    address: int
    at: int
    size: int
    link: int
    info: int


class Symbol(NamedTuple):
    """A symbol of an object file."""

    name: str
    info: int
    section: int
    value: int
    size: int


def sections(content: bytes) -> list[ObjectSection]:
    """List the sections of a little-endian ELF-64 file; none of another file."""
    if content[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count = struct.unpack_from("<Q10xHH", content, 0x28)
    return [ObjectSection(*struct.unpack_from("<IIQQQQII", content, start + i * size)) for i in range(count)]


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(0, at)].decode("utf-8", "replace")


def symbols(content: bytes) -> list[Symbol]:
    """List the symbols of an ELF-64 file in their order."""
    heads, found = sections(content), []
    for head in heads:
        if head.type == SYMTAB:
            texts = heads[head.link].at
            for name, info, _, *rest in struct.iter_unpack("<IBBHQQ", content[head.at : head.at + head.size]):
                found.append(Symbol(_text(content, texts + name), info, *rest))
    return found


def functions(content: bytes) -> list[Function]:
    """List the functions that a little-endian ELF-64 file defines, by section and offset; none of another file."""
    heads, found = sections(content), []
    for s in symbols(content):
        here = UNDEFINED < s.section < RESERVED and s.size > 0
        if here and s.info & 15 == FUNCTION and heads[s.section].flags & EXECUTABLE:
            at = heads[s.section].at + s.value
            digest = sha(content[at : at + s.size])[:16]
            found.append(Function(s.name, s.section, s.value, s.size, digest))
    return sorted(found, key=lambda f: (f.section, f.offset))


def placed(found: Sequence[Function], address_of: Callable[[str], int]) -> list[tuple[int, Function]]:
    """Return the functions of an object file that is in memory, each with its address.

    Parameters
    ----------
    address_of : returns the address of a symbol that other objects may use; 0 for another one.
    """
    bases = {f.section: at - f.offset for f in found if (at := address_of(f.symbol))}
    return [(bases[f.section] + f.offset, f) for f in found if f.section in bases]


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
    found = placed(functions(content), address_of)
    try:
        file = _map_of_this_process()
    except OSError as e:
        entries.warn(f"{VARIABLE}={MODE}: {e.filename or FOLDER}: {e.strerror or e}; perf will not name kernels")
        return
    for name, (at, f) in zip(names(title, [f for _, f in found]), found, strict=True):
        file.write(f"{at:x} {f.size:x} {name}\n".encode())
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
