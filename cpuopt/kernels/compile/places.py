"""Where an address in running code lies: in which kernel's code and on which line of source, or in which library.

A kernel's code has no line table, and it is not compiled again to get one. A process of its own compiles a copy with
lines, which are used for each function that is, byte for byte, the one that runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_char_p, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...isolate.process import Side, Worker
from ..registry import Kernel
from ..toolkit.threads import cores
from . import cache, entries, jit, perf
from .line_table import Chain

WAITING = re.compile(r"lib[gi]?omp|libtbb|omppool|tbbpool|workqueue|sched_yield|futex")
"""Libraries and functions in which threads wait for work."""
LIBRARIES = {r"libm[-.]": "math functions (libm)", "libsvml|svml": "math functions (SVML)", "libc[-.]": "libc"}
MEMORY = ("memcpy", "memmove", "memset", "memcmp")
SPAN = 2048
"""Bytes of machine code of one of these functions, at most."""
ELSEWHERE = "numba's code around kernels"
LIMIT_S, SEEDS = 600.0, 4


@dataclass(frozen=True)
class CodePart:
    """A function of a kernel's machine code in memory: where it begins, its name, and the digest of its bytes."""

    start: int
    size: int
    kernel: Kernel
    name: str
    digest: str


class KernelCode:
    """The machine code of kernels, as this process runs it; Python functions have none."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.parts: list[CodePart] = []
        for k in kernels:
            if jit.code_digest(k):
                for start, f in cache.code_in_memory(k.function, jit.signature_of(k)):
                    self.parts.append(CodePart(start, f.size, k, perf.short(f.symbol), f.digest))
        self.parts.sort(key=lambda part: part.start)
        self._starts = [part.start for part in self.parts]

    def find(self, address: int) -> CodePart | None:
        """Return the function that holds an address."""
        i = bisect_right(self._starts, address) - 1
        return self.parts[i] if i >= 0 and address < self.parts[i].start + self.parts[i].size else None


class LineTable:
    """The lines of a kernel's machine code, function by function."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.functions: Mapping[str, list[tuple[int, int]]] = content.get("functions", {})
        self.chains: list[Chain] = [tuple((file, line) for file, line in chain) for chain in content.get("chains", [])]

    def find(self, part: CodePart, address: int) -> Chain:
        """Return the chain of an instruction; empty if its line is unknown."""
        pairs = self.functions.get(part.digest, [])
        i = bisect_right(pairs, address - part.start, key=lambda pair: pair[0]) - 1
        return self.chains[pairs[i][1]] if i >= 0 else ()


def line_tables(kernels: Sequence[Kernel]) -> dict[Kernel, LineTable]:
    """Return the tables of kernels, compiled if they are not in the cache; a kernel of a script has none."""
    from .. import ADDED

    folder, found = entries.folder_in_use(), dict[Kernel, LineTable]()
    for k in kernels:
        payload = entries.read(folder, _key(k)) if folder else None
        content = json.loads(payload) if payload else {}
        if content and all(_digest(file) == known for file, known in content["files"].items()):
            found[k] = LineTable(content)
    missing = [k for k in kernels if k not in found]
    files = sorted({k.file for k in missing if (k.op.name, k.variant) in ADDED})

    def answered(k: Kernel) -> dict[str, Any]:
        with suppress(UserError):  # a kernel of a script cannot be loaded again
            return inspected(k.op.name, k.variant, files, k.types, code=jit.code_digest(k))
        return {"source": {"file": ""}, "functions": {}, "chains": []}

    with ThreadPoolExecutor(cores()) as pool:
        for k, answer in zip(missing, pool.map(answered, missing), strict=True):
            here, there = _file(k), answer["source"]["file"]  # a generated file lies in the folder of the cache
            chains = [[(here if file == there else file, line) for file, line in c] for c in answer["chains"]]
            used = sorted({file for chain in chains for file, _ in chain})
            content = {"functions": answer["functions"], "chains": chains, "files": {f: _digest(f) for f in used}}
            found[k] = LineTable(content)
            if folder and chains:
                entries.write(folder, _key(k), json.dumps(content).encode())
    return found


def inspected(
    op: str,
    variant: str,
    files: Sequence[object],
    types: Mapping[str, str] | None = None,
    level: int = 0,
    code: str = "",
) -> dict[str, Any]:
    """Compile a kernel with lines in a process of its own; return the answer of `inspection.inspect`.

    numba counts references in an order that follows from Python's hashes of texts. So a kernel can have several codes,
    and up to `SEEDS` seeds of the hash are tried until the code is the one that runs.

    Parameters
    ----------
    files : users' kernel files to load.
    types : those of the arguments that do not have their usual one.
    level : of numba's diagnostics of parallel loops; 0: none.
    code : the digest of the code that runs; empty if it is unknown.

    Raises
    ------
    UserError
        For a kernel that does not compile.
    """
    asked = {"op": op, "variant": variant, "types": dict(types or {}), "level": level, "kernels": [*map(str, files)]}
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory(prefix="cpuopt-lines-") as folder:
            where = {"CPUOPT_CACHE_DIR": folder, "PYTHONHASHSEED": str(seed)}
            with Worker(Side.module("compiler", "cpuopt.kernels.compile.inspection", **where), limit_s=LIMIT_S) as one:
                answer: dict[str, Any] = one.ask("inspect", **asked)
        if not code or answer["code"] in ("", code):
            break
    return answer


def _file(kernel: Kernel) -> str:
    return str(kernel.function.py_func.__code__.co_filename)  # type: ignore[attr-defined]


def _key(kernel: Kernel) -> str:
    place = hashlib.sha256(_file(kernel).encode()).hexdigest()[:16]  # the same text elsewhere has the same code
    return f"lines3-{kernel.op.name}-{jit.code_digest(kernel)}-{place}-{_digest(_file(kernel))}"


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


class _Symbol(ctypes.Structure):
    _fields_ = (("file", c_char_p), ("base", c_void_p), ("name", c_char_p), ("at", c_void_p))


def library(address: int) -> str:
    """Name the code outside of kernels that holds an address, as a row of a table."""
    libc, symbol = ctypes.CDLL(None), _Symbol()
    starts = [ctypes.cast(getattr(libc, name), c_void_p).value or 0 for name in MEMORY]
    if any(start <= address < start + SPAN for start in starts):
        return "memory functions (libc)"
    if not libc.dladdr(c_void_p(address), ctypes.byref(symbol)):
        return ELSEWHERE
    path, name = os.fsdecode(symbol.file or b""), os.fsdecode(symbol.name or b"")
    file = os.path.basename(path)
    if found := WAITING.search(name) or WAITING.search(file):
        return f"waiting ({found[0] if found.string == name else file.partition('.')[0].partition('-')[0]})"
    if "python" in file and ".cpython-" not in file:
        return "Python"
    return next((title for pattern, title in LIBRARIES.items() if re.match(pattern, file)), file.partition(".")[0])
