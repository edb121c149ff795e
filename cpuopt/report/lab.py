"""The screen of `cpuopt lab`: a block for each kernel of the file, a line for each stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..lab.session import STAGES, Plan, Row, View
from ..wording import count, text_of
from .console import OUT
from .style import STYLE


class Screen(View):
    """The display of a round: live, or without `live` at its end only."""

    def __init__(self, plan: Plan, live: bool = True, quiet: bool = False) -> None:
        self.plan, self.quiet, self.trouble = plan, quiet, ""
        self.newest: Round | None = None
        self.since, self.start = time.strftime("%H:%M:%S"), time.monotonic()
        self.best: dict[str, tuple[float, str]] = {}
        """The shortest time of each kernel in any round, and when its round began."""
        self.live = (
            Live(console=OUT, auto_refresh=False, vertical_overflow="visible") if live and OUT.is_terminal else None
        )

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def begin(self) -> Round:
        """Return the view of a new round; the views of earlier rounds show nothing any more."""
        self.newest, self.since, self.start = Round(self), time.strftime("%H:%M:%S"), time.monotonic()
        return self.newest

    def rows(self, rows: Sequence[Row]) -> None:
        """Show the results so far."""
        self.trouble = ""
        for r in rows:
            if "alone" in r.found:
                name, found = f"{r.op}[{r.variant}]", (r.found["alone"]["b_ms"], self.since)
                self.best[name] = min(self.best.get(name, found), found)
        done = bool(rows) and not any(r.now for r in rows) and all(r.bad or len(r.said) == len(STAGES) for r in rows)
        if self.live:
            self.live.update(self.page(rows), refresh=True)
        elif done and not self.quiet:
            OUT.print(self.page(rows))

    def problem(self, text: str) -> None:
        """Show why the file cannot be used."""
        self.trouble = text
        said = Text.assemble(("FAIL ", "bold red"), text)
        if self.live:
            self.live.update(Group(self.head(), said, Text("waiting for a save; Ctrl-C ends", "dim")), refresh=True)
        elif not self.quiet:
            OUT.print(said)

    def head(self) -> Text:
        """Make the first line: the file, the model and the sizes."""
        p = self.plan
        took = f" · {time.monotonic() - self.start:.0f} s" if self.live else ""
        size = text_of(p.sizes[0]) if p.sizes else f"{p.model} · {p.B}x{p.T}"
        return Text.assemble((p.file.name, "bold"), f" · {size} · {count(p.threads, 'thread')} · {self.since}{took}")

    def page(self, rows: Sequence[Row]) -> RenderableType:
        """Make the page of all kernels."""
        lines: list[RenderableType] = [self.head()]
        if not rows:
            return Group(*lines, Text("loading ...", "dim"))
        for r in rows:
            lines += [Text(), Text.assemble((f"{r.op}[{r.variant}]", "bold"), f" against {r.against}")]
            for name in STAGES:
                if name in r.said:
                    lines.append(line(name, r.said[name], failed=r.bad == name))
                elif r.now == name:
                    lines.append(Text(f"  {name:13} {r.progress or '...'}", "dim"))
            ms, when = self.best.get(f"{r.op}[{r.variant}]", (0.0, self.since))
            if when != self.since:
                lines.append(Text(f"  {'best so far':13} {ms:.3g} ms, by the save of {when}", "bold"))
        if self.live and not any(r.now for r in rows):
            lines += [Text(), Text("waiting for a save; Ctrl-C ends", "dim")]
        return Group(*lines)


class Round(View):
    """The view of one round; only the newest of several reaches the screen."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def rows(self, rows: Sequence[Row]) -> None:
        """Show the results so far."""
        if self.screen.newest is self:
            self.screen.rows(rows)

    def problem(self, text: str) -> None:
        """Show why the file cannot be used."""
        if self.screen.newest is self:
            self.screen.problem(text)


def line(name: str, said: str, failed: bool = False) -> Text:
    """Make the line of a stage."""
    word = "FAIL" if failed else said.partition(":")[0].partition(",")[0]
    return Text.assemble(f"  {name:13} ", ("FAIL ", STYLE["FAIL"]) if failed else "", (said, STYLE.get(word, "")))
