"""Kernels in a process of their own: a crash or a hang ends that process, not the tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import realpath
from types import TracebackType
from typing import Any

from ..errors import UNCHECKED, RefusedError, UserError
from .process import GRACE_S, EndedError, Side, Worker

LIMIT_S = 120.0
"""Seconds that one answer may take, compilation included."""
ENDED = "ended, because a newer request replaces it"


class Child:
    """A process that has loaded some kernel files, started at the first request, and again after a failure.

    Parameters
    ----------
    module : the module of the worker, which answers ``load`` and the other requests.
    kernels : files to load.
    threads : the number of threads with which numba starts.
    limit_s : the seconds of one answer after which the process is ended, as ``--limit`` gives them; else `LIMIT_S`.
    say : called with progress.

    Attributes
    ----------
    files : the files that it has loaded, with those beside them that they import.
    """

    def __init__(
        self,
        module: str,
        kernels: Sequence[str] = (),
        threads: int = 1,
        limit_s: float | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.module, self.given = module, [str(k) for k in kernels]
        self.kernels, self.limit_s, self.say = [realpath(k) for k in kernels], limit_s or LIMIT_S, say
        self.side = Side.module("kernel's process", module, NUMBA_NUM_THREADS=str(threads))
        self.added: list[dict[str, str]] = []
        self.files: list[str] = []
        self.ended, self.hint = False, "; --limit gives it more time" if limit_s else ""
        self.doing = ""
        self._worker: Worker | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close(GRACE_S if kind is None else 0.0)

    def close(self, grace_s: float = 0.0) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker:
            worker.close(grace_s)

    def cpu_s(self) -> float:
        """The processor time that it has used; 0 if it does not run."""
        return self._worker.cpu_s() if self._worker else 0.0

    def end(self) -> None:
        """End the process for good, from any thread; waiting and later requests get a `UserError`."""
        self.ended = True
        if worker := self._worker:
            worker.kill()

    def start(self) -> list[dict[str, str]]:
        """Start it, if it does not run, and return the kernels that its files registered.

        Raises
        ------
        UserError
            If a file is missing; a `RefusedError` if it cannot be loaded.
        """
        if self._worker is None:
            if not self.ended:
                self._worker = Worker(self.side, self._hear, self.limit_s)
            if self.ended:  # perhaps in between
                self.close()
                raise UserError(ENDED)
            self.added, self.files = [], []
            for file in self.given:
                answer = self._ask("load", f"--kernels {file}: ", kernels=[file])
                self.added += answer["added"]
                self.files += answer["files"]
        return self.added

    def _hear(self, text: str) -> None:
        self.doing = text
        self.say(text)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; the process is ended if there is none.

        Raises
        ------
        UserError
            For a wrong request; a `RefusedError` for a kernel that crashes the process or does not end.
        """
        self.start()
        variants = more.get("variants") or [more["variant"]] if "variant" in more or "variants" in more else []
        who = f"{more['op']}[{' or '.join(variants)}]: " if variants and do != "check" else ""
        return self._ask(do, who, **more)

    def _ask(self, do: str, who: str, **more: Any) -> dict[str, Any]:
        """Send a request; an error names `who` if the process ends."""
        self.doing = ""
        try:
            assert self._worker
            return self._worker.ask(do, **more)
        except BaseException as e:
            self.close()
            if self.ended and isinstance(e, Exception):  # `end` did it: the exception says nothing about the kernel
                raise UserError(ENDED) from e
            if isinstance(e, UserError):
                message = str(e).removeprefix(f"{self.side.name}: ")
                if isinstance(e, EndedError):
                    while_ = f" ({self.doing})" if self.doing else ""
                    said = f"{message}{self.hint}" if e.word == UNCHECKED else f"its process {message}{while_}"
                    raise RefusedError(f"{who}{said}", e.word) from e
                e.args = (message,)
            raise
