"""The style of the output: tables, verdicts, warnings, times, progress."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import floor, log10
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ..check.result import MARGINAL, RIGHT, WORDS
from ..errors import BY_RULE, CHEATING, COMPILE_ERROR, UNCHECKED, WRONG
from ..machine import beside_others

FAILED = "failed"
"""The word of a stage that ended with an error which says nothing about the kernel."""
STYLE = {
    "faster": "bold green",
    "slower": "bold red",
    "no difference shown": "bold",
    "inconclusive": "bold yellow",
    "could not tell": "bold yellow",  # in records of earlier versions
    RIGHT: "green",
    MARGINAL: "yellow",
    UNCHECKED: "bold yellow",
    **dict.fromkeys((WRONG, CHEATING, COMPILE_ERROR, BY_RULE, "FAIL"), "bold red"),
    "PASS": "green",
    FAILED: "bold red",
}
"""The colours of verdicts; PASS and FAIL are in records of earlier versions."""


INDENT = 2
"""Spaces before figures that stand below the names of their row."""
ROOMY = 20
"""The least width of a longer text, while there is another layout."""


class Words(Table):
    """A table that breaks no word, and no number.

    On a narrow terminal its headers wrap, one space parts its columns, and it has no bars. If that is not enough,
    the first column and the texts beside it are a line of their own above the figures of a row; at last, a number may
    wrap before its interval.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render in the first of these layouts that fits."""
        words = [c for c in self.columns if all(isinstance(cell, str | Text) for cell in c.cells)]
        beside = next((i for i, c in enumerate(words) if i and c.justify == "right"), len(words) - 1)
        layouts = (self.columns, self.padding[1], 0, 0), (words, 1, 0, 1), (words, 1, beside, 1), (words, 1, beside, 2)
        for columns, gap, names, wrap in layouts:
            sizes = [_sizes(c, wrap, self.show_header) for c in columns[names:]]
            room = options.max_width - gap * (len(sizes) - 1) - INDENT * bool(names)
            if sum(least for least, _ in sizes) <= room:
                break
        widths = _shared(sizes, room)
        header = [([c.header for c in columns], "bold")] * self.show_header
        rows = zip(zip(*(c.cells for c in columns), strict=True), (r.style or "" for r in self.rows), strict=True)
        for cells, style in (*header, *rows):
            texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
            if names:
                above = Text(" " * gap, style).join(t for t in texts[:names] if t)
                yield from unbroken(above, options.max_width) if above else ()
            row = Table.grid(padding=(0, gap, 0, 0))
            for c, width in zip(columns[names:], widths, strict=True):
                row.add_column(justify=c.justify, width=width, overflow="fold")
            row.add_row(*texts[names:], style=style)
            for line in console.render_lines(row, options.update(width=options.max_width, height=None), pad=False):
                yield from _stripped([Segment(" " * INDENT * bool(names)), *line])
                yield Segment.line()
        if self.caption:
            caption = Text(self.caption, "dim italic") if isinstance(self.caption, str) else self.caption
            yield from unbroken(caption, options.max_width)


def _sizes(column: Column, wrap: int, header: bool) -> tuple[int, int]:
    """Return the least width of a column, and that of its longest line.

    Parameters
    ----------
    wrap : what wraps of a column of numbers: 0, nothing; 1, its header; 2, its numbers too, and texts at each word.
    """
    if bars := [cell.width for cell in column.cells if not isinstance(cell, str | Text)]:  # type: ignore[union-attr]
        return max(bars), max(bars)
    head = [column.header] * header
    whole = {0: [*head, *column.cells], 1: column.cells, 2: []}[wrap] if column.no_wrap else []

    def widest(texts: Iterable[Any], split: Callable[[str], list[str]]) -> int:
        return max((cell_len(part) for text in texts for part in split(str(text))), default=0)

    texts = [*head, *column.cells]
    ideal = max(widest(texts, str.splitlines), column.min_width or 0)
    roomy = 0 if wrap == 2 or column.no_wrap else min(ideal, ROOMY)
    least = max(widest(whole, str.splitlines), widest(texts, str.split), roomy)
    return least, max(least, ideal)


def _shared(sizes: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Give each column its least width, and share the room that is left among those that want more."""
    widths = [least for least, _ in sizes]
    wanting = sorted(range(len(sizes)), key=lambda i: sizes[i][1] - sizes[i][0])
    for done, i in enumerate(wanting):
        left = max(0, room - sum(widths))
        widths[i] += min(sizes[i][1] - widths[i], left // (len(wanting) - done))
    return widths


def unbroken(text: Text, width: int) -> list[Text]:
    """Divide a text into lines between its words; a word that is longer than a line stays whole, to be copied."""
    lines: list[Text] = []
    for paragraph in text.split("\n"):
        cuts, used = list[int](), 0
        for word in re.finditer(r"\s*\S+", paragraph.plain):
            if used and used + cell_len(word[0]) > width:
                cuts.append(word.end() - len(word[0].lstrip()))
                used = -cell_len(word[0]) + cell_len(word[0].lstrip())
            used += cell_len(word[0])
        lines += paragraph.divide(cuts)
    for line in lines:
        line.rstrip()
        line.overflow = "ignore"
    return lines


class Unbroken:
    """A text inside a group, whose lines end between words."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from unbroken(self.text, options.max_width)


def _stripped(line: list[Segment]) -> list[Segment]:
    """Drop the spaces at the end of a line of a table."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else line


def table(*columns: str, gap: int = 2) -> Table:
    """Make a table without lines.

    Parameters
    ----------
    columns : names. ``>`` before a name aligns the column to the right and keeps each of its cells on one line.
    gap : spaces between two columns.
    """
    made = Words(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False, caption_justify="left")
    made.show_header = any(name.strip(">") for name in columns)
    for name in columns:
        number = name.startswith(">")
        side = "right" if number else "left"
        made.add_column(Text(name.removeprefix(">")), justify=side, no_wrap=number, overflow="fold")  # type: ignore
    return made


def verdict(word: str) -> Text:
    """Colour a verdict."""
    return Text(word, STYLE[word])


def explained(marginal: Sequence[str]) -> str:
    """Return a line on the kernels that are marginal, and what that means."""
    return f"{MARGINAL}: {', '.join(marginal)}: {WORDS[MARGINAL]}"


def warnings(found: Iterable[str]) -> list[Text]:
    """Format warnings about figures; what helps against other processes is said once."""
    lines = [f"warning: {w}" for w in found]
    hint = [beside_others()] * any("other processes" in line for line in lines)
    return [Text(line, "yellow") for line in (*lines, *hint)]


def digits(ms: float, least: int = 0) -> int:
    """Return the decimals with which a time has about four digits, and below 0.1 three."""
    return max(least, 2 - floor(log10(ms)) if 0 < ms < 0.1 else 4 - len(str(int(ms))))


class Line(Progress):
    """A live line that prints nothing if it is disabled; rich prints an empty line then, before its version 14.3."""

    def stop(self) -> None:
        """Stop it, if it was started."""
        if not self.disable:
            super().stop()


def progress(*columns: str | ProgressColumn, **options: Any) -> Progress:
    """Make a live line that disappears at its end."""
    made = [TextColumn(c, markup=False) if isinstance(c, str) else c for c in columns]
    return Line(*made, transient=True, **options)


BAR = BarColumn(24)
