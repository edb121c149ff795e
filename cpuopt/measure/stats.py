"""What `cpuopt bench` makes of its times: the order of turns, ratios with intervals, agreement, doubts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from ..isolate.process import Steps, Worker

Array = np.ndarray[Any, Any]

CHECKED_STEPS = 3
"""Steps whose losses must agree; they are the warm-up too."""
TOLERANCE = 1e-3
"""How far the losses of one step may differ, relative to the peer's."""
RESAMPLES = 10_000
BUSY_CORES = 0.1
"""What other processes may use of the processors without a doubt cast on the figures."""
FEW_ROUNDS = 6


@dataclass
class Result:
    """One size against one peer; what has two sides is keyed ``cpuopt`` and ``peer``, and is in the order of measuring.

    Attributes
    ----------
    refused : why there is no ratio.
    order : who had its turn, from first to last: A is cpuopt.
    ratios : the peer's time over cpuopt's in each round; a round compares the medians of two turns.
    ratio : their median, and its 95 % interval.
    doubts : what speaks against the figures.
    """

    peer: str
    B: int
    T: int
    threads: int
    refused: str | None = None
    order: str = ""
    steps_per_turn: int = 0
    ratio: dict[str, float] | None = None
    ratios: list[float] = field(default_factory=list)
    step_ms: dict[str, dict[str, Any]] = field(default_factory=dict)
    phases_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_rss_mb: dict[str, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def add_times(self, times: Mapping[str, Steps], turns: Mapping[str, Sequence[float]]) -> None:
        """Work out the figures from all steps, and the median of each turn, of both sides."""
        self.ratios = [b / a for a, b in zip(turns["cpuopt"], turns["peer"], strict=True)]
        self.ratio = interval(float(np.median(self.ratios)), resample(self.ratios))
        for key, steps in times.items():
            ms = steps.step_ms
            self.step_ms[key] = {"median": float(np.median(ms)), "min": min(ms), "max": max(ms), "values": ms}
            self.phases_ms[key] = {p: float(np.median(v)) for p, v in steps.phases_ms.items()}
            self.losses[key] = self.losses[key] + steps.losses

    def add_doubts(self, others_cores: float) -> None:
        """Say what speaks against the figures."""
        assert self.ratio
        if others_cores > BUSY_CORES:
            self.doubts.append(f"other processes used {others_cores:.2f} cores meanwhile")
        if len(self.ratios) < FEW_ROUNDS:
            self.doubts.append(f"{len(self.ratios)} rounds are few: the interval is narrower than 95 %")
        if not all(math.isfinite(loss) for losses in self.losses.values() for loss in losses):
            self.doubts.append("a loss is not finite")
        if self.ratio["low"] <= 1 <= self.ratio["high"]:
            self.doubts.append("no difference shown")


def schedule(rounds: int, seed: int) -> str:
    """Give the order of turns: blocks of two rounds, each A B B A or B A A B."""
    rng = np.random.default_rng(seed)
    return "".join(("ABBA", "BAAB")[i] for i in rng.integers(0, 2, (rounds + 1) // 2))[: 2 * rounds]


def resample(ratios: Sequence[float], seed: int = 0) -> Array:
    """Bootstrap the median: (RESAMPLES,) medians of as many ratios, drawn with replacement."""
    picks = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    return np.asarray(np.median(np.asarray(ratios)[picks], axis=1))


def interval(middle: float, resampled: Array, level: float = 95.0) -> dict[str, float]:
    """Put a figure between the percentiles of its resampled values that hold `level` percent of them."""
    low, high = np.percentile(resampled, [50 - level / 2, 50 + level / 2])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def geometric_mean(ratios_by_size: Sequence[Sequence[float]]) -> dict[str, float]:
    """Average the median ratios of several sizes, with an interval from resampling each."""
    medians = np.log([np.median(r) for r in ratios_by_size])
    resampled = np.mean([np.log(resample(r, seed)) for seed, r in enumerate(ratios_by_size)], axis=0)
    return interval(math.exp(medians.mean()), np.exp(resampled))


def disagreement(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str | None:
    """Say how the losses of the first steps differ, where they differ by too much or are not finite."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        if not (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= TOLERANCE * abs(b)):
            return (
                f"no ratio, because the losses of step {i} differ: cpuopt {a:.6g}, {name} {b:.6g}; expected the same "
                f"within {TOLERANCE:g} of it, from the same weights and batches"
            )
    return None


class Others:
    """What processes other than the workers use of the processors, from now on."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self._start = self._now()

    def cores(self) -> float:
        """Give their use since then, in cores; time that a hypervisor took away is in it."""
        wall, busy = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy / wall)

    def _now(self) -> tuple[float, float]:
        t = psutil.cpu_times()
        busy = sum(getattr(t, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.monotonic(), busy - sum(w.cpu_s() for w in self.workers.values())
