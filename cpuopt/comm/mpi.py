"""Ranks over MPI; the only module that imports mpi4py.

If all ranks run on one host, arrays that they exchange lie in memory that all of them map, and nothing is sent. It
is an anonymous file, which one rank makes and the others open through ``/proc``: it has no name that a killed rank
could leave behind, and a container's limit of ``/dev/shm`` does not concern it. MPI's own windows have both troubles.
Elsewhere arrays travel as messages, which MPI moves only while a call of it runs: hence `Mpi.progress`. Of a long
message it moves little in one call, so an array travels in pieces, and `Mpi.progress` tests them until none arrives.

What a rank waits for is tested again and again, after each piece first without a pause, then with short ones: a rank
that waits for another to compile must not take the core from it, and Python handles signals in between.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from contextlib import suppress
from typing import Any
from warnings import catch_warnings

import numpy as np

from ..errors import UserError
from . import Array, Comm
from .places import Promise, keeps, stale, suits

MESSAGES = "CPUOPT_MESSAGES"
"""Environment variable: not empty if ranks of one host are to exchange messages, as those of several hosts do."""
PAGE = 4096
PIECE = 1 << 20
"""Bytes of a message."""
TESTS, OLDEST = 32, 64
"""Tests in a row that find no message done before kernels go on, and the messages tested, which are done in turn."""
PATIENT_S, NAP_S = 0.01, 0.001
"""Seconds that a rank tests without a pause, and its longest pause."""


class Mpi(Comm):
    """The ranks of ``MPI_COMM_WORLD``. What is on its way is not kept alive here: the caller holds the arrays.

    Parameters
    ----------
    promise : of the launcher, which MPI must keep.
    messages : whether ranks of one host exchange messages too.

    Attributes
    ----------
    notes : what the user may want to know about the choice between memory and messages.

    Raises
    ------
    UserError
        If mpi4py, or the MPI that it is for, is not installed, or belongs to another launcher.
    """

    def __init__(self, promise: Promise | None = None, messages: bool = bool(os.environ.get(MESSAGES))) -> None:
        os.environ.setdefault("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1")  # the rank that fails gives its own reason
        try:
            import mpi4py

            mpi4py.rc(initialize=False, finalize=True)
            with catch_warnings(action="ignore"):  # of another launcher, which is an error below
                from mpi4py import MPI
        except (ImportError, RuntimeError) as e:
            more = stale(promise) if promise else ""
            raise UserError(f"several ranks need MPI ({e}); install both with: pip install 'cpuopt[mpi]'{more}") from e
        first = MPI.Get_library_version().splitlines()[0]
        self.name = " ".join(first.replace("Version:", "").split(",")[0].split())
        if promise:
            suits(promise, self.name)
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        self._mpi, self._world = MPI, MPI.COMM_WORLD
        host = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank, self.size = self._world.rank, self._world.size
        if promise:
            keeps(promise, self.size)
        self.notes: list[str] = []
        self._requests: dict[int, list[Any]] = {}
        self._open: list[Any] = []
        self._unseen = False
        self.shared = 1 < self.size == host.size and not messages and hasattr(os, "memfd_create")
        if self.shared:
            try:
                self.memory(PAGE)
            except UserError as e:
                self.shared = False
                self.notes.append(f"ranks exchange messages, because {e}")

    def memory(self, nbytes: int) -> Array:
        """Map a file without a name, which the first rank makes.

        Raises
        ------
        UserError
            The same on all ranks, where one of them cannot.
        """
        file, trouble = -1, ""
        try:
            if not self.rank:
                file = os.memfd_create("cpuopt")
                os.truncate(file, nbytes * self.size)
        except OSError as e:
            trouble = str(e)
        trouble, path = self.everyone([trouble, f"/proc/{os.getpid()}/fd/{file}"])[0]
        held = mmap.mmap(-1, PAGE)
        try:
            if not trouble:
                file = file if file >= 0 else os.open(path, os.O_RDWR)
                held = mmap.mmap(file, nbytes * self.size)
                with suppress(OSError):
                    held.madvise(mmap.MADV_HUGEPAGE)
        except OSError as e:
            trouble = str(e)
        if reasons := [reason for reason in self.everyone(trouble) if reason]:
            raise UserError(f"they cannot share memory ({reasons[0]})")
        os.close(file)
        return np.frombuffer(held, np.uint8)

    def exchange(self, theirs: Array, mine: Array, peer: int) -> None:
        """Begin to send and to receive; with shared memory, all that is left to do is to wait for the peer."""
        if self.shared:
            self._unseen = True
            return
        for begin, array in ((self._world.Irecv, theirs), (self._world.Isend, mine)):
            whole = array.reshape(-1).view(np.uint8)
            for start in range(0, whole.size, PIECE):
                self._begun(theirs, begin(whole[start : start + PIECE], peer))

    def all_reduce(self, x: Array) -> None:
        """Begin the library's sum."""
        self._begun(x, self._world.Iallreduce(self._mpi.IN_PLACE, x))

    def _begun(self, received: Array, request: Any) -> None:
        self._requests.setdefault(received.ctypes.data, []).append(request)
        self._open.append(request)

    def complete(self, received: Array) -> None:
        """Wait for an array; with shared memory, once for all arrays that were exchanged before."""
        if requests := self._requests.pop(received.ctypes.data, None):
            self._wait(requests)
            self._open = [r for r in self._open if r]
        if self._unseen:
            self.barrier()

    def progress(self) -> None:
        """Let MPI move what is under way."""
        idle = 0
        while self._open and idle < TESTS:
            idle = 0 if self._moved() else idle + 1

    def _moved(self) -> bool:
        """Test what is under way; return whether a part of it is done."""
        oldest = self._open[:OLDEST]
        if not oldest or not self._mpi.Request.Testsome(oldest):
            return False
        self._open[:OLDEST] = [r for r in oldest if r]
        return True

    def barrier(self, x: Array | None = None) -> None:
        """Wait for all. Its messages carry what was written before: they order memory as any lock does."""
        self._unseen = False
        self._wait([self._world.Ibarrier()])

    def combine(self, total: Array, mine: Array) -> None:
        """Sum in the library's order."""
        self._wait([self._world.Iallreduce(mine, total)])

    def everyone(self, what: Any) -> list[Any]:
        """Exchange JSON texts."""
        mine = np.frombuffer(json.dumps(what).encode(), np.uint8)
        length, lengths = np.array([mine.size]), np.zeros(self.size, np.int64)
        self._wait([self._world.Iallgather(length, lengths)])
        text = np.empty(lengths.sum(), np.uint8)
        self._wait([self._world.Iallgatherv(mine, [text, lengths.tolist()])])
        return [json.loads(part.tobytes()) for part in np.split(text, np.cumsum(lengths)[:-1])]

    def close(self) -> None:
        """Leave MPI, as all ranks must: a status other than 0 is then a process's own affair."""
        self._mpi.Finalize()

    def abort(self, status: int) -> None:
        """End all ranks."""
        self._world.Abort(status)

    def _wait(self, requests: list[Any]) -> None:
        began = time.perf_counter()
        while not self._mpi.Request.Testall(requests):
            if self._moved():
                began = time.perf_counter()
            waited = time.perf_counter() - began
            time.sleep(min(waited / 20, NAP_S) if waited > PATIENT_S else 0)
