"""Kernels that run in the closed process, seen from the judge: they take arrays, as any kernel does.

All that checks and times kernels here works on them unchanged. Their arrays lie in memory that both processes share, so
nothing is copied, and what they must become stays in this process.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from ..check.cases import Array
from ..errors import CHEATING, COMPILE_ERROR, UNCHECKED, WRONG, RefusedError, UserError
from ..isolate import process
from ..isolate.process import EndedError, LateError, Side, Worker
from ..kernels import registry
from ..kernels.registry import Kernel, Scratch
from ..kernels.toolkit import threads as numba_threads
from ..machine import available_bytes
from ..ops.declaration import Op
from . import child

ROOM = 16 << 30
"""Bytes of address space of the shared memory; only what is written takes memory."""
MUCH = 1 << 29
"""Bytes of arrays from which on it is asked whether the machine has memory for them."""
BWRAP = tuple(
    "bwrap --ro-bind / / --dev /dev --proc /proc --unshare-all --die-with-parent --cap-drop ALL".split()  # noqa: SIM905
)
LIMIT_S = 60.0
"""Seconds that one answer about a candidate may take, compilation included."""
OWN_S = process.LIMIT_S
"""Seconds that one answer may take while the package itself works: it starts, compiles its kernel, builds a model."""


class Shared:
    """Memory that the judge and the closed process see, and the free parts of it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("cpuopt-judge")
        os.ftruncate(self.descriptor, ROOM)
        self.map = mmap.mmap(self.descriptor, ROOM)
        self.free = [(0, ROOM)]
        whole = np.frombuffer(self.map, np.uint8)
        self.start = int(whole.__array_interface__["data"][0])
        self.whole = whole

    def room(self, words: int) -> Array:
        """Return so many words of it, which are free again once no array refers to them.

        Raises
        ------
        RefusedError
            If they are not there, or the machine has no memory for them.
        """
        need = -(-4 * words // mmap.PAGESIZE) * mmap.PAGESIZE
        most = ROOM if need < MUCH else min(ROOM, available_bytes())
        for i, (at, size) in enumerate(self.free):
            if most >= need and size >= need:
                self.free[i : i + 1] = [(at + need, size - need)] if size > need else []
                found = np.ndarray((words,), np.uint32, self.map, at)
                weakref.finalize(found, self._release, at, need)
                return found
        raise RefusedError(
            f"needs {need >> 20:,} MB for the arrays of its calls and their scratch; expected up to {most >> 20:,} MB"
        )

    def _release(self, at: int, size: int) -> None:
        parts = sorted([*self.free, (at, size)])
        self.free = parts[:1]
        for start, length in parts[1:]:
            before, held = self.free[-1]
            if before + held == start:
                self.free[-1] = before, held + length
            else:
                self.free.append((start, length))

    def spec(self, x: Any) -> Any:
        """Return an argument for a request: a number, or where an array lies."""
        if not isinstance(x, np.ndarray):
            return x.item() if isinstance(x, np.generic) else x
        at = int(x.__array_interface__["data"][0]) - self.start
        if x.size and not 0 <= at <= ROOM - x.nbytes:
            raise UserError("an array of a call does not lie in the shared memory")
        return {"at": at if x.size else 0, "shape": x.shape, "type": x.dtype.name}


@cache
def bwrap() -> bool:
    """Return whether this machine has bwrap, and it may do its work."""
    if not shutil.which(BWRAP[0]):
        return False
    return subprocess.run([*BWRAP, "true"], capture_output=True, timeout=20).returncode == 0


Clocks = list[tuple[float, float]]
"""The ns of batches by the process, and by the judge."""


@dataclass(eq=False)
class Far:
    """A kernel's function that runs in the closed process."""

    remote: Remote
    side: str
    types: Mapping[str, str] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=list)
    """Both clocks of each sample."""
    long: Clocks = field(default_factory=list)
    """Both clocks of batches that last."""
    code: str = ""
    """The digest of its machine code, once it is compiled."""
    fenced: str = ""
    """``end`` or ``begin``: where the arrays of a call stand, at inaccessible pages; empty for where they lie."""
    known: dict[tuple[int, ...], tuple[int, Any]] = field(default_factory=dict)

    def __call__(self, *args: Any) -> None:
        """Call it once, on arrays in the shared memory."""
        more: dict[str, Any] = {"fenced": self.fenced} if self.fenced else {}
        specs = [self.remote.shared.spec(x) for x in args]
        self.remote.ask("call", self, args=specs, threads=numba_threads.get_threads(), **more)

    def batch(self, every: Sequence[Sequence[Any]], times: int = 1) -> tuple[float, float]:
        """Call it with each of some arguments, some times in a row.

        Returns
        -------
        The ns that all took by the clock of the process, and those for which its threads waited for a core meanwhile.
        """
        key, more = tuple(map(id, every)), dict[str, Any]()
        if key not in self.known:
            self.known[key] = len(self.known) * 2 + (self.side == "B"), every  # held, so that no id comes again
            more = {"calls": [[self.remote.shared.spec(x) for x in args] for args in every]}
        asked = {"key": self.known[key][0], "times": times, "threads": numba_threads.get_threads(), **more}
        start = time.perf_counter_ns()
        answer = self.remote.ask("batch", self, **asked)
        outside = time.perf_counter_ns() - start
        ns, waited = answer.get("ns"), answer.get("waited")
        if not isinstance(ns, int) or not isinstance(waited, int) or ns <= 0:
            raise RefusedError(f"told a time of {ns!r}", CHEATING)
        if not more:
            (self.clocks if times == 1 else self.long).append((float(ns), float(outside)))
        return float(ns), float(waited)


