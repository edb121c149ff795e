"""A matrix of layers and ops, coloured by time: it shows where a step spends it, and which layer differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING

from ...program.program import PARTS, RECOMPUTE, block_of
from ...wording import count, four
from ..tables import usual_variant
from .markup import Markup, join, tag
from .svg import SHADES, first_phases, short

if TYPE_CHECKING:
    from ...measure.profile import LayerRow


def matrix(layers: Sequence[LayerRow], variant: str, digits: int) -> Markup:
    """Show the sums by block, and every layer below it.

    Parameters
    ----------
    variant : the run's variant. A cell is outlined where another one ran though the op has this one.
    digits : decimals of ms.
    """
    return join(
        tag(
            "p",
            "ms of a step, stronger for more (by the square root). Outlined: another variant than the rest of its op.",
            class_="note",
        ),
        recomputed(layers),
        _table(layers, block_of, variant, digits),
        tag("details", tag("summary", "every layer"), _table(layers, lambda layer: layer, variant, digits)),
    )


def recomputed(layers: Sequence[LayerRow]) -> Markup | None:
    """Explain the ops that the backward runs again; None if there are none."""
    again: dict[str, list[LayerRow]] = {}
    for r in layers:
        if r.phase == RECOMPUTE:
            again.setdefault(r.op, []).append(r)
    if not again:
        return None
    rows = [r for found in again.values() for r in found]
    ops = ", ".join(f"{op} ({count(sum(r.calls for r in found), 'call')})" for op, found in again.items())
    text = f"Computed again in the backward: {ops}; {four(sum(r.ms for r in rows))} ms"
    text += f", {sum(r.share for r in rows):.1f} % of the step. So they need no memory until then."
    return tag("p", text, class_="note")


def _table(layers: Sequence[LayerRow], key: Callable[[str], str], variant: str, digits: int) -> Markup:
    cells: dict[tuple[str, str], list[LayerRow]] = {}
    for r in layers:
        cells.setdefault((key(r.layer), r.op), []).append(r)
    rows = list(dict.fromkeys(name for name, _ in cells))
    phases = first_phases(layers)
    ops = sorted(phases, key=lambda op: [*PARTS].index(phases[op]))
    usual = {op: usual_variant([r for r in layers if r.op == op], variant) for op in ops}
    most = max(sum(r.ms for r in rs) for rs in cells.values())
    head = [tag("th", tag("span", op), scope="col", class_=PARTS[phases[op]]) for op in ops]
    body = []
    for name in rows:
        row = [tag("th", name, scope="row")]
        for op in ops:
            found = cells.get((name, op))
            row.append(_cell(name, op, found, usual[op], most, digits) if found else tag("td"))
        body.append(
            tag(
                "tr",
                row,
                tag("td", f"{sum(r.ms for (n, _), rs in cells.items() if n == name for r in rs):,.{digits}f}"),
            )
        )
    total = [f"{sum(r.ms for r in layers if r.op == op):,.{digits}f}" for op in ops]
    foot = tag(
        "tr", tag("th", "all", scope="row"), [tag("td", t) for t in total], tag("td", short(sum(r.ms for r in layers)))
    )
    first = tag("tr", tag("td"), head, tag("th", tag("span", "all"), scope="col"))
    table = tag("table", tag("thead", first), tag("tbody", body), tag("tfoot", foot), class_="matrix")
    return tag("div", table, class_="scroll")


def _cell(name: str, op: str, rows: Sequence[LayerRow], usual: str, most: float, digits: int) -> Markup:
    ms = sum(r.ms for r in rows)
    other = any(r.variant != usual for r in rows)
    variants = ", ".join(dict.fromkeys(r.variant for r in rows))
    again = sum(r.ms for r in rows if r.phase == RECOMPUTE)
    tip = f"{name}\n{op} [{variants}]\n{short(ms)} ms, {sum(r.share for r in rows):.2f} % of the step"
    if again:
        tip += f"\n{short(again)} ms of it computed again in the backward"
    shade = round(SHADES * sqrt(max(ms, 0) / most)) if most > 0 else 0
    return tag("td", f"{ms:,.{digits}f}", class_=f"s{shade}{' other' if other else ''}", title=tip, data_value=repr(ms))
