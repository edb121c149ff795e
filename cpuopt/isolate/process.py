"""A worker process, seen by its parent: requests and answers are JSON lines.

A worker blocks on its stdin when it has nothing to do, so it costs the one that works no time, and ends when its stdin
closes, so it does not outlive its parent.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from types import FrameType, TracebackType
from typing import Any

import psutil

from ..errors import UserError

PHASES = ("forward", "backward", "update")
LIMIT_S = 1800.0
"""How long one answer may take; compiling is part of the first."""
GRACE_S = 10.0
"""How long a worker may take to end by itself."""
LONGEST = 1 << 24
"""Bytes of an answer, beyond which it is none."""


@dataclass(frozen=True)
class Side:
    """What is measured: a program that speaks the protocol, and what it is told at the start.

    Attributes
    ----------
    name : in tables and errors.
    command : that starts it.
    settings : sent with ``init``, besides what all sides are told.
    environment : added to this process's own.
    """

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Steps:
    """Training steps in the order in which they ran: ms each, ms of each phase, the loss before each update."""

    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})

    def add(self, more: Steps) -> None:
        """Append the steps of a later turn."""
        self.step_ms += more.step_ms
        self.losses += more.losses
        for p in PHASES:
            self.phases_ms[p] += more.phases_ms[p]


class Worker:
    """A running side. Leaving the ``with`` block ends it, by force where it does not end by itself.

    Parameters
    ----------
    side : what to start.
    say : hears what the worker does during a long request.
    limit_s : how long one answer may take.

    Raises
    ------
    UserError
        From here and from every request: for a program that cannot be started, that reports a mistake, dies, does not
        answer in time, or answers something else.
    """

    def __init__(self, side: Side, say: Callable[[str], None] = lambda text: None, limit_s: float = LIMIT_S) -> None:
        self.side, self.say, self.limit_s = side, say, limit_s
        self._buffer = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        try:
            self._process = subprocess.Popen(
                side.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env={**os.environ, **side.environment},
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as e:
            self._stderr.close()
            raise UserError(f"{side.name}: {side.command[0]!r} cannot be started: {e.strerror or e}") from e

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close(GRACE_S if kind is None else 0.0)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor time that it has used; 0 where it is gone."""
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the process: by closing its stdin, and after `grace_s` by force."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(grace_s) if grace_s else None
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            process.wait()
            process.stdout.close()
            self._stderr.close()

    def kill(self) -> None:
        """End the process by force, from any thread; who waits for its answer learns of it and closes the pipes."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + self.limit_s
        try:
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        except BrokenPipeError:
            raise self._died(do) from None
        while True:
            line = self._line(do, deadline)
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            if not isinstance(answer, dict):
                shown = line[:60].decode(errors="replace")
                raise UserError(f"{self.side.name}: answered {shown!r} to '{do}'; expected a JSON object on one line")
            if "error" in answer:
                raise UserError(f"{self.side.name}: {_one_line(str(answer['error']))}")
            if "progress" not in answer:
                return answer
            self.say(str(answer["progress"]))

    def steps(self, n: int) -> Steps:
        """Let it train for n steps."""
        answer = self.ask("steps", n=n)
        try:
            phases = {p: _numbers(answer["phases_ms"][p], n) for p in PHASES}
            steps = Steps(_numbers(answer["step_ms"], n), _numbers(answer["losses"], n), phases)
            if not all(isfinite(ms) and ms > 0 for ms in steps.step_ms):
                raise ValueError("a step took no time")
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{self.side.name}: the answer to 'steps' is wrong ({type(e).__name__}: {e}); "
                f"expected step_ms, losses, and phases_ms of {', '.join(PHASES)}, {n} of each"
            ) from e
        return steps

    def peak(self) -> dict[str, Any]:
        """Ask for the most memory that it has held, ``peak_rss_mb``, and what else it has to say at its end."""
        answer = self.ask("peak")
        if not isinstance(answer.get("peak_rss_mb"), int | float):
            raise UserError(f"{self.side.name}: the answer to 'peak' is {answer}; expected a number peak_rss_mb")
        return answer

    def _line(self, do: str, deadline: float) -> bytes:
        """Read up to the next newline."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise UserError(f"{self.side.name}: no answer to '{do}' within {self.limit_s:g} s; it was ended")
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    raise self._died(do)
                self._buffer += more
                if len(self._buffer) > LONGEST:
                    raise UserError(f"{self.side.name}: the answer to '{do}' is longer than {LONGEST} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self, do: str) -> UserError:
        """Say how the process ended, and its last words."""
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            how = "closed its stdout"
        else:
            how = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
            how += ", perhaps because memory ran out," if status == -signal.SIGKILL else ""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = f": {_one_line(lines[-1])}" if lines else ""
        return UserError(f"{self.side.name}: {how} during '{do}'{last}")


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:500]


def _numbers(values: Any, n: int) -> list[float]:
    """Check that `values` is a list of n numbers."""
    if not isinstance(values, list) or len(values) != n:
        raise ValueError(f"not a list of {n}")
    return [float(v) for v in values]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that workers and temporary files go with this process."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for what the first began
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
