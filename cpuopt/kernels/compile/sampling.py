"""Samples of running machine code: where each thread is when another millisecond of its CPU time has passed.

Each thread has a timer of its CPU time, whose signal interrupts that thread alone. The handler is machine code. It
writes the interrupted instruction's address, the thread's number, the current mark and the time into a ring. It runs
no Python and allocates nothing, and the interrupted code stays as it is. It needs neither ``perf_event_open`` nor root.

Linux limits timers of CPU time to its tick, 250 or 1,000 a second, with which periodic work can be in step. So the tick
takes no sample: it starts a second timer, of real time, which is exact, and ends at random before the next tick. Each
moment of a running thread is as likely as any other. No sample comes from a thread that sleeps, which is about to
repeat the instruction ``syscall`` (0F 05), nor from one that had lost its core: the tick takes that away, too.

Source: ``timer_create(2)``, ``sigaction(2)``; ``ucontext_t`` and ``siginfo_t`` of glibc on x86-64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from ctypes import c_int, c_long, c_void_p
from types import TracebackType
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from ...errors import UserError
from ..toolkit import regions

Array = np.ndarray[Any, Any]
SLOTS = 1 << 18
"""Samples in the ring, a power of two: as many as 200 threads give in a second. Untouched ones take no memory."""
NO_MARK = -1
PERIOD_NS = 1_000_000
COARSE = 6
"""Linux's clock that only the tick moves."""
LATE_NS = 100_000
"""The delay from which a sample does not count: another process had the core."""
THREADS = 1 << 16
"""Threads that the handler knows, a power of two; more share a place."""
ADDRESS, VALUE = 168, 24
"""Where ``ucontext_t`` has the interrupted address, and ``siginfo_t`` the number that a timer was made with."""
THREAD_ID, SIGINFO, RESTART = 4, 4, 0x10000000
CPU_TIME_OF_THREAD, REAL_TIME = 6, 1
"""The low bits of the clock of another thread's CPU time, and the clock of real time."""
CREATE, SETTIME, DELETE = 222, 223, 226
"""The system calls of timers, whose numbers the handler can use; those of the C library are its own."""

HANDLER = """
define internal i64 @now() {{
  %time = alloca [2 x i64]
  %ignored = call i32 inttoptr (i64 {clock} to ptr)(i32 {real_time}, ptr %time)
  %parts = load [2 x i64], ptr %time
  %s = extractvalue [2 x i64] %parts, 0
  %ns = extractvalue [2 x i64] %parts, 1
  %whole = mul i64 %s, 1000000000
  %sum = add i64 %whole, %ns
  ret i64 %sum
}}

define void @handler(i32 %signal, ptr %info, ptr %context) {{
  %now = call i64 @now()
  %time = alloca [4 x i64]
  %value.at = getelementptr i8, ptr %info, i64 {value}
  %value = load i64, ptr %value.at
  %thread = and i64 %value, {threads}
  %due.at = getelementptr i64, ptr inttoptr (i64 {due} to ptr), i64 %thread
  %timer = lshr i64 %value, 32
  %ticked = icmp ne i64 %timer, 0
  br i1 %ticked, label %tick, label %sample
tick:
  %cycles = call i64 @llvm.readcyclecounter()
  %self = call i64 @pthread_self()
  %self.at = getelementptr i64, ptr inttoptr (i64 {selves} to ptr), i64 %thread
  store i64 %self, ptr %self.at
  %mixed = mul i64 %cycles, -7046029254386353131
  %random = lshr i64 %mixed, 24
  %span = load i64, ptr inttoptr (i64 {span} to ptr)
  %wait = urem i64 %random, %span
  %once = insertvalue [4 x i64] zeroinitializer, i64 %wait, 3
  store [4 x i64] %once, ptr %time
  %due = add i64 %now, %wait
  store i64 %due, ptr %due.at
  %number = sub i64 %timer, 1
  %ignored = call i64 asm sideeffect "syscall",
    "={{rax}},{{rax}},{{rdi}},{{rsi}},{{rdx}},{{r10}},~{{rcx}},~{{r11}},~{{memory}}"
    (i64 {settime}, i64 %number, i64 0, ptr %time, i64 0)
  ret void
sample:
  %was.due = load i64, ptr %due.at
  %delay = sub i64 %now, %was.due
  %late = icmp sgt i64 %delay, {late}
  br i1 %late, label %none, label %in.time
in.time:
  %address.at = getelementptr i8, ptr %context, i64 {address}
  %address = load i64, ptr %address.at
  %code = inttoptr i64 %address to ptr
  %first = load i8, ptr %code
  %long = icmp eq i8 %first, 15
  br i1 %long, label %opcode, label %running
opcode:
  %second.at = getelementptr i8, ptr %code, i64 1
  %second = load i8, ptr %second.at
  %sleeps = icmp eq i8 %second, 5
  br i1 %sleeps, label %none, label %running
none:
  ret void
running:
  %n = atomicrmw add ptr inttoptr (i64 {taken} to ptr), i64 1 monotonic
  %i = and i64 %n, {last}
  %slot = getelementptr [5 x i64], ptr inttoptr (i64 {ring} to ptr), i64 %i
  %mark = load volatile i64, ptr inttoptr (i64 {mark} to ptr)
  %a = insertvalue [4 x i64] poison, i64 %address, 0
  %b = insertvalue [4 x i64] %a, i64 %thread, 1
  %c = insertvalue [4 x i64] %b, i64 %mark, 2
  %d = insertvalue [4 x i64] %c, i64 %now, 3
  store [4 x i64] %d, ptr %slot
  %whole = add i64 %n, 1
  %whole.at = getelementptr i64, ptr %slot, i64 4
  store atomic i64 %whole, ptr %whole.at release, align 8
  ret void
}}

declare i64 @llvm.readcyclecounter()
declare i64 @pthread_self()
"""


