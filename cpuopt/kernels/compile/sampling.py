"""Samples of running machine code: where each thread is when another millisecond of its CPU time has passed.

Each thread has a timer of its CPU time, whose signal interrupts that thread alone. The handler is machine code. It
writes the interrupted instruction's address, the thread's number and the current mark into a ring of samples. It runs
no Python and allocates nothing, and the interrupted code stays as it is. It needs neither ``perf_event_open`` nor root.

Linux limits such timers to its tick, 250 or 1,000 a second. A thread that sleeps gives no samples.

Source: ``timer_create(2)``, ``sigaction(2)``; ``ucontext_t`` and ``siginfo_t`` of glibc on x86-64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from types import TracebackType
from typing import Any

import numpy as np

from ...errors import UserError
from ..toolkit import regions

Array = np.ndarray[Any, Any]
SLOTS = 1 << 18
"""Samples in the ring, a power of two: as many as 200 threads give in a second. Untouched ones take no memory."""
NO_MARK = -1
PERIOD_NS = 1_000_000
ADDRESS, VALUE = 168, 24
"""Where ``ucontext_t`` has the interrupted address, and ``siginfo_t`` the number that a timer was made with."""
THREAD_ID, SIGINFO, RESTART = 4, 4, 0x10000000
CPU_TIME_OF_THREAD = 6
"""The low bits of the clock of another thread's CPU time."""

HANDLER = """
define void @handler(i32 %signal, ptr %info, ptr %context) {{
  %n = atomicrmw add ptr inttoptr (i64 {taken} to ptr), i64 1 monotonic
  %i = and i64 %n, {last}
  %slot = getelementptr [4 x i64], ptr inttoptr (i64 {ring} to ptr), i64 %i
  %address.at = getelementptr i8, ptr %context, i64 {address}
  %address = load i64, ptr %address.at
  %thread.at = getelementptr i8, ptr %info, i64 {value}
  %thread = load i64, ptr %thread.at
  %mark = load volatile i64, ptr inttoptr (i64 {mark} to ptr)
  %1 = getelementptr i64, ptr %slot, i64 1
  %2 = getelementptr i64, ptr %slot, i64 2
  %3 = getelementptr i64, ptr %slot, i64 3
  store i64 %address, ptr %slot
  store i64 %thread, ptr %1
  store i64 %mark, ptr %2
  %whole = add i64 %n, 1
  store atomic i64 %whole, ptr %3 release, align 8
  ret void
}}
"""


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_long),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )


class _Period(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2))


class _Ring:
    """The handler and its memory. A process makes one and keeps it: a signal may be pending when its timer is gone."""

    def __init__(self, libc: Any) -> None:
        self.slots, self.state = np.zeros((SLOTS, 4), np.int64), np.array([0, NO_MARK])
        taken = self.state.ctypes.data
        places = {"taken": taken, "mark": taken + 8, "ring": self.slots.ctypes.data, "last": SLOTS - 1}
        self.engine = regions.loaded(HANDLER.format(**places, address=ADDRESS, value=VALUE))
        self.signal = next(n for n in range(signal.SIGRTMIN + 8, signal.SIGRTMAX) if _is_free(libc, n))
        action = _Action(handler=self.engine.get_function_address("handler"), flags=SIGINFO | RESTART)
        if libc.sigaction(self.signal, ctypes.byref(action), None):
            raise UserError(f"lines cannot be sampled here: sigaction: {os.strerror(ctypes.get_errno())}")


def _is_free(libc: Any, number: int) -> bool:
    known = _Action()
    return libc.sigaction(number, None, ctypes.byref(known)) == 0 and not known.handler


_rings: list[_Ring] = []
_running: list[int] = []
"""The process that samples, which a fork of it does not."""


def unavailable() -> str:
    """Return why machine code cannot be sampled here; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"lines are sampled on Linux with x86-64 only; this is {platform.system()} with {platform.machine()}"
    return ""


class ThreadSampler:
    """Samples of this process's threads inside a ``with`` block, one at a time in a process.

    Parameters
    ----------
    period_ns : CPU time between two samples of a thread.

    Attributes
    ----------
    mark : int64 (1,), which each sample copies, such as the number of the running call; `NO_MARK` at first.
    threads : the system's numbers of the threads, the main one first; a sample's thread is an index of it.
    lost : samples that were overwritten before they were taken.

    Raises
    ------
    UserError
        On entry, where there are no such timers, or while another sampler runs.
    """

    def __init__(self, period_ns: int = PERIOD_NS) -> None:
        self.period_ns, self.threads, self.lost = period_ns, list[int](), 0
        self._libc, self._timers, self._read = ctypes.CDLL(None, use_errno=True), list[ctypes.c_void_p](), 0

    def __enter__(self) -> ThreadSampler:
        if why := unavailable():
            raise UserError(why)
        if os.getpid() in _running:
            raise UserError("lines are being sampled already; one profile of lines can run in a process at a time")
        _running[:] = [os.getpid()]
        try:
            if not _rings:
                _rings.append(_Ring(self._libc))
            self._ring = _rings[0]
            self.mark: Array = self._ring.state[1:]
            self.mark[0], self._read = NO_MARK, int(self._ring.state[0])
            self.follow()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if os.getpid() in _running:  # a fork has no timers, and its parent's numbers may be those of others
            for timer in self._timers:
                self._libc.timer_delete(timer)
            _running.clear()
        self._timers.clear()

    def follow(self) -> None:
        """Sample the threads that started since the last call, too."""
        for thread in sorted(int(name) for name in os.listdir("/proc/self/task")):
            if thread not in self.threads:
                self.threads.append(thread)
                self._start(thread, len(self.threads) - 1)

    def _start(self, thread: int, number: int) -> None:
        event = _Event(value=number, signal=self._ring.signal, notify=THREAD_ID, thread=thread)
        clock, timer = ctypes.c_int(~thread << 3 | CPU_TIME_OF_THREAD), ctypes.c_void_p()
        if self._libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)):
            if os.path.exists(f"/proc/self/task/{thread}"):
                raise UserError(f"lines cannot be sampled here: timer_create: {os.strerror(ctypes.get_errno())}")
            return  # it has ended
        self._timers.append(timer)
        time = (ctypes.c_long * 2)(*divmod(self.period_ns, 10**9))
        self._libc.timer_settime(timer, 0, ctypes.byref(_Period(time, time)), None)

    def take(self) -> Array:
        """Return the samples since the last call: int64 (n, 3), each an address, a thread and a mark."""
        end = int(self._ring.state[0])
        first = max(self._read, end - SLOTS)
        numbers = np.arange(first, end)
        rows = self._ring.slots[numbers & (SLOTS - 1)]
        whole = rows[:, 3] == numbers + 1
        self.lost += first - self._read + int((~whole).sum())
        self._read = end
        return rows[whole, :3]
