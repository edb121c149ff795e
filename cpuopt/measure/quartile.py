"""The estimator of a time: the lower quartile of several measurements.

Other processes lengthen a measurement and never shorten it, so a mean or a median of a busy machine is theirs as much
as the program's. The lower quartile holds as long as a quarter of the measurements is undisturbed, and unlike the
minimum it is no single lucky one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

X = TypeVar("X")
LEAST, MOST, ENOUGH_S = 5, 20, 1.0
"""The least and the most steps of a profile if no number is given; between them, it ends when it has taken so long."""
APART = 1.05
"""The ratio of the mean to the lower quartile from which both are shown."""


def lower_quartile(found: Iterable[X], key: Callable[[X], Any] | None = None) -> X:
    """Return the measurement that a quarter of all are faster than, whole, so that its parts belong together.

    Parameters
    ----------
    key : the time of a measurement that has several parts.
    """
    ordered: list[X] = sorted(found, key=key)  # type: ignore[type-var, arg-type]
    return ordered[(len(ordered) - 1) // 4]


def apart(quiet: float, mean: float) -> bool:
    """Return whether other processes have moved a mean so far from the lower quartile that both are shown."""
    return mean > APART * quiet
