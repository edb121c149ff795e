"""Parts of the pictures: scales with round ticks, a frame with axes, a legend, formatted numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from ...program.program import PARTS
from .labels import CHAR
from .markup import Markup, tag

if TYPE_CHECKING:
    from ...measure.profile import LayerRow

WIDTH = 1080
"""Width of a picture in its own units; the page scales it to its own width."""
SHADES = 9
"""The darkest of the page's classes of shades, ``s0`` to ``s9``."""
Points = Sequence[tuple[float, float, str]]
"""Places in the units of the scales, each with its tooltip."""


def first_phases(layers: Sequence[LayerRow]) -> dict[str, str]:
    """Return for each op the earliest phase that it runs in; a rewrite may run a forward op again in the backward."""
    found: dict[str, str] = {}
    for phase in PARTS:
        for r in layers:
            if r.phase == phase:
                found.setdefault(r.op, phase)
    return found


def short(x: float) -> str:
    """Write a number with about 3 digits."""
    if x == 0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(x))))
    return f"{x:,.{digits}f}" if digits < 7 else f"{x:.1e}"


@dataclass(frozen=True)
class LinearScale:
    """A linear scale from numbers to positions."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        """Return the position of a number."""
        return self.start + (x - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int = 6) -> list[float]:
        """Choose round numbers: multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / about
        power = 10.0 ** floor(log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


@dataclass(frozen=True)
class LogScale(LinearScale):
    """A logarithmic scale from numbers to positions."""

    def __call__(self, x: float) -> float:
        """Return the position of a number."""
        return self.start + log10(x / self.low) / log10(self.high / self.low) * (self.end - self.start)

    def ticks(self, about: int = 6) -> list[float]:
        """Choose the powers of ten; if they are few, 2 and 5 times them too."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for factors in ((1,), (1, 2, 5)):
            found = [m * 10.0**p for p in powers for m in factors if self.low <= m * 10.0**p <= self.high]
            if len(found) > 3:
                break
        return found


def picture(height: float, label: str, *children: object) -> Markup:
    """Make a picture of a height; `label` describes it for screen readers."""
    size = f"0 0 {WIDTH} {height:g}"
    return tag("div", tag("svg", *children, viewBox=size, role="img", aria_label=label), class_="picture")


def axes(x: LinearScale, y: LinearScale, x_name: str, y_name: str, xs: Iterable[float] | None = None) -> list[Markup]:
    """Draw a grid with numbers at round ticks, or along x at some of `xs`; numbers that would meet are left out."""
    across = [*(x.ticks() if xs is None else xs)]
    across = _apart(across, x, CHAR * max((len(tick(t)) for t in across), default=0) + 6)
    up = _apart(y.ticks(), y, 14)
    grid = [tag("line", x1=x(t), x2=x(t), y1=y.start, y2=y.end, class_="grid") for t in across]
    grid += [tag("line", x1=x.start, x2=x.end, y1=y(t), y2=y(t), class_="grid") for t in up]
    words = [tag("text", tick(t), x=x(t), y=y.start + 16, text_anchor="middle", class_="tick") for t in across]
    words += [tag("text", tick(t), x=x.start - 8, y=y(t) + 4, text_anchor="end", class_="tick") for t in up]
    words.append(tag("text", x_name, x=x.end, y=y.start + 34, text_anchor="end", class_="name"))
    words.append(tag("text", y_name, x=x.start, y=y.end - 10, class_="name"))
    return [*grid, *words]


def time_axis(x: LinearScale, top: float, bottom: float, unit: str) -> list[Markup]:
    """Draw a grid over time, with round numbers below and the unit of them."""
    grid = [tag("line", x1=x(t), x2=x(t), y1=top, y2=bottom, class_="grid") for t in x.ticks(10)]
    words = [tag("text", tick(t), x=x(t), y=bottom + 15, text_anchor="middle", class_="tick") for t in x.ticks(10)]
    return [*grid, *words, tag("text", unit, x=x.end, y=bottom + 32, text_anchor="end", class_="name")]


def _apart(ticks: Iterable[float], scale: LinearScale, room: float) -> list[float]:
    """Leave out ticks that are nearer to the last one than the room of a number."""
    found: list[float] = []
    for t in ticks:
        if not found or abs(scale(t) - scale(found[-1])) >= room:
            found.append(t)
    return found


def lines(x: LinearScale, y: LinearScale, series: Sequence[tuple[str, Points]]) -> list[Markup]:
    """Draw a line through the points of each class, and over all lines a spot with each point's tooltip, if any."""
    drawn = [path([(x(a), y(b)) for a, b, _ in points], class_) for class_, points in series]
    tips = [(a, b, tip) for _, points in series for a, b, tip in points if tip]
    return drawn + [tag("circle", tag("title", tip), cx=x(a), cy=y(b), r=5, class_="ask") for a, b, tip in tips]


def phase_bars(
    runs: Iterable[tuple[str, float, float, str]], x: LinearScale, bar_y: float, text_y: float
) -> Iterator[Markup]:
    """Draw phases along x, each from its start to its end; its tooltip is written beside it if there is room."""
    for phase, start, end, tip in runs:
        yield rect(x(start), x(end), bar_y, 6, PARTS[phase], tip)
        if x(end) - x(start) > 7 * len(tip):
            yield tag("text", tip, x=x(start), y=text_y, class_="name")


def tick(t: float) -> str:
    """Write a round number."""
    return f"{t:,.10g}" if abs(t) >= 1e-4 or t == 0 else f"{t:.0e}"


def rect(x0: float, x1: float, y: float, height: float, class_: str, tip: str) -> Markup:
    """Draw a bar from x0 to x1 with a tooltip; it is never too thin to be seen."""
    return tag("rect", tag("title", tip), x=x0, y=y, width=max(x1 - x0, 0.5), height=height, class_=class_)


def legend(entries: Iterable[tuple[str, str]], shape: str = "") -> Markup:
    """Draw the legend of the colours.

    Parameters
    ----------
    entries : class and text.
    shape : ``line`` or ``dot``; by default a square.
    """
    return tag("ul", [tag("li", tag("i", class_=f"{shape} {c}".strip()), text) for c, text in entries], class_="legend")


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """Draw a line through points; a single point is a dot."""
    if len(points) == 1:
        return tag("circle", cx=points[0][0], cy=points[0][1], r=3, class_=class_)
    return tag("polyline", points=" ".join(f"{x:.6g},{y:.6g}" for x, y in points), class_=class_)
