"""The backward as data: lines that know which line of the forward they stand for, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

CHUNKS = 32
"""Parts of a parallel loop that sum by themselves: fixed, so that the number of threads changes no bit."""


@dataclass
class Line:
    """A line of the backward.

    Attributes
    ----------
    source : the line of the forward that it inverts or repeats; 0 for none.
    role : ``primal`` (the forward again), ``adjoint``, ``record``, or ``frame`` for what holds the others together.
    """

    text: str
    source: int = 0
    role: str = "frame"
    body: list[Line] | None = None

    def mentions(self, name: str) -> bool:
        """Whether a name occurs in it or below it."""
        return bool(re.search(rf"\b{name}\b", self.text)) or any(line.mentions(name) for line in self.body or [])


@dataclass
class Interface:
    """The arguments of the backward.

    Attributes
    ----------
    params : in call order; the flag of a gradient is its name and ``_add``.
    sizes : for arrays, the size of each axis as text that two arrays share where they must agree.
    optional : gradients that may be absent, of length zero.
    own_memory : whether the backward allocates what it needs; else it is passed, and named in `scratch`.
    scratch : name, factor and array: working memory of so many times the array's size.
    """

    params: list[str]
    sizes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    own_memory: bool = True
    scratch: dict[str, tuple[int, str]] = field(default_factory=dict)

    def flag(self, name: str) -> str | None:
        """The flag that tells whether a gradient is added to."""
        return f"{name}_add" if f"{name}_add" in self.params else None


def nest(d: str, axes: int, make: str | Callable[[str], list[Line]], parallel: bool = False) -> list[Line]:
    """Write loops over all elements of an array, `d` or one of its shape."""
    variables = [f"j{k}" for k in range(axes)]
    every = ", ".join(variables)
    body = [Line(make.replace("{i}", every))] if isinstance(make, str) else make(every)
    for k in reversed(range(axes)):
        word = "prange" if parallel and k == 0 else "range"
        body = [Line(f"for j{k} in {word}({d}.shape[{k}]):", body=body)]
    return body


def every_line(body: Iterable[Line]) -> Iterable[Line]:
    """Every line, those in bodies too."""
    for line in body:
        yield line
        yield from every_line(line.body or [])
