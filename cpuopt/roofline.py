"""How far a kernel is from what the machine can do: the roofline of Williams, Waterman and Patterson (2009).

A call must do its FLOPs and move its compulsory bytes; whichever takes longer at the machine's measured peak is the
roof that binds. The bytes are held against the bandwidth of the smallest level of the memory hierarchy that could hold
them all, at the best of several patterns of access: a roof is what cannot be passed. More than 100 % of one means that
the roof was measured too low, or that the bytes or FLOPs are counted wrong; it is never a success.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .wording import count

if TYPE_CHECKING:
    from .profile import LayerRow, OpRow, Profile

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

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        return {
            "threads": self.threads,
            "gflops": self.gflops,
            "gbs": {level: dict(kinds) for level, kinds in self.gbs.items()},
            "launch_us": self.launch_us,
            "levels": [vars(v) for v in self.levels],
            "measured": self.measured,
            "doubts": list(self.doubts),
        }

    @staticmethod
    def from_json(d: Mapping[str, Any]) -> Roofs:
        """Read what `to_json` gave."""
        return Roofs(
            int(d["threads"]),
            tuple(Level(**v) for v in d["levels"]),
            float(d["gflops"]),
            d["gbs"],
            float(d["launch_us"]),
            str(d.get("measured", "")),
            tuple(d.get("doubts", ())),
        )


def passed(rows: Iterable[OpRow | LayerRow]) -> list[str]:
    """List what is said to be faster than its roof."""
    found = []
    for r in rows:
        if r.of_roof is not None and r.of_roof > PASSED:
            found.append(f"{r.op} is at {r.of_roof:.1f} % of the {r.roof} roof, which cannot be")
    return found


def words(p: Profile) -> str:
    """Say in words where the time of a step goes, and where the most of it could be saved."""
    step = p.step_ms["mean"]
    text = f"A step takes {step:,.1f} ms"
    if p.mfu is not None:
        text += f", {p.mfu:.0f} % of the FMA peak of {count(p.threads, 'thread')} (MFU)"
    rows = [r for r in p.ops if r.kernels]
    families: dict[str, list[OpRow]] = {}
    for r in rows:
        families.setdefault(r.op.split()[0], []).append(r)
    name, most = max(families.items(), key=lambda f: sum(r.ms for r in f[1]))
    ms = sum(r.ms for r in most)
    text += f". {name} is {100 * ms / step:.0f} % of it"
    if all(r.of_roof is not None for r in rows) and p.mfu is not None:
        least = sum(r.ms * (r.of_roof or 0) / 100 for r in most)
        text += f", at {100 * least / ms:.0f} % of its roof"
        where, room, at, roof = largest_room(p.layers)
        text += f". The most room is in {where}: {room:,.{1 if room >= 1 else 3}f} ms more than its {roof} roof allows"
        text += f" ({at:.0f} % of it)"
        uneven = max(rows, key=lambda r: ((r.imbalance or 1) - 1) * r.ms)
        if (uneven.imbalance or 1) > 1.1:
            text += f". Threads wait most in {uneven.op}: the slowest takes {uneven.imbalance:.2f} times the mean"
    return text + "."


def largest_room(layers: Sequence[LayerRow]) -> tuple[str, float, float, str]:
    """Find the op, over all blocks alike, that is furthest from its roof in ms: its name, ms, percent and roof."""
    groups: dict[tuple[str, str], list[LayerRow]] = {}
    for r in layers:
        groups.setdefault((r.op, re.sub(r"\.\d+(?=\.|$)", ".*", r.layer)), []).append(r)

    def room(rows: Sequence[LayerRow]) -> float:
        return sum(r.ms * (1 - (r.of_roof or 0) / 100) for r in rows)

    (op, layer), rows = max(groups.items(), key=lambda g: room(g[1]))
    ms = sum(r.ms for r in rows)
    return f"{op} in {layer}", room(rows), 100 * (1 - room(rows) / ms), max(rows, key=lambda r: r.ms).roof
