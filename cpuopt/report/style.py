"""The style of the output: tables, verdicts, warnings, times, progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

STYLE = {
    "faster": "bold green",
    "slower": "bold red",
    "no difference shown": "bold",
    "inconclusive": "bold yellow",
    "could not tell": "bold yellow",  # in records of earlier versions
    "PASS": "green",
    "MARGINAL": "yellow",
    "FAIL": "bold red",
}
"""The colours of verdicts."""


WORD = 16
"""The longest word, in cells, that a narrow terminal does not break."""


class Words(Table):
    """A table that is wider than a narrow terminal where it would break a short word otherwise."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give each column room for its longest word, or for a number as a whole."""
        for column in self.columns:
            cells = [str(c) for c in (column.header, *column.cells) if isinstance(c, str | Text)]
            if column.no_wrap:
                column.min_width = max(map(cell_len, cells), default=0)
            else:
                words = [cell_len(word) for c in cells for word in c.split()]
                column.min_width = max((n for n in words if n <= WORD), default=0)
        least = sum(column.min_width or 0 for column in self.columns) + self.padding[1] * (len(self.columns) - 1)
        wide = options.update(max_width=max(options.max_width, least))
        caption, self.caption = self.caption, None
        segments = (s for s in super().__rich_console__(console, wide) if isinstance(s, Segment))
        for line in Segment.split_lines(segments):
            yield from _stripped(line)
            yield Segment.line()
        self.caption = caption
        if caption:
            yield Text(caption, "dim italic") if isinstance(caption, str) else caption


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


def warnings(found: Iterable[str]) -> list[Text]:
    """Format warnings about figures."""
    return [Text(f"warning: {w}", "yellow") for w in found]


def digits(ms: float, least: int = 0) -> int:
    """Return the decimals with which a time has about four digits."""
    return max(least, 4 - len(str(int(ms))))


class Line(Progress):
    """A live line that prints nothing where it is disabled; rich prints an empty line then, before its version 14.3."""

    def stop(self) -> None:
        """Stop it, if it was started."""
        if not self.disable:
            super().stop()


def progress(*columns: str | ProgressColumn, **options: Any) -> Progress:
    """Make a live line that disappears at its end."""
    made = [TextColumn(c, markup=False) if isinstance(c, str) else c for c in columns]
    return Line(*made, transient=True, **options)


BAR = BarColumn(24)
