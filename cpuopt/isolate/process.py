"""A worker process, seen by its parent: requests and answers are JSON lines.

A worker blocks on its stdin when it has nothing to do, so it costs the working process no time, and ends when its stdin
closes, so it does not outlive its parent.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from ..errors import UNCHECKED, WRONG, RefusedError, UserError
from ..wording import one_line
from .serve import DOING
from .serve import LONGEST as WORDS

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("forward", "backward", "update")
LIMIT_S = 1800.0
"""Seconds that one answer may take; the first includes compilation."""
WARNING = re.compile(r"^\s|Warning: ")
"""Lines of stderr that give no reason for the end of a process."""
GRACE_S = 10.0
"""Seconds that a worker may take to end by itself."""
LONGEST = 1 << 24
"""The largest answer in bytes."""

TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""A program that becomes another one, and is killed by Linux when its parent ends, even while it is stopped."""


class EndedError(UserError):
    """A process gives no answers any more: it died, was too late, or answered something else.

    `word` is that of a result: ``wrong``, or ``unchecked`` if there was no answer in time.
    """

    def __init__(self, said: str, word: str = WRONG) -> None:
        super().__init__(said)
        self.word = word


@dataclass(frozen=True)
class Side:
    """A program that speaks the protocol, and its settings.

    Attributes
    ----------
    name : its name in tables and errors.
    command : the command that starts it.
    settings : the settings sent with ``init``, besides those of all sides.
    environment : variables added to those of this process.
    descriptors : open files that it inherits, besides the standard ones.
    """

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()

    @staticmethod
    def module(name: str, module: str, *args: str, **environment: str) -> Side:
        """Return a side that is a module of this package, wherever the package lies."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return Side(name, (sys.executable, "-P", "-m", module, *args), {}, {"PYTHONPATH": path, **environment})


@dataclass
class Steps:
    """Training steps in the order in which they ran: ms each, ms of each phase, the loss before each update.

    `waiting` is how the threads of cpuopt waited for work: ``spin``, ``sleep``, or empty if that is unknown.
    """

    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    waiting: str = ""

    def later(self) -> Steps:
        """Return the times without those of the first step, and all losses."""
        phases = {p: ms[1:] for p, ms in self.phases_ms.items()}
        return Steps(self.step_ms[1:], self.losses, phases, self.waiting)

    def add(self, more: Steps) -> None:
        """Append the steps of a later trial."""
        self.step_ms += more.step_ms
        self.losses += more.losses
        for p in PHASES:
            self.phases_ms[p] += more.phases_ms[p]


class Worker:
    """A running side. Leaving the ``with`` block ends it, by force if it does not end by itself.

    Parameters
    ----------
    side : the program to start.
    say : called with the worker's progress during a long request.
    limit_s : the seconds that one answer may take.
    rests : whether the process is stopped (SIGSTOP) while it has nothing to answer, after its first answer. It then
        ends with this process, however that ends, so that none is left stopped. On Linux only.

    Raises
    ------
    UserError
        From here and from every request: for a program that cannot be started, that reports a mistake, dies, does not
        answer in time, or answers something else.
    """

    def __init__(
        self,
        side: Side,
        say: Callable[[str], None] = lambda text: None,
        limit_s: float = LIMIT_S,
        *,
        rests: bool = False,
    ) -> None:
        self.side, self.say, self.limit_s = side, say, limit_s
        self.rests = rests and sys.platform == "linux"
        tied = (sys.executable, "-ISc", TIED, str(os.getpid())) if self.rests else ()
        self._buffer, self._heard = b"", 0
        self._stderr, self._doing = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        try:
            self._process = subprocess.Popen(
                (*tied, *side.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env={**os.environ, **side.environment, DOING: str(self._doing.fileno())},
                pass_fds=[self._doing.fileno(), *side.descriptors],
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as e:
            self._close_files()
            raise UserError(f"{side.name}: {side.command[0]!r} cannot be started: {e.strerror or e}") from e

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close(GRACE_S if kind is None else 0.0)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """The processor time that it and what it has started have used; 0 if it has ended."""
        with suppress(psutil.Error):
            return float(sum(psutil.Process(self.pid).cpu_times()[:4]))  # its own, and its children's that have ended
        return 0.0

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the process: by closing its stdin, and after `grace_s` by force."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        self._signal(signal.SIGCONT)
        try:
            process.wait(grace_s) if grace_s else None
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            process.wait()
            process.stdout.close()
            self._close_files()

    def _close_files(self) -> None:
        self._stderr.close()
        self._doing.close()

    def kill(self) -> None:
        """End the process by force, from any thread; a waiting thread gets an error and closes the pipes."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Stop or continue the process, if it rests; return when it has stopped, or ended."""
        if self.rests and self._process.poll() is None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, number)
                if number == signal.SIGSTOP:
                    os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self._signal(signal.SIGCONT)
        try:
            return self._ask(do, **more)
        finally:
            self._signal(signal.SIGSTOP)

    def _ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        deadline = time.monotonic() + self.limit_s
        self._doing.truncate(0)
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
                raise EndedError(f"{self.side.name}: answered {shown!r} to '{do}'; expected a JSON object on one line")
            if "error" in answer:
                said = f"{self.side.name}: {one_line(str(answer['error']))[:500]}"
                if isinstance(answer.get("witness"), dict):
                    raise RefusedError(said, str(answer.get("verdict")), answer["witness"])
                raise UserError(said)
            if "progress" not in answer:
                self._heard = self._said()
                return answer
            self.say(str(answer["progress"]))

    def steps(self, n: int, **more: Any) -> Steps:
        """Make it train for n steps."""
        answer = self.ask("steps", n=n, **more)
        try:
            phases = {p: _numbers(answer["phases_ms"][p], n) for p in PHASES}
            waiting = str(answer.get("waiting", ""))
            steps = Steps(_numbers(answer["step_ms"], n), _numbers(answer["losses"], n), phases, waiting)
            if not all(isfinite(ms) and ms > 0 for ms in steps.step_ms):
                raise ValueError("a step took no time")
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{self.side.name}: the answer to 'steps' is wrong ({type(e).__name__}: {e}); "
                f"expected step_ms, losses, and phases_ms of {', '.join(PHASES)}, {n} of each"
            ) from e
        return steps

    def losses(self, scales: Sequence[float]) -> list[float]:
        """Return its loss of the first batch, before any step, with its weights times each of some numbers."""
        answer = self.ask("loss", scales=[*scales])
        try:
            return _numbers(answer["losses"], len(scales))
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{self.side.name}: the answer to 'loss' is wrong ({type(e).__name__}: {e})") from e

    def peak(self) -> dict[str, Any]:
        """Return its last report: its peak memory ``peak_rss_mb``, and more."""
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
                    late = f"no answer to '{do}' within {self.limit_s:g} s{self._where()}; it was ended"
                    raise EndedError(f"{self.side.name}: {late}", UNCHECKED)
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    raise self._died(do)
                self._buffer += more
                if len(self._buffer) > LONGEST:
                    raise EndedError(f"{self.side.name}: the answer to '{do}' is longer than {LONGEST} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _said(self) -> int:
        return os.fstat(self._stderr.fileno()).st_size

    def _where(self) -> str:
        """Describe the kernel that ran last in the request."""
        running = os.pread(self._doing.fileno(), WORDS, 0).decode(errors="replace").strip("\0 ")
        return f", in {one_line(running)}" if running else ""

    def _died(self, do: str) -> EndedError:
        """Return how the process ended, and its last line on stderr in this request if it failed."""
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            status, how = 1, "closed its stdout"
        else:
            how = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
            how += ", perhaps because memory ran out," if status == -signal.SIGKILL else ""
        said = os.pread(self._stderr.fileno(), 4096, max(self._heard, self._said() - 4096)).decode(errors="replace")
        words = [line for line in said.splitlines() if line.strip() and not WARNING.search(line)] if status else []
        last = f": {one_line(words[-1])[:500]}" if words else ""
        return EndedError(f"{self.side.name}: {how} during '{do}'{self._where()}{last}")


def _numbers(values: Any, n: int) -> list[float]:
    """Check that `values` is a list of n numbers."""
    if not isinstance(values, list) or len(values) != n:
        raise ValueError(f"not a list of {n}")
    return [float(v) for v in values]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that workers and temporary files are cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
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
