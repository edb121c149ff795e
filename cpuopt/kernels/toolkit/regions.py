"""The load balance of threads: every parallel region measures each thread's part of it.

Kernels contain no timing. numba starts the threads of a region through one function, ``numba_parallel_for``, whose
address is looked up when a kernel is loaded. `watch` puts a function in its place that notes, for each thread, the time
from when its part begins to when it ends, and then calls numba's own. Kernels loaded before are not seen.

`Log` lists the regions one by one, with the chunks that they are cut into: the iterations of the ``prange``, as numba
hands them to the threads, or the chunks of the queue that threads took from. These take from the first share, which is
empty only where all are.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from numba import config

from ...errors import UserError
from .simd import LINE  # importing it initializes LLVM for this machine, too
from .threads import start

SLOTS = 1024
"""The largest number of parts of a region, more than the threads of any supported machine."""
SYMBOL = "numba_parallel_for"
ROWS = 4096
"""The regions that are listed at a time; older ones are overwritten."""

MODULE = """
declare i32 @clock_gettime(i32, ptr)
@real = global ptr null
@used = global i64 0
@parts = global [{slots} x i64] zeroinitializer
@totals = global [3 x i64] zeroinitializer
@rows = global [{rows} x [6 x i64]] zeroinitializer
@seen = global i64 0
@no_queue = global [{queue} x i32] zeroinitializer
@queue = global ptr @no_queue

define i64 @now() {{
  %t = alloca [2 x i64]
  %r = call i32 @clock_gettime(i32 {clock}, ptr %t)
  %s = load i64, ptr %t
  %p = getelementptr i64, ptr %t, i64 1
  %n = load i64, ptr %p
  %a = mul i64 %s, 1000000000
  %b = add i64 %a, %n
  ret i64 %b
}}

define void @part(ptr %args, ptr %dims, ptr %steps, ptr %both) {{
  %start = call i64 @now()
  %f = load ptr, ptr %both
  %q = getelementptr ptr, ptr %both, i64 1
  %data = load ptr, ptr %q
  call void %f(ptr %args, ptr %dims, ptr %steps, ptr %data)
  %end = call i64 @now()
  %took = sub i64 %end, %start
  %i = atomicrmw add ptr @used, i64 1 monotonic
  %known = icmp ult i64 %i, {slots}
  br i1 %known, label %note, label %done
note:
  %p = getelementptr i64, ptr @parts, i64 %i
  store i64 %took, ptr %p
  br label %done
done:
  ret void
}}

