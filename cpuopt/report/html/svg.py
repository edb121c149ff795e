"""Parts of the pictures: scales with round ticks, a frame with axes, a legend, formatted numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from ...program.program import PARTS
from .markup import Markup, tag

if TYPE_CHECKING:
    from ...measure.profile import LayerRow

WIDTH = 1080
"""Width of a picture in its own units; the page scales it to its own width."""


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


def axes(x: LinearScale, y: LinearScale, x_name: str, y_name: str, whole: bool = False) -> list[Markup]:
    """Draw a grid with numbers at the scales' ticks. `whole`: x has whole numbers only."""
    xs = [t for t in x.ticks() if not whole or t == round(t)]
    grid = [tag("line", x1=x(t), x2=x(t), y1=y.start, y2=y.end, class_="grid") for t in xs]
    grid += [tag("line", x1=x.start, x2=x.end, y1=y(t), y2=y(t), class_="grid") for t in y.ticks()]
    words = [tag("text", tick(t), x=x(t), y=y.start + 16, text_anchor="middle", class_="tick") for t in xs]
    words += [tag("text", tick(t), x=x.start - 8, y=y(t) + 4, text_anchor="end", class_="tick") for t in y.ticks()]
    words.append(tag("text", x_name, x=x.end, y=y.start + 34, text_anchor="end", class_="name"))
    words.append(tag("text", y_name, x=x.start, y=y.end - 10, class_="name"))
    return [*grid, *words]


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
