"""The tables of `cpuopt scale`: efficiency, and the time lost by reason, by op and by layer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..lab.scale import Scaling
from ..measure.scaling import MEANING, REASONS, Row
from ..program.arena import gb
from ..wording import count
from . import style


def tables(s: Scaling, *, detail: bool = False) -> list[RenderableType]:
    """Show the scaling of a step; with `detail`, of its layers too."""
    most = s.threads[-1]
    head = Text.assemble((s.model, "bold"), f" · B {s.B} · T {s.T} · {s.variant} · {count(s.steps, 'step')} each")
    parts: list[RenderableType] = [head, "", *measured(s.ops, s.step, most, "op")]
    if detail:
        parts += ["", *measured(s.layers, s.step, most, "layer")]
    if most > 1:
        parts += ["", Text(words(s))]
    if s.projected:
        parts += ["", Text("Predicted from one thread, not measured:", "bold"), predicted(s)]
        parts += [Text(line) for line in (idle(s), shared(s)) if line]
        parts += [Text(f"assumed: {a}", "dim") for a in s.assumptions]
    return [*parts, *style.warnings(s.doubts)]


LARGE = 1 << 20
"""The least bytes of arrays that are named as written in turn."""
TOGETHER = 3
"""The most numbers of threads whose times stand in one table with the losses."""


def measured(rows: Sequence[Row], step: Row, most: int, what: str) -> list[RenderableType]:
    """Make a table of the times, and of the ms that the most threads lose by reason; two if it would be wide."""
    times, lost = [f">{n}t, ms" for n in step.ms], [">eff.", *(f">{reason}" for reason in REASONS)] * (most > 1)
    cut = len(times)
    together = style.table(what, *times, *lost)
    apart = style.table(what, *times), style.table(what, *lost)
    for r in (*rows, step):
        cells, style_ = _cells(r, most), "bold" if r is step else None
        together.add_row(r.name, *cells, style=style_)
        apart[0].add_row(r.name, *cells[:cut], style=style_)
        apart[1].add_row(r.name, *cells[cut:], style=style_)
    if not lost:
        return [together]
    shown: list[RenderableType] = [together] if cut <= TOGETHER else [apart[0], "", apart[1]]
    return [*shown, Text(legend(most), "dim")]


def legend(most: int) -> str:
    """Explain the columns of losses."""
    reasons = "; ".join(f"{reason}: {what}" for reason, what in MEANING.items())
    return f"eff.: one thread's time over {most} times that of {most}. Lost ms of a step, by reason. {reasons}."


def _cells(r: Row, most: int) -> list[str]:
    digits = style.digits(r.ms[1])
    times = [f"{ms:,.{digits}f}" for ms in r.ms.values()]
    if most == 1:
        return times
    return [*times, f"{100 * r.efficiency[most]:.0f}%", *(f"{r.lost_ms[most][x]:z,.{digits}f}" for x in REASONS)]


def predicted(s: Scaling) -> Table:
    """Make a table of the predicted efficiency of each op, and of the step."""
    table = style.table("op", *(f">{n}t" for n in s.projected), *(f">chunks, {n}t" for n in s.projected))
    for r in (*s.ops, s.step):
        shown = [f"{100 * r.predicted_efficiency[n]:.0f}%" for n in s.projected]
        chunks = [str(r.chunks.get(n, "")) if r is not s.step else "" for n in s.projected]
        table.add_row(r.name, *shown, *chunks, style="bold" if r is s.step else None)
    table.add_row("step, ms", *(f"{s.step.predicted_ms[n]:,.1f}" for n in s.projected))
    return table


def idle(s: Scaling) -> str:
    """List the ops whose longest call has fewer chunks than threads; empty if there are none."""
    n = s.projected[-1]
    found = [(r, r.chunks[n]) for r in s.ops if r.chunks.get(n, n) < n]
    named = [f"{r.name} {chunks} ({r.predicted_lost_ms[n]['imbalance']:,.1f} ms lost)" for r, chunks in found]
    return f"fewer chunks than {n} threads: {', '.join(named)}" if named else ""


def shared(s: Scaling) -> str:
    """Describe the memory that several caches write in turn; empty for one cache."""
    large = [one for one in s.in_turn if one.nbytes >= LARGE]
    found = "; ".join(f"{', '.join(one.arrays)} ({gb(one.nbytes)}) by {', '.join(one.ops)}" for one in large)
    several = f"written in turn by several ops, and so by several caches: {found or 'no large array'}"
    return f"{several}; the pool ({gb(s.pool_bytes)}) holds one value after the other" if s.caches > 1 else ""


def words(s: Scaling) -> str:
    """Describe what the most threads lose, and how well one thread predicted it."""
    n = s.threads[-1]
    lost, worst = s.step.lost_ms[n], max(s.ops, key=lambda r: sum(r.lost_ms[n].values()))
    reason = max(REASONS, key=lambda reason: lost[reason])
    foretold, ms = s.step.predicted_ms[n], s.step.ms[n]
    lacks = {r: lost[r] - s.step.predicted_lost_ms[n][r] for r in REASONS}
    most = max(REASONS, key=lambda r: abs(lacks[r]))
    return (
        f"{n} threads take {ms:,.1f} ms a step, {100 * s.step.efficiency[n]:.0f} % efficiency. They lose most by "
        f"{reason} ({lost[reason]:,.1f} ms) and in {worst.name} ({sum(worst.lost_ms[n].values()):,.1f} ms). One thread "
        f"predicts {foretold:,.1f} ms for {n}, {100 * (foretold / ms - 1):+.0f} %, off most by {most} "
        f"({-lacks[most]:+,.1f} ms)."
    )
