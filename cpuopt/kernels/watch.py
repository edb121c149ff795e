"""What a user's file must leave as it is: the functions that kernels are judged and timed with, and its process.

A file runs code when it is imported, when a kernel is called, and from a timer or a thread that it started. So the same
`Watch` is asked after each of these: after an import, and before each answer of a process that judges or times.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import numba
import numpy as np

from .toolkit import waiting

LIBRARIES: tuple[ModuleType, ...] = (np, np.random, np.linalg, np.lib.stride_tricks, math, time, os, json, numba)
LIBRARIES += (sys.modules["builtins"],)
"""Modules whose functions judges, references and clocks use."""
OURS = tuple(f"cpuopt.{name}" for name in ("check", "engine", "isolate", "lab", "measure", "ops.", "profiler"))
"""The first words of the names of our own modules that judge and time."""
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which whoever starts the process has threads pinned."""
TASKS = "/proc/self/task"


class Watch:
    """A picture of the functions and the threads of this process, with which later ones are compared."""

    def __init__(self) -> None:
        self.functions = {(id(where), name): (where, x) for where, name, x in _functions()}
        self.scheduled, self.threads = scheduling(), python_threads()

    def changes(self) -> list[str]:
        """Restore what was changed since, and describe it; empty for nothing."""
        return [*self._replaced(), *self._process()]

    def _replaced(self) -> list[str]:
        found = []
        for (_, name), (where, function) in self.functions.items():
            if vars(where).get(name) is not function:
                setattr(where, name, function)
                found.append(f"{getattr(where, '__qualname__', where.__name__)}.{name}")
        if not found:
            return []
        return [f"it replaces {', '.join(found[:3])}, which kernels are judged and timed with; leave it as it is"]

    def _process(self) -> list[str]:
        found = []
        if other := scheduling() - self.scheduled:
            cores, nice, policy = next(iter(other))
            repin(self.scheduled)
            found.append(
                f"it changes where or how its threads are scheduled (cores {list(cores)}, niceness {nice}, policy "
                f"{policy}); leave that to the system"
            )
        if more := python_threads() - self.threads:
            names = [t.name for t in threading.enumerate() if t.ident in more]
            found += [f"it starts a thread ({', '.join(names)}), which could work beside the clock"] * bool(names)
        return found


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions to watch: module or class, name, function."""
    for module in LIBRARIES:
        yield from ((module, name, x) for name, x in list(vars(module).items()) if callable(x))
    for name, ours in list(sys.modules.items()):
        if name.startswith(OURS) and isinstance(ours, ModuleType):
            for key, x in list(vars(ours).items()):
                if callable(x):
                    yield ours, key, x
                if isinstance(x, type) and x.__module__ == name:
                    yield from ((x, key, f) for key, f in list(vars(x).items()) if callable(f) and key[:2] != "__")


Scheduled = tuple[tuple[int, ...], int, int]
"""The cores of a thread, its niceness and its policy."""


def scheduling() -> set[Scheduled]:
    """Return how the threads of this process are scheduled, each way once; empty if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    if any(name in os.environ for name in PINNING):
        return {_scheduled(0)}
    found = set()
    for task in _tasks():
        with suppress(OSError):  # it has ended
            found.add(_scheduled(task))
    return found


def _tasks() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(TASKS)]
    return [0]


def _scheduled(task: int) -> Scheduled:
    return tuple(sorted(os.sched_getaffinity(task))), os.getpriority(os.PRIO_PROCESS, task), os.sched_getscheduler(task)


def repin(before: set[Scheduled]) -> None:
    """Let all threads run on all cores of some schedules again."""
    cores = {core for on, _, _ in before for core in on}
    for task in _tasks():
        with suppress(OSError):
            os.sched_setaffinity(task, cores)


def python_threads() -> set[int]:
    """Return the ids of Python's threads, without those by which this package chooses how threads wait."""
    return {t.ident for t in threading.enumerate() if t.ident is not None and t not in waiting.OURS}
