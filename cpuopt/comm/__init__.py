"""Ranks, the processes that train one model together, and how arrays travel between them.

A `Comm` moves data and adds none: what ranks sum, kernels sum, in an order that the program fixes. `Comm` itself is one
process alone, `threads.Team` gives ranks that are threads of one process, for tests, and `mpi` is MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the help of a verb imports this, and must come at once
    import numpy as np

    Array = np.ndarray[Any, Any]
else:
    Array = Any


class Comm:
    """One rank's view of all ranks. This class is that of one process alone; others override all methods.

    Every rank makes the same calls in the same order. An error of one rank becomes that of all (`agree`), or ends all
    (`abort`).

    Attributes
    ----------
    rank, size : the number of this rank, and of all.
    name : of the library, as profiles show it.
    shared : whether `memory` lies in memory that all ranks see.
    """

    rank: int = 0
    size: int = 1
    name: str = "serial"
    shared: bool = False

    def memory(self, nbytes: int) -> Array:
        """Allocate zeroed bytes that all ranks see, a multiple of 4,096 for each; return those of all, by rank.

        Only where memory is `shared`, and once.
        """
        import numpy as np

        return np.zeros(nbytes, np.uint8)

    def exchange(self, theirs: Array, mine: Array, peer: int) -> None:
        """Begin to send `mine` to a rank, and to receive what it sends as `theirs`; one of both may be empty.

        The rank calls it with the same sizes, in the same order. With shared memory, `theirs` is the peer's own array.
        """

    def all_reduce(self, x: Array) -> None:
        """Begin to sum an array over all ranks, in place and in the library's order."""

    def complete(self, received: Array) -> None:
        """Wait until what `exchange` or `all_reduce` puts into an array is there, and what was sent for it is gone."""

    def progress(self) -> None:
        """Let transfers advance; called between two kernels."""

    def barrier(self, x: Array | None = None) -> None:
        """Wait until every rank is here; what each has written to shared memory is then seen by all.

        Parameters
        ----------
        x : what the wait is for; it is not touched.
        """

    def combine(self, total: Array, mine: Array) -> None:
        """Sum an array of float64 over all ranks; exact, for one rank at most has a number other than 0 at a place."""
        total[...] = mine

    def everyone(self, what: Any) -> list[Any]:
        """Return what each rank passes, by rank; small, and of Python's plain types."""
        return [what]

    def abort(self, status: int) -> None:
        """End all ranks at once."""
        raise SystemExit(status)


SERIAL = Comm()
