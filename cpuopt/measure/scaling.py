"""Strong scaling: the time that calls lose on more threads, by reason, and a prediction for threads that are not there.

A call is timed from outside; `toolkit.regions` times its parallel regions and counts the chunks that each is cut into.
On n threads a call that takes one of them T takes at least T / n. What it takes longer is the sum of four losses:

========= =======================================================================================================
serial    the part outside of regions, of which every thread but one sees nothing
start     the regions' time beyond their slowest thread: until threads begin, and until all know that all have ended
imbalance the slowest thread's time beyond the mean of all threads
shared    the same work takes threads together longer than one alone: they share memory, caches and the clock
========= =======================================================================================================

A prediction takes the times of one thread that runs the kernels cut for n, and a `Model` of the machine, which lists
what it assumes, and what of it was compared with a machine of many cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, NamedTuple

from ..kernels.toolkit.regions import Region
from .quartile import lower_quartile

SERIAL, START, IMBALANCE, SHARED = REASONS = ("serial", "start", "imbalance", "shared")
MEANING = {
    SERIAL: "outside of parallel regions",
    START: "until threads begin, and until all know that all have ended",
    IMBALANCE: "the slowest thread beyond the mean",
    SHARED: "the same work takes threads together longer, as they share memory, caches and clock; "
    "below 0 they gain, as from the caches of more cores",
}
"""What each reason of a loss is."""


class Timed(NamedTuple):
    """One call, or all of a step that lies between calls: its time in ns, and its regions."""

    wall: float
    regions: Sequence[Region] = ()

    @property
    def outside(self) -> float:
        """The time outside of regions."""
        return self.wall - sum(r.wall for r in self.regions)

    @property
    def start(self) -> float:
        """The time of regions beyond that of their slowest threads."""
        return sum(r.wall - r.slowest for r in self.regions)

    @property
    def work(self) -> float:
        """The time of all threads."""
        return sum(r.work for r in self.regions)

    def uneven(self, n: int) -> float:
        """Return the time of the slowest of n threads beyond the mean."""
        return sum(r.slowest - r.work / n for r in self.regions)


def losses(one: Timed, many: Timed, n: int) -> dict[str, float]:
    """Return the time by reason that n threads lose; their sum is ``many.wall - one.wall / n``."""
    return {
        SERIAL: many.outside - one.outside / n,
        START: many.start - one.start / n,
        IMBALANCE: many.uneven(n) - one.uneven(1) / n,
        SHARED: (many.work - one.work) / n,
    }


def rounds_of(chunks: int, n: int) -> int:
    """Return how many of equal chunks the busiest of n threads takes."""
    return -(-chunks // n)


def predict(cut: Timed, n: int, start_ns: float, least_ns: float = 0.0, stretch: float = 1.0) -> Timed:
    """Predict a call on n threads from one thread that ran it, cut for n.

    Parameters
    ----------
    start_ns : the time in which n threads start and end.
    least_ns : the time of the call's bytes at the bandwidth of n threads.
    stretch : how many times as long the same work takes threads together.
    """
    work = [(r, r.slowest * rounds_of(r.chunks, n) / max(r.chunks, 1)) for r in cut.regions]
    slowest = sum(ns for _, ns in work)
    slower = max(stretch, least_ns / slowest) if slowest else 1.0
    found = [
        Region(round(ns * slower + start_ns), round(ns * slower), round(r.work * slower), *r[3:]) for r, ns in work
    ]
    return Timed(cut.outside + sum(r.wall for r in found), found)


class Starts:
    """The time in which threads start and end a region, by their number.

    Parameters
    ----------
    measured : ns by number of threads, that of one among them.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.measured = dict(measured)

    def __call__(self, n: int) -> float:
        """Return the measured time; beyond, a line through one thread and the most, over doublings."""
        if n in self.measured:
            return self.measured[n]
        most, one = max(self.measured), self.measured[1]
        return one + (max(0.0, self.measured[most] - one) * log2(n) / log2(most) if most > 1 else 0.0)


