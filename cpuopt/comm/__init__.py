"""Ranks, the processes that train one model together, and how arrays travel between them.

A `Comm` moves data and adds none: what ranks sum, kernels sum, in an order that the program fixes. `Serial` is one
process alone, `threads.Team` gives ranks that are threads of one process, for tests, and `mpi` is MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Comm(Protocol):
    """One rank's view of all ranks.

    Every rank makes the same calls in the same order. Exceptions of one rank are for `agree`, or end all (`abort`).

    Attributes
    ----------
    rank, size : the number of this rank, and of all.
    local_rank, local_size : the same among the ranks of this host.
    name : of the library, as profiles show it.
    shared : whether `memory` lies in memory that all ranks see.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    name: str
    shared: bool

    def memory(self, nbytes: int) -> tuple[Array, int]:
        """Allocate zeroed bytes whose slices `exchange` sends.

        Returns bytes and a stride. Where memory is `shared` the bytes are those of all ranks, and rank r's begin at
        r times the stride; else they are this rank's own, and the stride is 0.
        """
        ...

    def exchange(self, theirs: Array, mine: Array, peer: int) -> None:
        """Begin to send `mine` to a rank, and to receive what it sends as `theirs`; one of both may be empty.

        The rank calls it with the same sizes, in the same order. With shared memory, `theirs` is the peer's own array.
        """
        ...

    def reduce_scatter(self, own: Array, whole: Array, counts: Sequence[int]) -> None:
        """Begin to sum `whole` over all ranks in the library's order, and to receive this rank's part as `own`.

        Parameters
        ----------
        counts : the length of each rank's part; `own` has that of this rank.
        """
        ...

    def complete(self, received: Array) -> None:
        """Wait until what `exchange` or `reduce_scatter` receives in an array is there, and what was sent is gone."""
        ...

    def progress(self) -> None:
        """Let transfers advance; called between two kernels."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here; what each has written to shared memory is then seen by all."""
        ...

    def combine(self, x: Array) -> None:
        """Add an array over all ranks, in place; exact where no two ranks hold a number other than 0 at one place."""
        ...

    def everyone(self, what: Any) -> list[Any]:
        """Return what each rank passes, by rank; small, and of Python's plain types."""
        ...

    def abort(self, status: int) -> None:
        """End all ranks at once."""
        ...


class Serial:
    """One process alone."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    name, shared = "serial", False

    def memory(self, nbytes: int) -> tuple[Array, int]:
        """Allocate bytes."""
        return np.zeros(nbytes, np.uint8), 0

    def exchange(self, theirs: Array, mine: Array, peer: int) -> None:
        """Do nothing: there is no peer."""

    def reduce_scatter(self, own: Array, whole: Array, counts: Sequence[int]) -> None:
        """Copy: the sum over one rank."""
        np.copyto(own, whole)

    def complete(self, received: Array) -> None:
        """Do nothing: all is done at once."""

    def progress(self) -> None:
        """Do nothing."""

    def barrier(self) -> None:
        """Do nothing: every rank is here."""

    def combine(self, x: Array) -> None:
        """Do nothing: this rank holds all numbers."""

    def everyone(self, what: Any) -> list[Any]:
        """Return it alone."""
        return [what]

    def abort(self, status: int) -> None:
        """Raise SystemExit."""
        raise SystemExit(status)
