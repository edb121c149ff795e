"""How threads wait for work: they spin while the processors are free, and sleep beside other processes.

libgomp, the OpenMP runtime of numba's wheels on Linux, reads its variables once. It does look, at each wait, whether it
has more threads than the process has processors; then a thread spins for microseconds in place of milliseconds. So an
idle team of threads (`Guests`) makes all others sleep, and they spin again when it ends.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ... import machine

MAPS = Path("/proc/self/maps")
PERIOD_S = 0.25
"""Seconds between two looks at the load."""
BUSY, FREE = 0.5, 0.25
"""Cores that others use beyond those left to them: above the first, threads sleep; below the second, they may spin."""
TO_SLEEP, TO_SPIN = 2, 4
"""Looks that must agree. One second of sleep in place of spinning costs a small model 4 % of ten seconds."""


OURS = WeakSet[threading.Thread]()
"""The threads of this module. They come and go with the load, so a kernel is not accused of them."""


def _started(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread of this module."""
    thread = threading.Thread(target=run, daemon=True, name=name)
    OURS.add(thread)  # before anybody can see it
    thread.start()
    return thread


class Waits:
    """Whether threads spin, as a function of what other processes use.

    The use of others does not depend on how the own threads wait, so the answer does not change what it was made from.
    A start of threads would: beside a process that computes, a thread that slept starts as soon as on a free machine.

    Parameters
    ----------
    room : the processors that are left to others.
    """

    def __init__(self, room: int) -> None:
        self.room, self.spins = room, True
        self._busy = self._free = 0

    def look(self, others: float) -> bool:
        """Return whether threads should spin after another period, in which others used so many cores."""
        beyond = others - self.room
        self._busy = self._busy + 1 if beyond > BUSY else 0
        self._free = 0 if self._busy else self._free + (beyond < FREE)
        if self._busy >= TO_SLEEP:
            self.spins = False
        elif self._free >= TO_SPIN:
            self.spins = True
        return self.spins


class Guests:
    """An idle team of libgomp's threads, until `leave`: with it, there are more threads than processors.

    Parameters
    ----------
    runtime : libgomp.
    n : threads that work.
    """

    def __init__(self, runtime: Any, n: int) -> None:
        self._over, there = threading.Event(), threading.Event()
        nothing = ctypes.cast(runtime.omp_in_parallel, ctypes.c_void_p)  # a function that may be called in vain

        def stay() -> None:  # the team belongs to this thread, and ends with it
            runtime.GOMP_parallel(nothing, None, max(2, _processors() - n + 2), 0)
            there.set()
            self._over.wait()

        self._thread = _started(stay, "cpuopt-guests")
        there.wait()

    def leave(self) -> None:
        """End the team."""
        self._over.set()
        self._thread.join()


class Switch:
    """Changes how libgomp's threads wait while they run; `machine.waiting` has what holds now, and the changes.

    Parameters
    ----------
    runtime : libgomp.
    n : threads that work.
    """

    def __init__(self, runtime: Any, n: int) -> None:
        self.runtime, self.n = runtime, n
        self._guests: Guests | None = None
        self._told = threading.Event()
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Follow the load from now on, in a thread that looks at it four times a second."""
        _started(self._run, "cpuopt-waiting")

    def _run(self) -> None:
        choice = Waits((os.cpu_count() or 1) - self.n)
        with suppress(OSError):  # a system that does not tell the load
            while not self._told.is_set():
                others, began = machine.Others(), time.monotonic()
                self._told.wait(PERIOD_S)
                if time.monotonic() - began > 4 * PERIOD_S:
                    continue  # the process was stopped: what others did then says nothing about now
                spins = choice.look(others.cores())
                with self._lock:
                    if not self._told.is_set():
                        self._switch(spins)

    def tell(self, spins: bool) -> None:
        """Make threads spin or sleep, and follow no longer."""
        with self._lock:
            self._told.set()
            self._switch(spins)

    def _switch(self, spins: bool) -> None:
        if spins == (self._guests is None):
            return
        if self._guests:
            self._guests.leave()
        self._guests = None if spins else Guests(self.runtime, self.n)
        machine.waits("spin" if spins else "sleep")


_switches: list[Switch] = []
"""The switch of this process, if its threads can be told."""


def follow(n: int) -> None:
    """Let n threads wait as the load makes it best, if they are libgomp's; call once, after they started."""
    if runtime := _libgomp():
        _switches.append(Switch(runtime, n))
        _switches[0].follow()
    else:
        machine.waits("runtime")


def tell(how: str) -> None:
    """Make threads ``spin`` or ``sleep`` from now on; where they cannot be told, or a variable says how, do nothing."""
    for switch in _switches:
        switch.tell(how == "spin")


def _libgomp() -> Any:
    """Return libgomp if this process has loaded it, under whatever name."""
    try:
        loaded = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "libgomp" in line}
    except OSError:
        return None
    found = ctypes.CDLL(min(loaded)) if len(loaded) == 1 else None  # of two, it is unknown which runs the kernels
    return found if hasattr(found, "GOMP_parallel") else None


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
