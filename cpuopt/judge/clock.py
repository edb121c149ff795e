"""A compiled clock around calls: machine code reads it, calls the kernel, and reads it again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..kernels.toolkit.regions import loaded

DRIVE = """
declare i32 @clock_gettime(i32, ptr)

define i64 @now() {
  %t = alloca [2 x i64]
  %ok = call i32 @clock_gettime(i32 1, ptr %t)
  %s = load i64, ptr %t
  %second = getelementptr i64, ptr %t, i64 1
  %ns = load i64, ptr %second
  %whole = mul i64 %s, 1000000000
  %sum = add i64 %whole, %ns
  ret i64 %sum
}

define ptr @drive(ptr %call, ptr %function, ptr %args, ptr %spent) {
  %start = call i64 @now()
  %answer = call ptr %call(ptr %function, ptr %args, ptr null)
  %stop = call i64 @now()
  %took = sub i64 %stop, %start
  %before = load i64, ptr %spent
  %after = add i64 %before, %took
  store i64 %after, ptr %spent
  ret ptr %answer
}
"""
"""``drive(PyObject_Call, function, args, spent)`` in LLVM's language; the clock is Linux's monotonic one."""
CALL = ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p)


class Clock:
    """A compiled clock, and the time for which threads of this process waited for a core."""

    def __init__(self) -> None:
        self.engine = loaded(DRIVE)
        prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, *[ctypes.py_object] * 2, ctypes.c_void_p)
        self.drive = prototype(self.engine.get_function_address("drive"))
        self.files: dict[str, int] = {}

    def spend(self, function: Callable[..., Any], every: Sequence[Sequence[Any]], times: int = 1) -> tuple[int, int]:
        """Call a function with each of some arguments; return the ns of all calls, and those of waiting for cores."""
        spent, before = ctypes.c_int64(), self.waited()
        at = ctypes.addressof(spent)
        for _ in range(times):
            for args in every:
                self.drive(CALL, function, tuple(args), at)
        return spent.value, self.waited() - before

    def waited(self) -> int:
        """Return the ns for which threads of this process have waited for a core so far; 0 if Linux does not tell."""
        found = 0
        with suppress(OSError):
            for n in os.listdir("/proc/self/task"):
                if n not in self.files:
                    self.files[n] = os.open(f"/proc/self/task/{n}/schedstat", os.O_RDONLY)
                with suppress(OSError):  # a thread that ended
                    found += int(os.pread(self.files[n], 64, 0).split()[1])
        return found
