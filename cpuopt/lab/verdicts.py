"""How good the verdicts of `cpuopt ab` are on this machine now: false alarms, and the difference that is found.

A kernel is compared with itself, as `ab` does it. Each comparison is then replayed with B's times multiplied by a
factor, analysis by analysis, as if B were slower by that much. It has no more rounds than it took, so a difference that
more of them would have found counts as missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import comb
from typing import Any

from ..check.cases import Case
from ..kernels.registry import Kernel
from ..machine import Others
from ..measure.comparison import Comparison, compare, replayed
from .ab import Alone

ELEMENTS = 50_000
"""Elements of the GELU that is compared with itself."""
EFFECTS = (0.5, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50)
"""The planted differences in percent, up to the first that is found often enough."""
FOUND = 95.0
"""The percentage of comparisons that must find a difference."""
ENOUGH = 20
"""The least number of comparisons of which one in twenty may fail."""
CONFIDENCE = 0.95
"""The confidence of the bound on the rate of false alarms."""


def measure(
    kernel: Kernel,
    seconds: float,
    seed: int = 0,
    progress: Callable[[str, float, float], None] = lambda text, done, whole: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Comparison], list[str]]:
    """Compare a kernel with itself until the time is over or Ctrl-C; return all, and what disturbed them."""
    found: list[Comparison] = []
    shape, others, start = Case({"N": ELEMENTS}, adds={}, layers=("x",)), Others(), clock()
    try:
        while not found or clock() - start < seconds:
            progress(f"{len(found)} comparisons", min(clock() - start, seconds), seconds)
            pair = Alone((kernel, kernel), shape, seed + len(found))
            found.append(compare(*pair.trials, seed=seed + len(found)))
            pair.finish()
    except KeyboardInterrupt:
        pass
    few = [f"{len(found)} comparisons are few for a rate: give --seconds more"] * (len(found) < ENOUGH)
    return found, [*few, *others.warnings()]


def rates(found: Sequence[Comparison]) -> dict[str, Any]:
    """Return the rate of false alarms, its upper bound, and the share of each difference that is found, in percent."""
    same = [replayed(c, 1.0).word for c in found]
    false = sum(w in ("faster", "slower") for w in same)
    power: list[dict[str, float]] = []
    for effect in EFFECTS:
        seen = sum(replayed(c, 1 + effect / 100).word == "slower" for c in found)
        power.append({"effect": effect, "found": 100 * seen / max(1, len(found))})
        if power[-1]["found"] >= FOUND:
            break
    enough = next((p["effect"] for p in power if p["found"] >= FOUND), None)
    words = {w: same.count(w) for w in dict.fromkeys(same)}
    alarms = {"false": 100 * false / max(1, len(found)), "at_most": 100 * bound(false, len(found))}
    return {"runs": len(found), "words": words, **alarms, "power": power, "effect": enough}


def bound(k: int, n: int) -> float:
    """Return the upper bound, with `CONFIDENCE`, of a rate that gave k false alarms in n: Clopper and Pearson's."""
    if k >= n:
        return 1.0
    low, high = k / n, 1.0
    for _ in range(50):
        p = (low + high) / 2
        fewer = sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
        low, high = (p, high) if fewer > 1 - CONFIDENCE else (low, p)
    return high
