"""Figures as they are said everywhere."""

from __future__ import annotations

from collections.abc import Mapping


def count(n: int, word: str) -> str:
    """As in ``1 thread`` and ``2 threads``."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def spread(ratio: Mapping[str, float], digits: int = 3) -> str:
    """Give a ratio with its interval, as in ``1.270 [1.251, 1.292]``."""
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def four(x: float) -> str:
    """Give about four digits."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"
