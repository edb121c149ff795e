"""The distance of a kernel from the limits of the machine: the roofline of Williams, Waterman and Patterson (2009).

A call must do its FLOPs and move its compulsory bytes; whichever takes longer at the machine's measured peak is the
roof that binds. The peak of FLOPs depends on what they multiply: float32, bfloat16 in pairs, or int8. The bytes are
held against the bandwidth of the smallest level of the memory hierarchy that could hold them all, at the best of
several patterns of access: a roof is what cannot be passed. More than 100 % of one means that the roof was measured too
low, or that the bytes or FLOPs are counted wrong; it is never a success. So a call that passes a roof raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ..ops.storage import WIDE

FMA, BF16, INT8 = "FMA", "bf16", "int8"
"""The names of the roofs of multiply-adds of float32, of bfloat16, and of int8."""
PEAKS = {FMA: "gflops", BF16: "bf16_gflops", INT8: "int8_gflops"}
"""The figure of `Roofs` that is such a roof."""
PASSED = 100.0
"""The percentage of a roof beyond which the roof is unfit: it was measured too low."""
UNFIT = "unfit"
"""What stands in place of such a percentage."""


def fits(of_roof: float | None) -> bool:
    """Return whether a percentage of a roof is known, and possible."""
    return of_roof is not None and of_roof <= PASSED


def share(of_roof: float | None, unit: str = "%") -> str:
    """Format a percentage of a roof."""
    return f"{of_roof or 0:.0f}{unit}" if of_roof is None or fits(of_roof) else UNFIT


class TimedCall(NamedTuple):
    """A call that was measured: its op's name, its time, and what it must do in it, as of `Roofs.bound`."""

    op: str
    ns: float
    flops: float
    nbytes: float
    operands: str = WIDE
    held: float | None = None


@dataclass(frozen=True)
class Level:
    """One level of the memory hierarchy.

    Attributes
    ----------
    nbytes : the size of one cache; None for memory.
    sharers : the number of cores that share it.
    """

    name: str
    nbytes: int | None
    sharers: int = 1

    def holds(self, threads: int) -> float:
        """Return the bytes of it for n threads, each on a core."""
        return float("inf") if self.nbytes is None else self.nbytes * -(-threads // self.sharers)


@dataclass(frozen=True)
class Roofs:
    """The roofs of a machine for some number of threads.

    Attributes
    ----------
    gflops : multiply-adds of float32 in registers, two operations each.
    gbs : bandwidth by level, by pattern of access.
    launch_us : the time of a call of an empty parallel kernel.
    measured : the time of the measurement.
    doubts : warnings about the figures at their measurement.
    bf16_gflops : multiply-adds of bfloat16 in registers; None in records of earlier versions.
    bf16_by, int8_by : what computes them: an instruction, or several of float32 or of 16 bits.
    int8_gflops : multiply-adds of int8 in registers; None in records of earlier versions, and no roof then.
    """

    threads: int
    levels: tuple[Level, ...]
    gflops: float
    gbs: Mapping[str, Mapping[str, float]]
    launch_us: float
    measured: str = ""
    doubts: tuple[str, ...] = ()
    bf16_gflops: float | None = None
    bf16_by: str = ""
    int8_by: str = ""
    int8_gflops: float | None = None

    def peak(self, operands: str = WIDE) -> tuple[float, str]:
        """Return the GFLOP/s of multiply-adds on a storage type, and the name of this roof."""
        if operands == "int8":
            return self.int8_gflops or inf, INT8
        if operands == "bfloat16" and self.bf16_gflops:
            return self.bf16_gflops, BF16
        return self.gflops, FMA

    def compute_ns(self, work: Mapping[str, float]) -> float:
        """Return the ns that FLOPs take at their peaks.

        Parameters
        ----------
        work : FLOPs, by the storage type of what they multiply.
        """
        return sum(flops / self.peak(operands)[0] for operands, flops in work.items())

    def bandwidth(self, level: str) -> float:
        """Return a level's highest GB/s of all patterns."""
        return max(self.gbs[level].values())

    def level(self, nbytes: float) -> str:
        """Return the smallest level that can hold this many bytes."""
        return next(v.name for v in self.levels if v.holds(self.threads) >= nbytes)

    def ordered(self, fewer: Roofs | None = None) -> Roofs:
        """Return roofs none of which contradicts another: a level delivers at least what the next one out does.

        Parameters
        ----------
        fewer : the roofs of fewer threads, each of which more threads reach too.
        """
        gbs: dict[str, dict[str, float]] = {}
        beyond: Mapping[str, float] = {}
        for name in reversed([v.name for v in self.levels]):
            below = self.gbs.get(name, {}), fewer.gbs.get(name, {}) if fewer else {}, beyond
            gbs[name] = beyond = {
                k: max(of.get(k, 0.0) for of in below) for k in dict.fromkeys(k for b in below for k in b)
            }
        return replace(self, **self.best_peaks(fewer or self), gbs={v.name: gbs[v.name] for v in self.levels})

    def best_peaks(self, other: Roofs) -> dict[str, Any]:
        """Return the higher of each peak, by its name here; None if neither is known."""
        return {name: max(getattr(r, name) or 0.0 for r in (self, other)) or None for name in PEAKS.values()}

    def proven(self, call: TimedCall) -> Roofs:
        """Return roofs that a call does not pass, as far as it proves them too low.

        What the levels nearer than the one that holds all its bytes may have kept since the last call proves nothing.
        """
        names = [v.name for v in self.levels]
        held = call.nbytes if call.held is None else call.held
        at = names.index(self.level(held))
        nearer = sum(v.holds(self.threads) for v in self.levels[:at])
        rate = call.nbytes * (1 - nearer / held if nearer else 1.0) / call.ns
        found, (peak, roof) = self, self.peak(call.operands)
        if call.flops / call.ns > peak:
            higher: dict[str, Any] = {PEAKS[roof]: call.flops / call.ns}
            found = replace(found, **higher)
        if rate > self.bandwidth(names[at]):
            kinds = self.gbs[names[at]]
            found = replace(found, gbs={**self.gbs, names[at]: {**kinds, max(kinds, key=kinds.__getitem__): rate}})
        return found.ordered()

    def bound(self, flops: float, nbytes: float, operands: str = WIDE, held: float | None = None) -> tuple[float, str]:
        """Return the least time of a call, in ns, and the roof that sets it: one of `PEAKS`, or a level's name.

        Parameters
        ----------
        operands : the storage type of what the call multiplies.
        held : the bytes that a level must hold for the call to find its own there; those of the call by default, more
            where calls on other arrays come between, infinity if the caches hold none of them.
        """
        level, (gflops, name) = self.level(nbytes if held is None else held), self.peak(operands)
        compute, memory = flops / gflops, nbytes / self.bandwidth(level)
        return (compute, name) if compute >= memory else (memory, level)


Raise = Callable[[Roofs, Sequence[TimedCall]], tuple[Roofs, list[str]]]
"""What raises roofs that calls have passed, and says so in a line."""
