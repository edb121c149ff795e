"""Memory planning: from lifetimes to offsets to one allocation.

Parameters, constants, moments and inputs live through all steps and lie one after the other. All others share one
pool: two values may have the same bytes when no call needs both.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import psutil

from ..errors import UserError
from ..machine import available_bytes
from ..ops.declaration import Spec
from ..ops.storage import TYPES
from .program import Call, Group, Program, Value

ALIGN = 64
"""Bytes: a cache line, and the widest vector."""
PAGE = 2 << 20
"""Bytes of a huge page."""
SMALL_PAGE = 4096
PERSISTENT = ("parameter", "copy", "constant", "moment", "input")
LABELS = {**{group: f"{group}s" for group in get_args(Group)}, "copy": "copies", "scratch": "scratch"}


def gb(n: float) -> str:
    """Format a number of bytes in a suitable unit."""
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB" if n >= 1e5 else f"{n / 1e3:.2f} kB"


def align(n: int) -> int:
    """Round up to whole cache lines."""
    return -(-n // ALIGN) * ALIGN


@dataclass
class ArenaPlan:
    """The place of each value in the arena.

    Attributes
    ----------
    offsets : the offset of each value, in bytes.
    groups : the bytes of each group, each value counted once.
    pool_bytes : size of the shared pool.
    total_bytes : size of the arena.
    window_bytes : size of each rank's memory that all ranks see. The first rank's begins behind the arena, then come
        those of the others.
    """

    offsets: dict[Value, int]
    lifetimes: dict[Value, tuple[int, int]]
    scratch: dict[Call, dict[str, Value]]
    groups: dict[str, int] = field(default_factory=dict)
    pool_bytes: int = 0
    total_bytes: int = 0
    window_bytes: int = 0

    def describe(self) -> dict[str, int]:
        """Bytes by group, the bytes saved by sharing, and the total."""
        pooled = sum(n for g, n in self.groups.items() if g not in PERSISTENT)
        named = {LABELS[g]: n for g, n in self.groups.items()}
        return {**named, "shared": self.pool_bytes - pooled, "arena": self.total_bytes + self.window_bytes}

    def verify(self) -> None:
        """Check that no two values that live at one time share a byte.

        Raises
        ------
        UserError
            Naming the two values.
        """
        spans = sorted(((o, v) for v, o in self.offsets.items() if v.nbytes), key=lambda span: span[0])
        ends, born, died = np.empty((3, len(spans)), np.int64)
        for n, (offset, v) in enumerate(spans):
            first, last = self.lifetimes[v]
            both = (ends[:n] > offset) & (born[:n] <= last) & (died[:n] >= first)
            if both.any():
                raise UserError(f"arena: {spans[both.argmax()][1]} and {v} live at one time and share bytes")
            ends[n], born[n], died[n] = offset + v.nbytes, first, last


def lifetimes(program: Program, keep: Collection[Value] = ()) -> dict[Value, tuple[int, int]]:
    """Find the first and last call that touches each value; persistent values, outputs and norm terms live to the end.

    Parameters
    ----------
    keep : values that live through all calls, since the program runs several times before they are used.
    """
    last = len(program.calls)
    weights = [*program.parameters, *program.scales.values()]  # first, so that programs for other sizes share them
    lasting = [*weights, *program.kept, *program.constants, *program.inputs, *program.moments, *keep]
    always = dict.fromkeys(lasting, (-1, last))
    spans = dict(always)
    for i, call in enumerate(program.calls):
        for v in [*call.reads, *call.writes]:
            if v not in always:
                spans[v] = (spans.get(v, (i, i))[0], i)
    for v in [*program.outputs, *program.norm_terms]:
        spans[v] = (spans[v][0], last)
    return spans


def plan(
    program: Program, scratch: Sequence[Mapping[str, Spec]] = (), keep: Collection[Value] = (), rank: int = 0
) -> ArenaPlan:
    """Assign an offset to every value, and check the result.

    Parameters
    ----------
    scratch : for each call, the working memory that its kernel asks for, by name.
    keep : values that share their bytes with none.
    rank : the number of this process among those that see one window.
    """
    spans = lifetimes(program, keep)
    for v in [*program.within, *program.window]:
        spans.pop(v, None)
    working: dict[Call, dict[str, Value]] = {}
    for i, (call, wanted) in enumerate(zip(program.calls, scratch, strict=False)):
        name = f"{call.layer}.{call.op.name}"
        working[call] = {n: Value(f"{name}.{n}", shape, dtype=dtype) for n, (shape, dtype) in wanted.items()}
        spans.update(dict.fromkeys(working[call].values(), (i, i)))
    result = ArenaPlan({}, spans, working)
    end = 0
    for v in spans:
        if v.group in PERSISTENT:
            result.offsets[v] = end
            end += align(v.nbytes)
    pool_start = end
    pooled = [v for v in spans if v.group not in PERSISTENT]
    lows, highs, born, died = np.empty((4, len(pooled)), np.int64)  # of those that have a place
    for n, v in enumerate(sorted(pooled, key=lambda v: (-v.nbytes, spans[v]))):
        (first, last), size = spans[v], align(v.nbytes)
        beside = np.flatnonzero((born[:n] <= last) & (died[:n] >= first))
        beside = beside[np.argsort(lows[beside])]
        free = np.maximum.accumulate(np.append(pool_start, highs[beside]))  # before each, and after all
        fits = np.flatnonzero(lows[beside] - free[:-1] >= size)
        result.offsets[v] = offset = int(free[fits[0]] if fits.size else free[-1])  # the lowest gap
        lows[n], highs[n], born[n], died[n] = offset, offset + size, first, last
        end = max(end, offset + size)
    in_scratch = {v for parts in working.values() for v in parts.values()}
    for v in spans:
        group = "scratch" if v in in_scratch else v.group
        result.groups[group] = result.groups.get(group, 0) + v.nbytes
    result.pool_bytes, result.total_bytes = end - pool_start, align(end)
    result.verify()
    for v in program.window:
        spans[v] = -1, len(program.calls)
        result.offsets[v] = result.window_bytes
        result.window_bytes += align(v.nbytes)
        result.groups[v.group] = result.groups.get(v.group, 0) + v.nbytes
    result.window_bytes = -(-result.window_bytes // SMALL_PAGE) * SMALL_PAGE
    for v in program.window:
        result.offsets[v] += result.total_bytes + rank * result.window_bytes
    for v, place in program.within.items():
        away = 0 if place.peer is None else (place.peer - rank) * result.window_bytes
        result.offsets[v] = result.offsets[place.host] + place.start * TYPES[v.dtype].bytes + away
    return result


def resident_bytes() -> int:
    """The memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