define void @region(ptr %f, ptr %args, ptr %dims, ptr %steps, ptr %data, i64 %inner, i64 %n, i32 %threads) {{
  %both = alloca [2 x ptr]
  store ptr %f, ptr %both
  %second = getelementptr ptr, ptr %both, i64 1
  store ptr %data, ptr %second
  store i64 0, ptr @used
  %real = load ptr, ptr @real
  %queue = load ptr, ptr @queue
  %first = getelementptr i32, ptr %queue, i64 {line}
  %taken0 = load i32, ptr %first
  %begin = call i64 @now()
  call void %real(ptr @part, ptr %args, ptr %dims, ptr %steps, ptr %both, i64 %inner, i64 %n, i32 %threads)
  %finish = call i64 @now()
  %wall = sub i64 %finish, %begin
  %taken1 = load i32, ptr %first
  %untouched = icmp eq i32 %taken0, %taken1
  %dealt = load i32, ptr %queue
  %taken = select i1 %untouched, i32 0, i32 %dealt
  %tickets = sext i32 %taken to i64
  %schedule = load ptr, ptr %args
  %divisions = load i64, ptr %dims
  %many = load i64, ptr @used
  %fits = icmp ult i64 %many, {slots}
  %count = select i1 %fits, i64 %many, i64 {slots}
  br label %loop
loop:
  %i = phi i64 [0, %0], [%next, %add]
  %most = phi i64 [0, %0], [%larger, %add]
  %sum = phi i64 [0, %0], [%more, %add]
  %go = icmp ult i64 %i, %count
  br i1 %go, label %add, label %out
add:
  %p = getelementptr i64, ptr @parts, i64 %i
  %x = load i64, ptr %p
  %gt = icmp ugt i64 %x, %most
  %larger = select i1 %gt, i64 %x, i64 %most
  %more = add i64 %sum, %x
  %next = add i64 %i, 1
  br label %loop
out:
  %t32 = sext i32 %threads to i64
  %slowest = mul i64 %most, %t32
  %q0 = load i64, ptr @totals
  %s0 = add i64 %q0, %slowest
  store i64 %s0, ptr @totals
  %p1 = getelementptr i64, ptr @totals, i64 1
  %q1 = load i64, ptr %p1
  %s1 = add i64 %q1, %sum
  store i64 %s1, ptr %p1
  %p2 = getelementptr i64, ptr @totals, i64 2
  %q2 = load i64, ptr %p2
  %s2 = add i64 %q2, 1
  store i64 %s2, ptr %p2
  br label %division
division:
  %d = phi i64 [0, %out], [%d1, %count1]
  %all = phi i64 [0, %out], [%all1, %count1]
  %largest = phi i64 [0, %out], [%largest1, %count1]
  %left = icmp ult i64 %d, %divisions
  br i1 %left, label %count1, label %log
count1:
  %lo = getelementptr [2 x i64], ptr %schedule, i64 %d, i64 0
  %hi = getelementptr [2 x i64], ptr %schedule, i64 %d, i64 1
  %from = load i64, ptr %lo
  %last = load i64, ptr %hi
  %between = sub i64 %last, %from
  %n1 = add i64 %between, 1
  %some = icmp sgt i64 %n1, 0
  %its = select i1 %some, i64 %n1, i64 0
  %all1 = add i64 %all, %its
  %above = icmp ugt i64 %its, %largest
  %largest1 = select i1 %above, i64 %its, i64 %largest
  %d1 = add i64 %d, 1
  br label %division
log:
  %seen = load i64, ptr @seen
  %at = urem i64 %seen, {rows}
  %row0 = getelementptr [6 x i64], ptr @rows, i64 %at, i64 0
  %row1 = getelementptr [6 x i64], ptr @rows, i64 %at, i64 1
  %row2 = getelementptr [6 x i64], ptr @rows, i64 %at, i64 2
  %row3 = getelementptr [6 x i64], ptr @rows, i64 %at, i64 3
  %row4 = getelementptr [6 x i64], ptr @rows, i64 %at, i64 4
  %row5 = getelementptr [6 x i64], ptr @rows, i64 %at, i64 5
  store i64 %wall, ptr %row0
  store i64 %most, ptr %row1
  store i64 %sum, ptr %row2
  store i64 %all, ptr %row3
  store i64 %largest, ptr %row4
  store i64 %tickets, ptr %row5
  %seen1 = add i64 %seen, 1
  store i64 %seen1, ptr @seen
  ret void
}}
"""

_kept: list[Any] = []
"""The engine that owns the code, and the view of its totals; empty until `watch`."""


class Region(NamedTuple):
    """One region as it ran: its wall time, its slowest thread's and the sum of its threads', in ns, and its chunks.

    Attributes
    ----------
    chunks : the pieces of work that threads took.
    largest : the most of them that a thread was given beforehand; 1 where threads take them by ticket.
    by_ticket : whether a thread that is ready takes the next chunk.
    """

    wall: int
    slowest: int
    work: int
    chunks: int
    largest: int
    by_ticket: bool


class Log:
    """The regions that run, one by one; of kernels that were loaded after `watch`."""

    def __init__(self) -> None:
        if watch() is None:
            raise UserError("this version of numba starts threads in a way that cpuopt cannot watch")
        address = _kept[0].get_global_value_address
        self._rows = np.frombuffer((ctypes.c_int64 * (6 * ROWS)).from_address(address("rows")), np.int64).reshape(-1, 6)
        self._seen = ctypes.c_int64.from_address(address("seen"))
        self._queue = ctypes.c_void_p.from_address(address("queue"))
        self._none, self._read = address("no_queue"), self._seen.value

    def follow(self, queue: np.ndarray[Any, Any] | None) -> None:
        """Watch a queue from now on; without one, no region takes tickets."""
        self._queue.value = self._none if queue is None else queue.ctypes.data

    def regions(self) -> list[Region]:
        """Return the regions since the last call, at most `ROWS`."""
        first, self._read = max(self._read, self._seen.value - ROWS), self._seen.value
        found = []
        for i in range(first, self._read):
            wall, slowest, work, iterations, largest, tickets = self._rows[i % ROWS].tolist()
            if tickets > 0:
                found.append(Region(wall, slowest, work, tickets, 1, True))
            else:
                found.append(Region(wall, slowest, work, iterations, largest, False))
        return found


def watch() -> np.ndarray[Any, Any] | None:
    """Measure the regions of every kernel that is loaded from now on.

    Regions of several threads of Python may run at one time; their measures are then mixed.

    Returns
    -------
    int64 (3,), updated by each region: the sum over regions of threads times the slowest thread's time; the sum of all
    threads' times; the number of regions. Times in ns: the first over the second is the imbalance, 1 at best. None
    where this version of numba starts threads differently.
    """
    if not _kept:
        start(config.NUMBA_NUM_THREADS)
        real = llvm.address_of_symbol(SYMBOL)
        clock = getattr(time, "CLOCK_MONOTONIC", None)
        if real is None or clock is None:
            return None
        module = llvm.parse_assembly(MODULE.format(slots=SLOTS, rows=ROWS, clock=clock, line=LINE, queue=LINE + 1))
        module.verify()
        engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
        engine.finalize_object()
        ctypes.c_void_p.from_address(engine.get_global_value_address("real")).value = real
        totals = (ctypes.c_int64 * 3).from_address(engine.get_global_value_address("totals"))
        llvm.add_symbol(SYMBOL, engine.get_function_address("region"))
        _kept.extend([engine, np.frombuffer(totals, np.int64)])
    watched: np.ndarray[Any, Any] = _kept[1]
    return watched
