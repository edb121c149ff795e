"""NumPy's functions of whole rows, as loops: a kernel that calls one is read as if it called these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _sum(x: Any) -> Any:
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i]
    return total


def _mean(x: Any) -> Any:
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i]
    return total / x.shape[0]


def _max(x: Any) -> Any:
    most = x[0]
    for i in range(1, x.shape[0]):
        most = max(most, x[i])
    return most


def _min(x: Any) -> Any:
    least = x[0]
    for i in range(1, x.shape[0]):
        least = min(least, x[i])
    return least


def _dot(x: Any, y: Any) -> Any:
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


METHODS: dict[str, Callable[..., Any]] = {"sum": _sum, "mean": _mean, "max": _max, "min": _min, "dot": _dot}
"""The loops by the name of the method and of NumPy's function."""
LOOPS = {id(getattr(np, name)): loop for name, loop in METHODS.items()}
