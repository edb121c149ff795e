"""Places for the names in a picture, so that no two of them overlap.

A name is drawn in a font of fixed width, so its box is known before a browser draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, hypot, pi, sin

CHAR, UP, DOWN = 6.8, 10.0, 4.0
"""The width of a character at 11 px, and what a line of text takes above and below its base line."""
LONGEST = 34
"""Characters of a name that are shown."""


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Return whether two boxes share a point."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def within(self, other: Box) -> bool:
        """Return whether the other box holds this one whole."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


@dataclass(frozen=True)
class Label:
    """A name at a place; `x` is its left end, `y` its base line."""

    text: str
    x: float
    y: float

    @property
    def box(self) -> Box:
        """The room that it takes, with a little around it."""
        return Box(self.x - 2, self.y - UP - 1, self.x + CHAR * len(self.text) + 2, self.y + DOWN + 1)


def around(cx: float, cy: float, radius: float) -> Box:
    """Return the box around a circle."""
    return Box(cx - radius, cy - radius, cx + radius, cy + radius)


def along(x1: float, y1: float, x2: float, y2: float, half: float = 2.0, step: float = 5.0) -> Iterator[Box]:
    """Cover a line with small boxes of half a side of `half`."""
    n = max(1, round(hypot(x2 - x1, y2 - y1) / step))
    for i in range(n + 1):
        yield around(x1 + (x2 - x1) * i / n, y1 + (y2 - y1) * i / n, half)


def shortened(name: str, most: int = LONGEST) -> str:
    """Cut a name that is too long."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def place(
    name: str, cx: float, cy: float, radius: float, frame: Box, taken: Sequence[Box], avoided: Sequence[Box] = ()
) -> Label | None:
    """Find the nearest free place for the name of a point: beside, above or below it, or at some distance.

    Parameters
    ----------
    frame : the box that holds all names.
    taken : boxes that the name must not meet.
    avoided : boxes that it does not meet if there is another place within reach.

    Returns
    -------
    None if the picture is full.
    """
    text = shortened(name)
    first = None
    for label in _places(text, cx, cy, radius):
        box = label.box
        if box.within(frame) and not any(box.meets(t) for t in taken):
            if not any(box.meets(t) for t in avoided):
                return label
            first = first or label
    return first


def _places(text: str, cx: float, cy: float, radius: float) -> Iterable[Label]:
    """List places, the nearest first: the sides, then rings whose labels turn away from the point."""
    width, gap = CHAR * len(text), radius + 4
    yield Label(text, cx + gap, cy + 4)
    yield Label(text, cx - gap - width, cy + 4)
    yield Label(text, cx - width / 2, cy - gap - DOWN)
    yield Label(text, cx - width / 2, cy + gap + UP)
    for distance in range(12, 300, 12):
        for i in range(16):
            x, y = cos(2 * pi * i / 16), sin(2 * pi * i / 16)
            at = cx + (gap + distance) * x
            yield Label(text, at - width * (1 - x) / 2, cy + (gap + distance) * y + (UP - DOWN) / 2)
