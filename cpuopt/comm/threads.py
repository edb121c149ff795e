"""Ranks that are threads of one process: the same promises as those of processes, for tests and for trying out."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from queue import Queue
from typing import Any, TypeVar

import numpy as np

from . import Array, Comm

T = TypeVar("T")


class Team:
    """The common state of ranks that are threads.

    Parameters
    ----------
    shared : whether they see one memory; else they send messages.
    """

    def __init__(self, size: int, shared: bool = True, limit_s: float = 120.0) -> None:
        self.size, self.shared, self.limit_s = size, shared, limit_s
        self.meeting = threading.Barrier(size, timeout=limit_s)
        self.table: list[Any] = [None] * size
        self.mail: defaultdict[tuple[int, int], Queue[Array]] = defaultdict(Queue)

    def run(self, work: Callable[[Thread], T]) -> list[T]:
        """Call a function for each rank, in a thread; return the results by rank.

        An exception of one rank ends the waits of the others, and is raised.
        """
        results: dict[int, T] = {}
        failed: list[BaseException] = []

        def of(rank: int) -> None:
            try:
                results[rank] = work(Thread(self, rank))
            except threading.BrokenBarrierError as e:
                failed.append(e)
            except BaseException as e:
                failed.insert(0, e)
                self.meeting.abort()

        started = [threading.Thread(target=of, args=(rank,)) for rank in range(self.size)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        if failed:
            raise failed[0]
        return [results[rank] for rank in range(self.size)]


class Thread(Comm):
    """A rank of a team."""

    def __init__(self, team: Team, rank: int) -> None:
        self.team, self.rank, self.size = team, rank, team.size
        self.name, self.shared = "threads", team.shared
        self._begun = False
        self._expected: dict[int, deque[int]] = defaultdict(deque)

    def memory(self, nbytes: int) -> Array:
        """Allocate bytes that all threads see."""
        if self.rank == 0:
            self.team.table[0] = np.zeros(self.size * nbytes, np.uint8)
        self.barrier()
        found: Array = self.team.table[0]
        self.barrier()
        return found

    def exchange(self, theirs: Array, mine: Array, peer: int) -> None:
        """Put a copy into the peer's queue; with shared memory there is nothing to send."""
        self._begun = True
        if not self.shared:
            self.team.mail[self.rank, peer].put(mine.copy())
            self._expected[theirs.ctypes.data].append(peer)

    def all_reduce(self, x: Array) -> None:
        """Sum in the order of the ranks."""
        parts = self.everyone(x.copy())
        x[...] = sum(parts[1:], parts[0])

    def complete(self, received: Array) -> None:
        """Take what was sent; with shared memory, meet the others once for all that was begun."""
        if self.shared:
            if self._begun:
                self.barrier()
        elif expected := self._expected[received.ctypes.data]:
            received[...] = self.team.mail[expected.popleft(), self.rank].get(timeout=self.team.limit_s)
        self._begun = False

    def barrier(self, x: Array | None = None) -> None:
        """Wait for all."""
        self.team.meeting.wait()

    def combine(self, total: Array, mine: Array) -> None:
        """Sum in the order of the ranks."""
        total[...] = np.sum(self.everyone(mine.copy()), axis=0)

    def everyone(self, what: Any) -> list[Any]:
        """Write into a common table."""
        self.team.table[self.rank] = what
        self.barrier()
        found = list(self.team.table)
        self.barrier()
        return found

    def abort(self, status: int) -> None:
        """End the waits of the others, and this thread."""
        self.team.meeting.abort()
        raise SystemExit(status)
