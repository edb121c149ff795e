"""The tables of ``cpuopt profile --lines``: functions and lines of source by their share of an op's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from ..measure.lines import OpLines, Sampled
from ..wording import count
from . import style
from .inspect import brief

LINES = "line, and the calls around it"
UNKNOWN = "(lines unknown)"
MOST, TEXT = 20, 48
"""The most rows of a table, and the most characters of a line of source."""
BARS = 32
"""The most threads that have a bar each; the busiest of each group stands for it beyond."""


@dataclass(frozen=True)
class ThreadBars:
    """A bar for each thread: its share of the most samples that a thread has in any row; a digit without blocks."""

    parts: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = "0123456789" if options.ascii_only else " ▁▂▃▄▅▆▇█"
        yield Segment("".join(marks[round(part * (len(marks) - 1))] for part in self.parts))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self.parts), len(self.parts))

    @property
    def width(self) -> int:
        """The cells that it takes."""
        return len(self.parts)


def tables(found: Sequence[OpLines]) -> Iterator[RenderableType]:
    """Show the lines of each op."""
    for op in found:
        codes = ", ".join(c for c in op.codes if c)
        by_thread = ", ".join(f"{n:,}" for n in op.threads)
        yield ""
        yield Text.assemble(
            (", ".join(op.kernels), "bold"),
            f" · {op.share:.1f}% of the samples in ops · {count(op.samples, 'sample')}, by thread {by_thread}",
            f" · code {codes}, not recompiled" if codes else " · not compiled by numba",
        )
        if not op.rows:
            yield Text("too few samples; take more steps with --steps")
            continue
        yield from (_table("function, with what is inlined into it", op.functions, op, _function), "")
        yield _table(LINES, op.rows, op, _line)
        hidden = sum(r.samples for r in op.rows[MOST:]) + op.rest
        if hidden:
            yield Text(f"other lines: {100 * hidden / op.samples:.1f}%", "dim")
        if any(r.function.endswith(UNKNOWN) for r in op.rows):
            yield Text(f"{UNKNOWN}: a copy of the function that is compiled with lines has other code", "dim")


def _table(title: str, rows: Sequence[Sampled], op: OpLines, words: Callable[[Sampled], Text]) -> RenderableType:
    made = style.table(title, "", ">share", ">interval")
    width = -(-len(op.threads) // BARS)
    most = max(max(r.threads) for r in rows)
    for r in rows[:MOST]:
        bars = [max(r.threads[i : i + width]) / most for i in range(0, len(r.threads), width)]
        made.add_row(words(r), ThreadBars(bars), f"{r.share:.1f}%", f"{r.low:.1f} to {r.high:.1f}")
    if title == LINES:
        made.caption = "interval: 95 %; bars: the samples of each thread, the main one first"
    return made


def _function(r: Sampled) -> Text:
    return Text.assemble(r.function or "(module)", (f" {short(r.file)}" if r.file else "", "dim"))


def _line(r: Sampled) -> Text:
    if not r.file:
        return Text(r.function)
    text = r.text if len(r.text) <= TEXT else f"{r.text[: TEXT - 1].rstrip()}…"
    around = "".join(f" ← {short(place)}" for place in r.chain)
    return Text.assemble(f"{short(r.file)}:{r.line} ", (text, "bold"), (around, "dim"))


def short(place: str) -> str:
    """Shorten ``/home/me/mine.py:12 f`` to what a reader needs: ``mine.py:12 f``."""
    return brief(place).rpartition("/")[2]
