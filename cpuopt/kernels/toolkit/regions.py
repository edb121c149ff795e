"""The load balance of threads: every parallel region measures each thread's part of it.

Kernels contain no timing. numba starts the threads of a region through one function, ``numba_parallel_for``, whose
address is looked up when a kernel is loaded. `watch` puts a function in its place that notes, for each thread, when its
part begins and when it ends, and then calls numba's own. Kernels loaded before are not seen. `PartLog` has these.

`Log` lists the regions one by one, with the chunks that they are cut into: the iterations of the ``prange``, as numba
hands them to the threads, or the chunks of the queue that threads took from. These take from the first share, which is
empty only where all are.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config
from numba.core import cgutils

from ...errors import UserError
from .simd import I32, I64, LINE, POINTER  # importing it initializes LLVM for this machine, too
from .threads import start

SLOTS = 1024
"""The largest number of parts of a region, more than the threads of any supported machine."""
SYMBOL = "numba_parallel_for"
PART = ir.FunctionType(ir.VoidType(), [POINTER] * 4)
REGION = ir.FunctionType(ir.VoidType(), [POINTER] * 5 + [I64, I64, I32])
"""The types of a thread's part of a region and of ``numba_parallel_for``."""
ROWS = 4096
"""The regions that are listed at a time; older ones are overwritten."""
NUMBERS = 6
"""The numbers of a region that is listed: those of `Region`, with its iterations and its tickets for the chunks."""
PARTS = 1 << 16
"""The parts of threads that are listed at a time."""


