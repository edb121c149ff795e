"""The screen of `cpuopt lab`: a block for each kernel of the file, a line for each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..lab.rounds import STAGES, KernelRow, RoundPlan, RoundView, whole
from ..wording import count, text_of
from .console import OUT
from .style import FAILED, STYLE, Unbroken, table

WAITING = Text("waiting for a save; Ctrl-C ends", "dim")
KEPT = 5
"""The newest saves that are listed."""


class Screen(RoundView):
    """The display of a round: live, or without `live` at its end only."""

    def __init__(self, plan: RoundPlan, live: bool = True, quiet: bool = False) -> None:
        self.plan, self.quiet = plan, quiet
        self.newest: Round | None = None
        self._start()
        self.saves: dict[str, dict[str, tuple[float, str]]] = {}
        """The time and the verdict of each kernel in each round, by the time of day when the round began."""
        self.shown: Callable[[], RenderableType] = self.head
        shows = {"get_renderable": lambda: self.shown(), "refresh_per_second": 1, "vertical_overflow": "visible"}
        self.live = Live(console=OUT, **shows) if live and OUT.is_terminal else None  # type: ignore[arg-type]

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def begin(self) -> Round:
        """Return the view of a new round; the views of earlier rounds show nothing any more."""
        self.newest = Round(self)
        self._start()
        return self.newest

    def _start(self) -> None:
        self.since, self.start = time.strftime("%H:%M:%S"), time.monotonic()
        self.took: float | None = None

    def rows(self, rows: Sequence[KernelRow]) -> None:
        """Show the results so far."""
        for r in rows:
            if "alone" in r.found:
                found = r.found["alone"]["b_ms"], r.found["alone"]["verdict"]
                self.saves.setdefault(f"{r.op}[{r.variant}]", {})[self.since] = found
        self._show(partial(self.page, rows), whole(rows))

    def problem(self, text: str) -> None:
        """Show why the file cannot be used."""
        said = Text.assemble((f"{FAILED} ", STYLE[FAILED]), text)
        self._show(lambda: Group(self.head(), said, WAITING) if self.live else said, done=True)

    def _show(self, shown: Callable[[], RenderableType], done: bool) -> None:
        """Show a page: at once if it is live, else at the end."""
        if done and self.took is None:
            self.took = time.monotonic() - self.start
        self.shown = shown
        if self.live:
            self.live.refresh()
        elif done and not self.quiet:
            OUT.print(shown())

    def head(self) -> Text:
        """Make the first line: the file, the model and the sizes."""
        p = self.plan
        took = time.monotonic() - self.start if self.took is None else self.took
        size = text_of(p.sizes[0]) if p.sizes else f"{p.model} · {p.B}x{p.T}"
        at = f"{self.since} · {took:.0f} s"
        return Text.assemble((p.file.name, "bold"), f" · {size} · {count(p.threads, 'thread')} · {at}")

    def page(self, rows: Sequence[KernelRow]) -> RenderableType:
        """Make the page of all kernels."""
        lines: list[RenderableType] = [Unbroken(self.head())]
        if not rows:
            return Group(*lines, Text("loading ...", "dim"))
        for r in rows:
            name = f"{r.op}[{r.variant}]"
            lines += [Text(), Text.assemble((name, "bold"), f" against {r.against}"), stages(r, self.earlier(name))]
        if self.live and self.took is not None:
            lines += [Text(), WAITING]
        return Group(*lines)

    def earlier(self, name: str) -> list[tuple[str, float, str, bool]]:
        """List the saves of a kernel, if there was more than one: when, ms, verdict, and whether it is the best.

        Of many, the last `KEPT` are listed, and the best one.
        """
        saves = [(when, ms, verdict) for when, (ms, verdict) in self.saves.get(name, {}).items()]
        if not any(when != self.since for when, *_ in saves):
            return []
        best = min(saves, key=lambda save: save[1])
        return [(*save, save is best) for i, save in enumerate(saves) if save is best or i >= len(saves) - KEPT]


class Round(RoundView):
    """The view of one round; only the newest of several reaches the screen."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def rows(self, rows: Sequence[KernelRow]) -> None:
        """Show the results so far."""
        if self.screen.newest is self:
            self.screen.rows(rows)

    def problem(self, text: str) -> None:
        """Show why the file cannot be used."""
        if self.screen.newest is self:
            self.screen.problem(text)


def stages(r: KernelRow, saves: Sequence[tuple[str, float, str, bool]]) -> Table:
    """Make the table of a kernel: a line for each stage and for each save, with the verdicts in one column."""
    made = table("", "", "")
    for name in STAGES:
        if name in r.said:
            word = next((w for w in STYLE if r.said[name].startswith((f"{w}:", f"{w},"))), "")
            rest = r.said[name][len(word) + 2 :] if word else r.said[name]
            if r.bad == name and not word:
                word = FAILED
            made.add_row(f"  {name}", Text(word, STYLE.get(word, "")), Text(rest))
        elif r.now == name:
            made.add_row(Text(f"  {name}", "dim"), "", Text(r.progress or "...", "dim"))
    for i, (when, ms, verdict, best) in enumerate(saves):
        line = Text(f"{ms:.3g} ms at {when}{', best so far' if best else ''}", "bold" if best else "")
        made.add_row("" if i else "  saves", Text(verdict, STYLE.get(verdict, "")), line)
    return made


def kept(c: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the page of a round in a record."""
    for k in c["kernels"]:
        row = KernelRow(k["op"], k["variant"], k["against"], k["said"], k["bad"])
        yield Text.assemble((f"{row.op}[{row.variant}]", "bold"), f" against {row.against} in {c['file']}")
        yield stages(row, [])
