"""Strong scaling: the time that calls lose on more threads, by reason, and a prediction for threads that are not there.

A call is timed from outside; `toolkit.regions` times its parallel regions and counts the chunks that each is cut into.
On n threads a call that takes one of them T takes at least T / n. What it takes longer is the sum of four losses:

========= =======================================================================================================
serial    the part outside of regions, of which every thread but one sees nothing
start     the regions' time beyond their slowest thread: until threads begin, and until all know that all have ended
imbalance the slowest thread's time beyond the mean of all threads
shared    the same work takes threads together longer than one alone: they share memory, caches and the clock
========= =======================================================================================================

A prediction takes the times of one thread that runs the kernels cut for n. Chunks of a region count as equal, so the
slowest of n threads does ``ceil(chunks / n)`` of them; a start costs what was measured, and as much more for each
doubling of the threads as the first measured doublings cost; and a call that works in memory takes no less than its
bytes at the bandwidth. It knows neither that caches grow with cores nor that clocks fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

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


def predict(cut: Timed, n: int, start_ns: float, least_ns: float = 0.0) -> Timed:
    """Predict a call on n threads from one thread that ran it, cut for n.

    Parameters
    ----------
    start_ns : the time in which n threads start and end.
    least_ns : the time of the call's bytes at the bandwidth of n threads.
    """
    work = [(r, r.slowest * rounds_of(r.chunks, n) / max(r.chunks, 1)) for r in cut.regions]
    slowest = sum(ns for _, ns in work)
    slower = max(1.0, least_ns / slowest) if slowest else 1.0
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
    nbytes : the bytes that it has to move through memory; 0 if caches hold them.
    """

    op: str
    layer: str
    measured: Mapping[int, Timed]
    cut: Mapping[int, Timed]
    nbytes: float = 0.0

    def predict(self, n: int, starts: Callable[[int], float], gbs: float) -> Timed:
        """Predict its time on n threads."""
        return predict(self.cut[n], n, starts(n), self.nbytes / gbs)


def row(name: str, calls: Sequence[CallTimes], starts: Callable[[int], float], gbs: Mapping[int, float]) -> Row:
    """Sum calls.

    Parameters
    ----------
    gbs : the bandwidth of memory by each number of threads to predict.
    """
    counts = sorted(set.intersection(*({*c.measured} for c in calls)))
    measured = {n: [(c.measured[1], c.measured[n]) for c in calls] for n in counts}
    predicted = {n: [(c.measured[1], c.predict(n, starts, gbs[n])) for c in calls] for n in gbs}
    longest = max(calls, key=lambda c: c.measured[1].wall)
    at = {1: longest.measured[1], **longest.cut}
    chunks = {n: max(t.regions, key=lambda r: r.work).chunks for n, t in sorted(at.items()) if t.regions}
    return Row(
        name=name,
        calls=len(calls),
        ms={n: _ms(pairs) for n, pairs in measured.items()},
        efficiency={n: _efficiency(pairs, n) for n, pairs in measured.items()},
        lost_ms={n: _lost(pairs, n) for n, pairs in measured.items() if n > 1},
        predicted_ms={n: _ms(pairs) for n, pairs in predicted.items()},
        predicted_efficiency={n: _efficiency(pairs, n) for n, pairs in predicted.items()},
        predicted_lost_ms={n: _lost(pairs, n) for n, pairs in predicted.items()},
        chunks=chunks,
    )


def _ms(pairs: Sequence[tuple[Timed, Timed]]) -> float:
    return sum(many.wall for _, many in pairs) / 1e6


def _efficiency(pairs: Sequence[tuple[Timed, Timed]], n: int) -> float:
    return sum(one.wall for one, _ in pairs) / (n * sum(many.wall for _, many in pairs))


def _lost(pairs: Sequence[tuple[Timed, Timed]], n: int) -> dict[str, float]:
    each = [losses(one, many, n) for one, many in pairs]
    return {reason: sum(found[reason] for found in each) / 1e6 for reason in REASONS}