def start_of(calls: Iterable[Timed]) -> float:
    """Return the time of a region beyond its slowest thread, the lower quartile of all."""
    found = [r.wall - r.slowest for t in calls for r in t.regions]
    return lower_quartile(found) if found else 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Some calls of a step, summed.

    Attributes
    ----------
    ms, efficiency, lost_ms : by number of threads: the time; the share of it that a perfect division would take; the
        time beyond that share, by reason.
    predicted_ms, predicted_efficiency, predicted_lost_ms : the same, predicted from one thread.
    chunks : by number of threads, those of the region that takes one thread longest.
    """

    name: str
    calls: int
    ms: dict[int, float]
    efficiency: dict[int, float]
    lost_ms: dict[int, dict[str, float]]
    predicted_ms: dict[int, float]
    predicted_efficiency: dict[int, float]
    predicted_lost_ms: dict[int, dict[str, float]]
    chunks: dict[int, int]


@dataclass(frozen=True)
class CallTimes:
    """One call of a step: its op's id, its layer, and its times.

    Attributes
    ----------
    measured : by number of threads, which ran the kernel cut for as many.
    cut : by number of threads: one thread that ran the kernel cut for so many.
    nbytes : the bytes that it has to move.
    held : whether caches hold them.
    updates : whether it updates arrays in place.
    """

    op: str
    layer: str
    measured: Mapping[int, Timed]
    cut: Mapping[int, Timed]
    nbytes: float = 0.0
    held: bool = False
    updates: bool = False


XEON = "a Xeon with 16 threads"
"""The machine of many threads that predictions from two were compared with: docs/results/scaling.md."""


@dataclass(frozen=True)
class Model:
    """A machine that steps are predicted for, as `assumptions` says.

    Parameters
    ----------
    starts : of regions.
    gbs : the bandwidth of all memory, by each number of threads to predict.
    caches : the last-level caches over which threads are spread.
    nodes : the memory nodes.
    missed : how many times as long as predicted without it the work took the most threads that were measured.
    """

    starts: Starts
    gbs: Mapping[int, float]
    caches: int = 1
    nodes: int = 1
    missed: float = 1.0

    def fitted(self, calls: Sequence[CallTimes]) -> Model:
        """Return the model with what it misses of the most threads that were measured."""
        most = max(self.starts.measured)
        if most == 1 or most not in self.gbs:
            return self
        pairs = [(c.measured[most].wall, self.predict(c, most)) for c in calls]
        work = sum(r.slowest for _, t in pairs for r in t.regions)
        late = sum(wall - t.wall for wall, t in pairs)
        return replace(self, missed=max(1.0, 1 + late / work) if work else 1.0)

    def stretch(self, n: int) -> float:
        """Return how many times as long the same work takes n threads together; 1 for a number that was measured."""
        most = max(self.starts.measured)
        known = most == 1 or n in self.starts.measured
        return 1.0 if known else 1 + (self.missed - 1) * log2(n) / log2(most)

    def predict(self, call: CallTimes, n: int) -> Timed:
        """Predict a call on n threads; for a number that was measured, with the caches and nodes of this machine."""
        caches, nodes = (1, 1) if n in self.starts.measured else (self.caches, self.nodes)
        moved = call.nbytes * (1 - 1 / caches if call.held else 1) * (1 if call.updates else nodes)
        return predict(call.cut[n], n, self.starts(n), moved / self.gbs[n], self.stretch(n))

    def assumptions(self, n: int, here: bool) -> list[str]:
        """List what the model assumes for n threads, and what of it was ever checked.

        Parameters
        ----------
        here : whether the bandwidth is that of this machine.
        """
        most, memory = max(self.starts.measured), f"memory delivers {self.gbs[n]:.0f} GB/s"
        found = {
            "each thread has a core like those of this machine, at the same clock and with the same private caches": (
                f"{XEON}: wrong, two of them share a core"
            ),
            "chunks of a region take equally long, and none waits for another": f"{XEON}: wrong, some take longer",
            f"{n} threads start and end a region in {self.starts(n) / 1e3:.1f} µs; each doubling costs what those "
            "measured here cost": f"{XEON}: right",
            f"the same work takes {self.stretch(n):.2f} times as long: what {most} threads take beyond the other "
            "assumptions recurs with each doubling": f"{XEON}: too little",
            f"{memory}{', as all cores get here' if here else ''}": "",
        }
        if self.caches > 1:
            found[
                f"threads are spread over {self.caches} caches: of what a call reads and writes, {self.caches - 1} of "
                f"{self.caches} parts come from another cache, as fast as from memory"
            ] = ""
        if self.nodes > 1:
            found[
                f"memory has {self.nodes} nodes: what is updated lies in the node of its threads, and all else that a "
                f"call moves in one node, which delivers {self.gbs[n] / self.nodes:.0f} GB/s"
            ] = ""
        return [f"{text} ({known or 'never checked on a real machine'})" for text, known in found.items()]


def row(name: str, calls: Sequence[CallTimes], model: Model) -> Row:
    """Sum calls, measured and predicted for each number of threads that the model has a bandwidth for."""
    counts = sorted(set.intersection(*({*c.measured} for c in calls)))
    measured = {n: [(c.measured[1], c.measured[n]) for c in calls] for n in counts}
    predicted = {n: [(c.measured[1], model.predict(c, n)) for c in calls] for n in model.gbs}
    longest = max(calls, key=lambda c: c.measured[1].wall)
    at = {1: longest.measured[1], **longest.cut}
    chunks = {n: max(t.regions, key=lambda r: r.work).chunks for n, t in sorted(at.items()) if t.regions}
    return Row(name=name, calls=len(calls), **_figures(measured), **_figures(predicted, "predicted_"), chunks=chunks)


def _figures(pairs: Mapping[int, Sequence[tuple[Timed, Timed]]], prefix: str = "") -> dict[str, Any]:
    """Sum calls on one thread and on several, by number of threads."""
    one, many = ({n: sum(pair[i].wall for pair in of) for n, of in pairs.items()} for i in (0, 1))
    lost = {n: [losses(*pair, n) for pair in of] for n, of in pairs.items() if n > 1}
    return {
        f"{prefix}ms": {n: ns / 1e6 for n, ns in many.items()},
        f"{prefix}efficiency": {n: one[n] / (n * ns) for n, ns in many.items()},
        f"{prefix}lost_ms": {n: {r: sum(x[r] for x in each) / 1e6 for r in REASONS} for n, each in lost.items()},
    }