class Remote:
    """The closed process, and the candidate that it has, if any.

    Parameters
    ----------
    threads : the number of threads with which numba starts there.
    files : kernel files of who asks, which declare ops.

    Attributes
    ----------
    by : what closes it: ``bwrap`` or ``namespaces``.
    missing : what does not close it on this system.
    late : whether a request of the last `within` found no time left.
    """

    def __init__(self, threads: int, files: Sequence[str] = ()) -> None:
        self.shared, self.limit_s = Shared(), LIMIT_S
        self.deadline, self.late = inf, False
        self.by = "bwrap" if bwrap() else "namespaces"
        side = Side.module("candidate", child.__name__, NUMBA_NUM_THREADS=str(threads))
        more = {child.SHARED: f"{self.shared.descriptor} {ROOM}", child.CLOSED: "1" * bwrap()}
        more[child.FILES] = json.dumps([os.path.abspath(file) for file in files])
        command = (*BWRAP, *side.command) if bwrap() else side.command
        environment = {**side.environment, **more}
        self.side = Side("candidate", command, {}, environment, (self.shared.descriptor,))
        self.missing: list[str] = []
        self.file = Path()
        self._worker: Worker | None = None
        self._open = self._loading = False
        self.folder = tempfile.TemporaryDirectory(prefix="cpuopt-judge-")

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *why: object) -> None:
        self.end()
        self.folder.cleanup()
        os.close(self.shared.descriptor)

    @contextmanager
    def within(self, seconds: float, each: float | None = None) -> Iterator[None]:
        """Limit the seconds of all requests of a block together, and of each; later ones are refused."""
        usual = self.limit_s
        self.deadline, self.limit_s, self.late = time.monotonic() + seconds, each or usual, False
        try:
            yield
        finally:
            self.deadline, self.limit_s = inf, usual

    def start(self) -> None:
        """Start the process, if it does not run; raise `UserError` if it cannot."""
        if self._worker is None:
            self._worker = Worker(self.side, self._hear)
            try:
                self.missing = [str(x) for x in self._asked("ready", OWN_S)["missing"]]
            except RefusedError as e:
                raise UserError(f"the closed process does not start: {e}") from e

    def _hear(self, progress: str) -> None:
        self._loading = True

    def end(self) -> None:
        """End the process."""
        worker, self._worker, self._open = self._worker, None, False
        if worker:
            worker.close(0)

    def open(self, text: str, op: Op, against: str) -> tuple[Kernel, Kernel]:
        """Load a candidate in a process of its own; return it and the kernel that it is compared with.

        A process that ended before it read the text is replaced once: others may have ended it since the last one.

        Raises
        ------
        RefusedError
            If it cannot be loaded, or the process ended meanwhile or did not answer in time.
        UserError
            If there is no process that begins to load it.
        """
        self.close()
        self.file = Path(self.folder.name) / f"candidate_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
        self.file.write_text(text, encoding="utf-8")
        for _ in range(2):
            self.start()
            self._open, self._loading = True, False
            try:
                about = self._asked("open", self.limit_s, file=str(self.file), op=op.name, against=against)
                if "ended" not in about:
                    self.missing = [str(x) for x in about["missing"]]
                    return self.kernel(op, "B", about["B"]), self.kernel(op, "A", about["A"])
                self._open = False
                raise RefusedError(f"the candidate: its process ended by {about['ended']} while it was loaded")
            except RefusedError as e:
                self.close()
                if self._loading or self.late:
                    raise
                why = str(e)
        raise UserError(f"the closed process loads no text: {why}")

    def kernel(self, op: Op, side: str, about: Mapping[str, Any]) -> Kernel:
        """Return a kernel of the process."""
        function = Far(self, side)
        own = registry.find(op.name, str(about["variant"])) if side == "A" else None

        def elements(i: int) -> Callable[[Mapping[str, int]], int]:
            return lambda sizes: int(self.ask("work", function, sizes=dict(sizes))["elements"][i])

        return Kernel(
            op,
            str(about["variant"]),
            function,
            tuple(Scratch(str(name), elements(i), str(dtype)) for i, (name, dtype) in enumerate(about["scratch"])),
            make=lambda types: self.compile(function, types, own),
            where=str(about["where"]),
            same_bits=bool(about["same_bits"]),
            narrow=bool(about["narrow"]),
            skips=tuple(map(str, about["skips"])),
        )

    def compile(self, function: Far, types: Mapping[str, str], own: Kernel | None = None) -> None:
        """Compile a kernel for some types; it is called with these from now on.

        Parameters
        ----------
        own : if it is the package's: it is compiled here first, for the cache, where the closed process cannot write.
        """
        function.types = dict(types)
        if own:
            own.of(types).compile()
        limit_s = OWN_S if own else self.limit_s
        function.code = str(self.ask("compile", function, limit_s=limit_s).get("code", ""))

    def ask(self, do: str, function: Far, limit_s: float | None = None, **more: Any) -> dict[str, Any]:
        """Send a request about a kernel.

        Raises
        ------
        RefusedError
            If the process refuses it, ended, or does not answer in time.
        """
        if not (self._worker and self._open):
            raise RefusedError("its process has ended")
        answer = self._asked(do, limit_s or self.limit_s, side=function.side, types=dict(function.types), **more)
        if "ended" in answer:
            self._open = False
            doing = self._worker._where()
            raise RefusedError(f"its process ended by {answer['ended']}{doing}")
        return answer

    def _asked(self, do: str, limit_s: float, **more: Any) -> dict[str, Any]:
        """Send a request, whose answer may take so many seconds, or those left; errors are those of `ask`."""
        assert self._worker
        self._worker.limit_s = max(0.0, min(limit_s, self.deadline - time.monotonic()))
        try:
            return self._worker.ask(do, **more)
        except UserError as e:
            said = str(e).removeprefix("candidate: ").replace(str(self.file), "the candidate")
            if isinstance(e, EndedError):
                self.late |= time.monotonic() >= self.deadline
                self.end()
                raise RefusedError(said, UNCHECKED if isinstance(e, LateError) else WRONG) from e
            word = COMPILE_ERROR if do in ("open", "compile", "work") else WRONG
            raise RefusedError(said, getattr(e, "word", word)) from e

    def close(self) -> None:
        """End the candidate, and keep the process for the next one."""
        if self._worker and self._open:
            self._open = False
            with suppress(RefusedError):
                self._asked("done", process.GRACE_S)
