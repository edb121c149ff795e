"""Kernels that run in the sandbox, seen from the judge: each is a `lab.remote.Far`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ..errors import COMPILE_ERROR, WRONG, RefusedError, UserError
from ..isolate import process
from ..isolate.process import EndedError, Side, Worker
from ..kernels import registry
from ..kernels.registry import Kernel
from ..lab.remote import ROOM, Far, KernelProcess, Shared
from ..ops.declaration import Op
from . import child

BWRAP = tuple(
    "bwrap --ro-bind / / --dev /dev --proc /proc --unshare-all --die-with-parent --cap-drop ALL".split()  # noqa: SIM905
)
LIMIT_S = 60.0
"""Seconds that one answer about a candidate may take, compilation included."""
OWN_S = process.LIMIT_S
"""Seconds that one answer may take while the package itself works: it starts, compiles its kernel, builds a model."""


@cache
def bwrap() -> bool:
    """Return whether this machine has bwrap, and it may do its work."""
    if not shutil.which(BWRAP[0]):
        return False
    return subprocess.run([*BWRAP, "true"], capture_output=True, timeout=20).returncode == 0


class Remote(KernelProcess):
    """The sandbox, and the candidate that it has, if any.

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
                raise UserError(f"the sandbox does not start: {e}") from e

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
                    own = registry.find(op.name, str(about["A"]["variant"]))
                    return self.kernel(op, "B", about["B"]), self.kernel(op, "A", about["A"], own)
                self._open = False
                raise RefusedError(f"the candidate: its process ended by {about['ended']} while it was loaded")
            except RefusedError as e:
                self.close()
                if self._loading or self.late:
                    raise
                why = str(e)
        raise UserError(f"the sandbox loads no text: {why}")

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
            word = COMPILE_ERROR if do in ("open", "compile", "work") else WRONG
            raise RefusedError(said, getattr(e, "word", word)) from e

    def close(self) -> None:
        """End the candidate, and keep the process for the next one."""
        if self._worker and self._open:
            self._open = False
            with suppress(RefusedError):
                self._asked("done", process.GRACE_S)