class _Emit(ir.IRBuilder):
    """A builder that counts in elements of memory: of int64, or of another type."""

    def place(self, pointer: Any, i: Any, unit: Any = I64) -> Any:
        """Point to an element."""
        pointer = self.bitcast(pointer, unit.as_pointer())
        return self.gep(pointer, [I64(i) if isinstance(i, int) else i], source_etype=unit)

    def read(self, pointer: Any, i: Any = 0, unit: Any = I64) -> Any:
        """Load an element."""
        return self.load(self.place(pointer, i, unit=unit), typ=unit)

    def largest_and_sum(self, count: Any, item: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Go through `count` numbers that are not negative."""
        most, total = (cgutils.alloca_once_value(self, I64(0)) for _ in range(2))
        with cgutils.for_range(self, count) as loop:
            x, known = item(loop.index), self.read(most)
            self.store(self.select(self.icmp_signed(">", x, known), x, known), most)
            self.store(self.add(self.read(total), x), total)
        return self.read(most), self.read(total)


class _Module(ir.Module):
    """The functions that stand between a kernel and numba's threads, and what they note."""

    def __init__(self, clock: int) -> None:
        super().__init__()
        self.real, self.queue = self.variable("real", POINTER), self.variable("queue", POINTER)
        self.no_queue = self.variable("no_queue", ir.ArrayType(I32, LINE + 1))
        self.used, self.seen = self.variable("used", I64), self.variable("seen", I64)
        self.parts = self.variable("parts", ir.ArrayType(I64, SLOTS))
        self.totals = self.variable("totals", ir.ArrayType(I64, 3))
        self.rows = self.variable("rows", ir.ArrayType(I64, ROWS * NUMBERS))
        self.ended, self.log = self.variable("ended", I64), self.variable("log", ir.ArrayType(I64, PARTS * 3))
        self.thread = ir.Function(self, ir.FunctionType(I64, []), "pthread_self")
        self.clock = ir.Function(self, ir.FunctionType(I32, [I32, POINTER]), "clock_gettime"), I32(clock)
        self.part = ir.Function(self, PART, "part")
        self.write_part(_Emit(self.part.append_basic_block()), *self.part.args)
        region = ir.Function(self, REGION, "region")
        self.write_region(_Emit(region.append_basic_block()), *region.args)

    def variable(self, name: str, kind: Any) -> Any:
        """Define a global variable of zeros."""
        made = ir.GlobalVariable(self, kind, name)
        made.initializer = ir.Constant(kind, None)
        return made

    def now(self, b: _Emit) -> Any:
        """Read the clock, in ns."""
        function, clock = self.clock
        time = cgutils.alloca_once(b, I64, size=2)
        b.call(function, [clock, time])
        return b.add(b.mul(b.read(time), I64(10**9)), b.read(time, 1))

    def write_part(self, b: _Emit, args: Any, dims: Any, steps: Any, both: Any) -> None:
        """Run a thread's part of a region, and note its time."""
        start = self.now(b)
        b.call(b.read(both, unit=PART.as_pointer()), [args, dims, steps, b.read(both, 1, POINTER)])
        end = self.now(b)
        i = b.atomic_rmw("add", self.used, I64(1), "monotonic")
        with b.if_then(b.icmp_unsigned("<", i, I64(SLOTS))):
            b.store(b.sub(end, start), b.place(self.parts, i))
        n = b.atomic_rmw("add", self.ended, I64(1), "monotonic")
        row = b.place(self.log, b.mul(b.urem(n, I64(PARTS)), I64(3)))
        for i, x in enumerate((b.call(self.thread, []), start, end)):
            b.store(x, b.place(row, i))
        b.ret_void()

    def write_region(
        self, b: _Emit, f: Any, args: Any, dims: Any, steps: Any, data: Any, inner: Any, n: Any, threads: Any
    ) -> None:
        """Run a region, and list it; its first argument has the first and the last iteration of each thread."""
        both = b.alloca(POINTER, size=2)
        b.store(f, b.place(both, 0, unit=POINTER))
        b.store(data, b.place(both, 1, unit=POINTER))
        b.store(I64(0), self.used)
        real, queue = b.read(self.real, unit=REGION.as_pointer()), b.read(self.queue, unit=POINTER)
        taken, start = b.read(queue, LINE, I32), self.now(b)
        b.call(real, [self.part, args, dims, steps, both, inner, n, threads])
        wall = b.sub(self.now(b), start)
        untouched = b.icmp_signed("==", taken, b.read(queue, LINE, I32))
        tickets = b.sext(b.select(untouched, I32(0), b.read(queue, unit=I32)), I64)
        used = b.read(self.used)
        used = b.select(b.icmp_unsigned("<", used, I64(SLOTS)), used, I64(SLOTS))
        slowest, work = b.largest_and_sum(used, lambda i: b.read(self.parts, i))
        schedule = b.read(args, unit=POINTER)

        def iterations(i: Any) -> Any:
            first, last = (b.read(schedule, b.add(b.add(i, i), I64(end))) for end in range(2))
            count = b.add(b.sub(last, first), I64(1))
            return b.select(b.icmp_signed(">", count, I64(0)), count, I64(0))

        largest, every = b.largest_and_sum(b.read(dims), iterations)
        for i, x in enumerate((b.mul(slowest, b.sext(threads, I64)), work, I64(1))):
            b.store(b.add(b.read(self.totals, i), x), b.place(self.totals, i))
        seen = b.read(self.seen)
        row = b.place(self.rows, b.mul(b.urem(seen, I64(ROWS)), I64(NUMBERS)))
        for i, x in enumerate((wall, slowest, work, every, largest, tickets)):
            b.store(x, b.place(row, i))
        b.store(b.add(seen, I64(1)), self.seen)
        b.ret_void()


_kept: list[Any] = []
"""The engine that owns the code, and the view of its totals; empty until `watch`."""


class Region(NamedTuple):
    """One region as it ran: its wall time, its slowest thread's and the sum of its threads', in ns, and its chunks.

    Attributes
    ----------
    chunks : the pieces of work that threads took.
    largest : the most of them that a thread was given beforehand; 1 if threads take them by ticket.
    by_ticket : whether a thread that is ready takes the next chunk.
    """

    wall: int
    slowest: int
    work: int
    chunks: int
    largest: int
    by_ticket: bool


class _Rows:
    """Rows of numbers that the code of `watch` writes one after the other: the newest of them.

    Parameters
    ----------
    rows, count : the names of their memory and of their counter there.
    """

    def __init__(self, rows: str, count: str, size: int, width: int) -> None:
        if watch() is None:
            raise UserError("this version of numba starts threads in a way that cpuopt cannot watch")
        self.address = _kept[0].get_global_value_address
        content = (ctypes.c_int64 * (size * width)).from_address(self.address(rows))
        self._rows = np.frombuffer(content, np.int64).reshape(size, width)
        self._count = ctypes.c_int64.from_address(self.address(count))
        self._read = self._count.value

    def take(self) -> np.ndarray[Any, Any]:
        """Return the rows since the last call, as long as no newer ones took their places."""
        first, self._read = max(self._read, self._count.value - len(self._rows)), self._count.value
        return self._rows[np.arange(first, self._read) % len(self._rows)]


class PartLog(_Rows):
    """What threads do in regions: the number of a thread by ``pthread_self``, and when its part begins and ends, in ns.

    `take` returns int64 (n, 3), at most `PARTS`; of kernels that were loaded after `watch`.
    """

    def __init__(self) -> None:
        super().__init__("log", "ended", PARTS, 3)


class Log(_Rows):
    """The regions that run, one by one; of kernels that were loaded after `watch`."""

    def __init__(self) -> None:
        super().__init__("rows", "seen", ROWS, NUMBERS)
        self._queue, self._none = ctypes.c_void_p.from_address(self.address("queue")), self.address("no_queue")

    def follow(self, queue: np.ndarray[Any, Any] | None) -> None:
        """Watch a queue from now on; without one, no region takes tickets."""
        self._queue.value = self._none if queue is None else queue.ctypes.data

    def regions(self) -> list[Region]:
        """Return the regions since the last call, at most `ROWS`."""
        found = []
        for wall, slowest, work, iterations, largest, tickets in self.take().tolist():
            if tickets > 0:
                found.append(Region(wall, slowest, work, tickets, 1, True))
            else:
                found.append(Region(wall, slowest, work, iterations, largest, False))
        return found


def loaded(text: str) -> Any:
    """Compile a module in LLVM's language; return the engine that owns its code."""
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


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
        engine = loaded(str(_Module(clock)))
        for name, to in ("real", real), ("queue", engine.get_global_value_address("no_queue")):
            ctypes.c_void_p.from_address(engine.get_global_value_address(name)).value = to
        totals = (ctypes.c_int64 * 3).from_address(engine.get_global_value_address("totals"))
        llvm.add_symbol(SYMBOL, engine.get_function_address("region"))
        _kept.extend([engine, np.frombuffer(totals, np.int64)])
    watched: np.ndarray[Any, Any] = _kept[1]
    return watched
