"""A generated backward as text and HTML: the reasons of its plan, and both sources side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ad.emit import written
from ..ad.kernel import Assign, For, If, flat
from .html.markup import Markup, tag
from .html.page import Section, page

if TYPE_CHECKING:
    from ..ad import Backward


def plan(made: Backward) -> list[str]:
    """Describe each decision: line, statement, what is done, why."""
    p = made.plan
    rows: list[tuple[int, str, str]] = []
    for s in flat(p.kernel.body):
        if s in p.recorded:
            what = f"recorded: {p.recorded[s]}"
        elif s in p.recomputed:
            what = f"computed again: {p.recomputed[s]}"
        elif isinstance(s, For):
            if s in p.fused:
                what = f"forward and reverse in one iteration: {p.fused[s]}"
                if s in p.serial:
                    what += f"; on one thread, because {p.serial[s]}"
                if s in p.split:
                    what += f"; by chunks of '{p.split[s].var}', along which no two chunks add to one element"
                if s in p.partial:
                    what += f"; {', '.join('d' + n for n in p.partial[s])} summed by each chunk, then in order"
            else:
                way = "upwards: no adjoint is carried" if s in p.ascending else f"downwards: {p.plain.get(s, '')}"
                what = f"forward, then reverse {way}"
        elif isinstance(s, Assign) and p.kernel.root(s.name) in p.task.saved:
            what = f"kept: the backward is given '{p.kernel.root(s.name)}'"
        elif isinstance(s, Assign) and not p.activity.has_adjoint(s):
            what = "no adjoint"
        elif isinstance(s, If):
            what = "condition evaluated again"
        else:
            what = "nothing to keep"
        rows.append((s.line, p.kernel.source.get(s.line, "").split("#")[0].strip(), what))
    width = max((len(code) for _, code, _ in rows), default=0)
    return [f"{line:5}  {code:<{width}}  {what}" for line, code, what in rows]


def html(found: Iterable[Backward]) -> str:
    """Make a page with forward and backward side by side; pointing at a line marks those that belong to it."""
    sections = []
    for made in found:
        k = made.plan.kernel
        left = [_span(n, None, tag("i", f"{n:4}"), f" {code}") for n, code in sorted(k.source.items())]
        right = [_span(s.line, s.role, code) for s, code in written(made.body)]
        columns = tag("pre", left, class_="start"), tag("pre", right)
        sections.append(Section(made.name, f"{k.name} and {made.name}", tag("div", columns, class_="linked")))
    title = "Generated backward kernels"
    return page(title, tag("h1", title), sections)


def _span(line: int, role: str | None, *code: str) -> Markup:
    return tag("span", *code, class_=role and f"role-{role}", data_line=line or None)