class _Action(ctypes.Structure):
    _fields_ = (("handler", c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", c_int), ("restorer", c_void_p))


class _Event(ctypes.Structure):
    _fields_ = (("value", c_long), ("signal", c_int), ("notify", c_int), ("thread", c_int), ("rest", c_int * 11))


class _Ring:
    """The handler and its memory. A process makes one and keeps it: a signal may be pending when its timer is gone."""

    def __init__(self, libc: Any) -> None:
        self.slots, self.state = np.zeros((SLOTS, 5), np.int64), np.array([0, NO_MARK, 1])
        (self.due, self.selves), taken = np.zeros((2, THREADS), np.int64), self.state.ctypes.data
        places = {"taken": taken, "mark": taken + 8, "span": taken + 16, "ring": self.slots.ctypes.data}
        places |= {"due": self.due.ctypes.data, "selves": self.selves.ctypes.data}
        places |= {"clock": ctypes.cast(libc.clock_gettime, c_void_p).value}
        numbers = {"last": SLOTS - 1, "threads": THREADS - 1, "late": LATE_NS, "address": ADDRESS, "value": VALUE}
        llvm.initialize_native_asmparser()
        self.engine = regions.loaded(HANDLER.format(**places, **numbers, settime=SETTIME, real_time=REAL_TIME))
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
        self._libc, self._timers, self._read = ctypes.CDLL(None, use_errno=True), list[int](), 0

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
            self.mark: Array = self._ring.state[1:2]
            self._ring.state[2] = max(self.period_ns, round(1e9 * time.clock_getres(COARSE)))
            self.mark[0], self._read = NO_MARK, int(self._ring.state[0])
            self._ring.selves[:] = 0
            self.follow()
            self._ring.selves[self.threads.index(threading.get_native_id())] = threading.get_ident()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if os.getpid() in _running:  # a fork has no timers, and its parent's numbers may be those of others
            for timer in self._timers:
                self._libc.syscall(DELETE, timer)
            _running.clear()
        self._timers.clear()

    def follow(self) -> None:
        """Sample the threads that started since the last call, too; the one that samples comes first."""
        own = threading.get_native_id()  # ids begin again at 1 when they have reached the largest
        for thread in sorted(map(int, os.listdir("/proc/self/task")), key=lambda thread: (thread != own, thread)):
            if thread not in self.threads:
                self.threads.append(thread)
                self._start(thread, len(self.threads) - 1)

    def _start(self, thread: int, number: int) -> None:
        """Start both timers of a thread; the value of a tick also has the number of the timer that samples, from 1."""
        sampling = self._timer(REAL_TIME, thread, number)
        ticking = self._timer(~thread << 3 | CPU_TIME_OF_THREAD, thread, number | (sampling + 1) << 32)
        self._libc.syscall(SETTIME, ticking, 0, (c_long * 4)(*2 * divmod(self.period_ns, 10**9)), None)

    def _timer(self, clock: int, thread: int, value: int) -> int:
        """Make a timer that interrupts a thread with a value; return its number, or -1 if the thread has ended."""
        event = _Event(value=value, signal=self._ring.signal, notify=THREAD_ID, thread=thread)
        made = c_int(-1)
        if self._libc.syscall(CREATE, clock, ctypes.byref(event), ctypes.byref(made)):
            if os.path.exists(f"/proc/self/task/{thread}"):
                raise UserError(f"lines cannot be sampled here: timer_create: {os.strerror(ctypes.get_errno())}")
        else:
            self._timers.append(made.value)
        return made.value

    def take(self) -> Array:
        """Return the samples since the last call: int64 (n, 4), each an address, a thread, a mark and a time in ns.

        The time is that of the clock of ``time.perf_counter_ns``.
        """
        end = int(self._ring.state[0])
        first = max(self._read, end - SLOTS)
        numbers = np.arange(first, end)
        rows = self._ring.slots[numbers & (SLOTS - 1)]
        whole = rows[:, 4] == numbers + 1
        self.lost += first - self._read + int((~whole).sum())
        self._read = end
        return rows[whole, :4]

    def number(self, selves: Array) -> Array:
        """Return the threads that have some numbers by ``pthread_self``; -1 for one without a tick of CPU time."""
        known = {int(self._ring.selves[i]): i for i in range(min(len(self.threads), THREADS))}
        return np.array([known.get(x, -1) for x in selves.tolist()], np.int64)
