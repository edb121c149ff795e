"""How far a kernel is from what the machine can do: the roofline of Williams, Waterman and Patterson (2009).

A call must do its FLOPs and move its compulsory bytes; whichever takes longer at the machine's measured peak is the
roof that binds. The bytes are held against the bandwidth of the smallest level of the memory hierarchy that could hold
them all, at the best of several patterns of access: a roof is what cannot be passed. More than 100 % of one means that
the roof was measured too low, or that the bytes or FLOPs are counted wrong; it is never a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

FMA = "FMA"
PASSED = 100.0
"""Percent of a roof beyond which there is a warning."""


@dataclass(frozen=True)
class Level:
    """One level of the memory hierarchy.

    Attributes
    ----------
    nbytes : of one cache; None for memory.
    sharers : how many cores share it.
    """

    name: str
    nbytes: int | None
    sharers: int = 1

    def holds(self, threads: int) -> float:
        """Give the bytes that so many threads, each on a core, have of it."""
        return float("inf") if self.nbytes is None else self.nbytes * -(-threads // self.sharers)


@dataclass(frozen=True)
class Roofs:
    """What so many threads of a machine can do at the most.

    Attributes
    ----------
    gflops : multiply-adds in registers, two operations each.
    gbs : by level, by pattern of access.
    launch_us : from calling an empty parallel kernel to its return.
    measured : when.
    doubts : what spoke against the figures when they were measured.
    """

    JSON: ClassVar = ("threads", "gflops", "gbs", "launch_us", "levels", "measured", "doubts")
    threads: int
    levels: tuple[Level, ...]
    gflops: float
    gbs: Mapping[str, Mapping[str, float]]
    launch_us: float
    measured: str = ""
    doubts: tuple[str, ...] = ()

    def bandwidth(self, level: str) -> float:
        """Give a level's GB/s by the best of all patterns."""
        return max(self.gbs[level].values())

    def level(self, nbytes: float) -> str:
        """Name the smallest level that can hold so many bytes."""
        return next(v.name for v in self.levels if v.holds(self.threads) >= nbytes)

    def bound(self, flops: float, nbytes: float) -> tuple[float, str]:
        """Give the least time of a call, in ns, and the roof that sets it: `FMA`, or a level's name."""
        level = self.level(nbytes)
        compute, memory = flops / self.gflops, nbytes / self.bandwidth(level)
        return (compute, FMA) if compute >= memory else (memory, level)
