"""Lines over steps: the loss, and how long each step took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isfinite

from ...lab.records import Point
from .markup import Markup, join, tag
from .svg import WIDTH, LinearScale, Points, axes, legend, picture, short
from .svg import lines as draw

LEFT, TOP = 62, 30
MOST_POINTS = 2000
"""The points of a line that show a tooltip. A longer line is drawn whole, with a tooltip at each n-th step."""


def curve(lines: Mapping[str, Sequence[Point]], y_name: str, height: int = 300, zero: bool = False) -> Markup:
    """Draw lines over steps. A line is broken where its value is not finite, and a note lists these steps.

    Parameters
    ----------
    lines : values by step, by the line's name; None is not finite.
    zero : whether the axis begins at zero.
    """
    finite = {n: [(s, v) for s, v in line if v is not None and isfinite(v)] for n, line in lines.items()}
    values = [v for line in finite.values() for _, v in line]
    if not values:
        return tag("p", f"No step has a finite {y_name}.", class_="note")
    steps = [s for line in finite.values() for s, _ in line]
    margin = (max(values) - min(values)) * 0.06 or abs(values[0]) * 0.05 or 1.0
    x = LinearScale(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - 20)
    y = LinearScale(0 if zero else min(values) - margin, max(values) + margin, height - 45, TOP)
    series: list[tuple[str, Points]] = []
    for i, (name, line) in enumerate(lines.items()):
        told = {s for s, _ in finite[name][:: -(-len(finite[name]) // MOST_POINTS)]}
        for fine, run in groupby(line, key=lambda p: p[1] is not None and isfinite(p[1])):
            points = [(s, v, _tip(s, v, name) if s in told else "") for s, v in run if fine and v is not None]
            series += [(f"line line{i}", points)] * fine
    parts = [*axes(x, y, "step", y_name, [t for t in x.ticks() if t == round(t)]), *draw(x, y, series)]
    notes = []
    for name, line in lines.items():
        bad = [str(s) for s, v in line if v is None or not isfinite(v)]
        if bad:
            notes.append(f"{name} is not finite at step {', '.join(bad[:20])}{' and more' if len(bad) > 20 else ''}.")
    names = legend(((f"line{i}", n) for i, n in enumerate(lines)), "line") if len(lines) > 1 else None
    return join(names, picture(height, f"{y_name} over steps", parts), [tag("p", n, class_="note") for n in notes])


def _tip(step: int, value: float, name: str) -> str:
    return f"step {step}\n{name} {short(value) if abs(value) >= 1000 else f'{value:.4g}'}"