class Arena:
    """One aligned allocation, on huge pages where the system offers them.

    Attributes
    ----------
    window : bytes allocated elsewhere; their offsets follow those of the allocation.
    """

    def __init__(self, total_bytes: int) -> None:
        self.window: np.ndarray[Any, Any] | None = None
        size = -(-max(total_bytes, 1) // PAGE) * PAGE + PAGE
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._total = total_bytes
        self._start = -np.frombuffer(self._map, np.uint8).ctypes.data % PAGE

    def view(self, value: Value, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a value's bytes as an array of its dtype.

        Whatever is cut out of the array keeps it alive: NumPy would refer to the memory at once if that were an array.
        """
        if offset >= self._total and self.window is not None:
            return np.ndarray(shape, TYPES[value.dtype].dtype, self.window, offset - self._total)
        return np.ndarray(shape, TYPES[value.dtype].dtype, self._map, self._start + offset)


def check_fits(needed: int, hint: Callable[[int], str]) -> None:
    """Refuse an arena that the memory cannot hold.

    Raises
    ------
    UserError
        With both sizes, and the advice of `hint`, which takes the available one.
    """
    there = available_bytes()
    if needed > there:
        raise UserError(f"the arena needs {gb(needed)} and {gb(there)} of memory are available; {hint(there)}")
