"""The number of threads of kernels, and the layer by which numba starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

import numba

from ...errors import UserError
from ...machine import WAYS, waiting
from ...machine import cores as cores
from ...wording import one_line
from ..compile.numba_internals import parallel
from .waiting import follow

SMALL = 512 << 10
"""Bytes below which one thread reads alone: starting others takes microseconds where they spin, 75 where they sleep."""
NOT_STARTED = "none yet"
_orphaned = False
"""Whether this process was forked from one that had started OpenMP's threads, which the fork does not have."""


def _after_fork() -> None:
    global _orphaned
    _orphaned = threading_layer() == "omp"


os.register_at_fork(after_in_child=_after_fork)


def start(n: int) -> None:
    """Start numba's threads, of which n will run and wait as `machine.waiting` chooses; once in a process.

    The runtime of OpenMP reads its variables when it is loaded, and child processes should not inherit them.

    Raises
    ------
    UserError
        If numba cannot load the layer that ``NUMBA_THREADING_LAYER`` asks for, or in a process that was forked after
        its threads were started: libgomp would end it at the first parallel kernel.
    """
    if _orphaned:
        raise UserError(
            "this process was forked from one that had run kernels, and OpenMP's threads do not survive a fork; start "
            "workers with multiprocessing.get_context('spawn') or 'forkserver', or fork before the first kernel"
        )
    if threading_layer() != NOT_STARTED:
        return
    chosen = waiting(n)["how"]
    way = WAYS.get(chosen, {})
    os.environ.update(way)
    try:
        parallel._launch_threads()
    except ValueError as e:
        if not str(e).startswith("No threading layer"):
            raise UserError(f"numba starts no threads: {one_line(str(e))}") from e
        asked = f"NUMBA_THREADING_LAYER={numba.config.THREADING_LAYER}"
        raise UserError(f"{asked}: its library is not installed; unset it, or take omp or workqueue") from e
    finally:
        for name in way:
            del os.environ[name]
    if chosen == "follow" and n > 1:
        follow(n)


def set_threads(n: int | None) -> int:
    """Set the number of threads for kernels called from this Python thread; return the number that will run.

    Raises
    ------
    UserError
        For a number below 1, or above that with which numba was started (``NUMBA_NUM_THREADS``).
    """
    most = numba.config.NUMBA_NUM_THREADS
    n = most if n is None else n
    if not isinstance(n, Integral) or not 1 <= n <= most:
        more = f"; set NUMBA_NUM_THREADS={n} before Python starts" if isinstance(n, Integral) and n > most else ""
        raise UserError(f"threads = {n!r}: expected 1 to {most}, which numba was started with{more}")
    start(n)
    numba.set_num_threads(n)
    return n


@contextmanager
def planned_for(n: int) -> Iterator[None]:
    """Let kernels size their scratch, and so cut their work, for n threads, of which fewer may run."""
    before, numba.config.NUMBA_NUM_THREADS = numba.config.NUMBA_NUM_THREADS, n
    try:
        yield
    finally:
        numba.config.NUMBA_NUM_THREADS = before


def most_threads() -> int:
    """Return the number of threads with which numba was started, for which kernels ask for scratch."""
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def get_threads() -> int:
    """Return the number of threads for kernels called from this Python thread."""
    return int(numba.get_num_threads())


def threading_layer() -> str:
    """Name the layer that runs parallel kernels; call after the first of them."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return NOT_STARTED
