"""The learning rate of each step.

With warm-up of `w` steps of `n` in all, step s from 0 on, peak rate p, last rate e, and r = (s - w) / (n - w)::

    s < w      p * (s + 1) / w
    constant   p
    cosine     e + (p - e) * (1 + cos(pi * r)) / 2
    linear     p - r * (p - e)
    wsd        p until the last fifth of the steps, in which r runs from 0 to 1; then e + (p - e) * (1 - sqrt(r))

Source: llm.c, ``llmc/schedulers.h``; ``wsd`` after Hagele et al. 2024 (arXiv 2405.18392).
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt

COOLDOWN = 0.2
"""The share of ``wsd``'s steps in which the rate decays."""


def _wsd(s: int, n: int) -> float:
    start = n - int(n * COOLDOWN)
    return 1.0 if s < start else 1 - sqrt((s - start) / (n - start))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda s, w, n: 1.0,
    "cosine": lambda s, w, n: (1 + cos(pi * (s - w) / (n - w))) / 2,
    "linear": lambda s, w, n: 1 - (s - w) / (n - w),
    "wsd": lambda s, w, n: _wsd(s, n),
}
"""The position of a step between last and peak rate, after the warm-up."""


def misfit(name: str, steps: int, warmup: int) -> str:
    """Return what a schedule would need to be what it is declared to be; ``""`` if it lacks nothing."""
    if warmup >= steps:
        return f"--warmup-steps {warmup}: expected less than the {steps} steps of the run"
    decay = int(steps * COOLDOWN)
    if name == "wsd" and decay < 2:
        return f"--schedule wsd: the last fifth of {steps} steps is too short to decay; take 10 or more, or linear"
    if name == "wsd" and warmup > steps - decay:
        return f"--warmup-steps {warmup}: expected {steps - decay} at most, behind which wsd decays"
    return ""


def rate(name: str, step: int, *, steps: int, warmup: int, peak: float, end: float) -> float:
    """Return the learning rate of a step.

    Parameters
    ----------
    step : counted from 1.
    steps, warmup : the number of all steps, and of the warm-up steps among them.
    peak, end : the highest rate, and where it falls to.
    """
    s = step - 1
    if s < warmup:
        return peak * (s + 1) / warmup
    return end + (peak - end) * SCHEDULES[name](s, warmup, steps) if name != "constant" else peak
