"""A compiled clock around calls: machine code reads it, calls the kernel, and reads it again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
    """A compiled clock."""

    def __init__(self) -> None:
        self.engine = loaded(DRIVE)
        prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, *[ctypes.py_object] * 2, ctypes.c_void_p)
        self.drive = prototype(self.engine.get_function_address("drive"))

    def spend(self, function: Callable[..., Any], every: Sequence[Sequence[Any]], times: int = 1) -> int:
        """Call a function with each of some arguments; return the ns of all calls."""
        spent = ctypes.c_int64()
        at = ctypes.addressof(spent)
        for _ in range(times):
            for args in every:
                self.drive(CALL, function, tuple(args), at)
        return spent.value
