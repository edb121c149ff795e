"""Jobs of several processes for the benchmarks of ranks: each process asks for its work over a local socket.

A process that has nothing to do blocks, so jobs that take turns do not disturb each other. Its messages are lines of
JSON. This file needs the standard library alone, since processes of another Python import it too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
ADDRESS = "CPUOPT_BENCHMARK"
"""Environment variable: the socket of the process that asks."""
START_S, GRACE_S = 1800.0, 10.0
"""Seconds until a process answers, compilation included, and until it ends by itself."""


class Job:
    """Processes that answer the same requests, each for its rank.

    Parameters
    ----------
    command : starts all of them.
    size : their number.
    environment : variables added to those of this process.
    """

    def __init__(self, command: Sequence[str], size: int, environment: Mapping[str, str] | None = None) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="cpuopt-job-")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (until the job ends)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(address := f"{self._folder.name}/job")
        self._door.listen(size)
        self._door.settimeout(0.5)
        path = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH")]))
        there = {**os.environ, "PYTHONPATH": path, ADDRESS: address, **(environment or {})}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches this process alone, which ends the others
            env=there,
        )
        self._ranks: dict[int, Any] = {}

    def __enter__(self) -> Job:
        while len(self._ranks) < self.size:
            with suppress(TimeoutError):
                there, _ = self._door.accept()
                there.settimeout(START_S)
                lines = there.makefile("rw")
                self._ranks[json.loads(lines.readline())["rank"]] = lines
            if self._process.poll() is not None:
                self._fail("ended before it began")
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for lines in self._ranks.values():
            with suppress(OSError):
                lines.close()
        try:
            self._process.wait(0 if kind else GRACE_S)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self._process.pid, number)
                    self._process.wait(GRACE_S)
        self._door.close()
        self._folder.cleanup()

    def begin(self, do: str, **request: Any) -> None:
        """Send a request to all."""
        for lines in self._ranks.values():
            lines.write(json.dumps({"do": do, **request}) + "\n")
            lines.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Wait for the answers, by rank."""
        found = []
        for rank in range(self.size):
            line = self._ranks[rank].readline()
            answer = json.loads(line) if line else {"error": "ended"}
            if "error" in answer:
                self._fail(f"rank {rank}: {answer['error']}")
            found.append(answer)
        return found

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        """Send a request to all, and wait for the answers."""
        self.begin(do, **request)
        return self.answers()

    def step(self, **request: Any) -> float:
        """Take one step; return its ms, those of the slowest rank."""
        return max(a["step_ms"][0] for a in self.ask("steps", n=1, **request))

    def _fail(self, why: str) -> None:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").splitlines()
        raise SystemExit("\n".join([f"a job of {self.size} processes: {why}", *said[-20:]]))


def serve(rank: int, handlers: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer the requests for one rank, until the process that asks is gone."""
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(os.environ[ADDRESS])
        with there.makefile("rw") as lines:
            for answer in _answers(rank, lines, handlers):
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


def _answers(rank: int, lines: Any, handlers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"rank": rank}
    for line in lines:
        request = json.loads(line)
        try:
            yield handlers[request.pop("do")](request)
        except Exception as e:
            yield {"error": "".join(format_exception(e))}


@contextmanager
def ended() -> Iterator[None]:
    """End as after a Ctrl-C when told to by SIGTERM or SIGHUP, so that what was made is removed."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
