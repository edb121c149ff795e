"""A limit on the time of a step: where one does not end, nobody would ever know which rank waits for whom."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

LEAST_S, FIRST_S, TIMES = 60.0, 1800.0, 20.0
WINDOW = 64
"""The number of last steps whose median counts."""
GRACE_S = 2.0
"""Seconds in which other ranks write their stacks too, before the first process ends."""


class Watchdog:
    """Ends the process, with the stacks of all its threads, if a step takes longer than any should.

    A context manager, around all steps and what lies between them.

    A thread of Python could not do so while a kernel holds the interpreter. A thread of C writes the stacks, and a
    timer of the operating system ends the process.

    Parameters
    ----------
    least_s : the least limit.
    times : the limit, in medians of the last steps.
    first_s : the limit of the first step, which knows no other, and of what lies between two steps.
    file : the descriptor that gets the stacks; by default that of stderr.
    """

    def __init__(
        self,
        least_s: float = LEAST_S,
        times: float = TIMES,
        first_s: float = FIRST_S,
        file: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.least_s, self.times, self.first_s, self.clock = least_s, times, first_s, clock
        self.file = sys.__stderr__.fileno() if file is None and sys.__stderr__ else file or 2
        self.steps: deque[float] = deque(maxlen=WINDOW)

    @property
    def limit_s(self) -> float:
        """The limit of the next step in seconds."""
        return max(self.least_s, self.times * median(self.steps)) if self.steps else self.first_s

    def __enter__(self) -> Watchdog:
        """Watch what lies between steps from here on, such as validation and saving: each gap may take `first_s`."""
        self._limit(self.first_s)
        return self

    def __exit__(self, *of_exception: object) -> None:
        """Watch no more."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Watch one step."""
        start = self.clock()
        self._limit(self.limit_s)
        try:
            yield
        finally:
            self._limit(self.first_s)
        self.steps.append(self.clock() - start)

    def _limit(self, seconds: float) -> None:
        """End the process after some seconds from now on, instead of at the instant that was set before."""
        faulthandler.dump_traceback_later(seconds, file=self.file)
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_S)
