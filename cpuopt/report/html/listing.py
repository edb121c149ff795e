"""Tables that sort: each cell holds its exact value beside the text that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...measure.roofline import share
from .markup import Markup, tag


@dataclass(frozen=True)
class Column:
    """One column.

    Parameters
    ----------
    field : the field or key of a row that the column shows and sorts by.
    show : function from the field's value to text; None is empty.
    """

    name: str
    field: str
    show: Callable[[Any], str] | None = None


def rate(x: float) -> str:
    """Format a rate; zero is empty."""
    return f"{x:,.1f}" if x else ""


def op_columns(digits: int) -> list[Column]:
    """Return the columns of `cpuopt.measure.profile.OpRow`, with the given decimals of ms."""
    return [Column("op", "op"), *_common(digits), Column("kernels", "kernels", ", ".join)]


def layer_columns(digits: int) -> list[Column]:
    """Return the columns of `cpuopt.measure.profile.LayerRow`."""
    return [*(Column(name, name) for name in ("layer", "op", "variant", "phase")), *_common(digits)]


def _common(digits: int) -> list[Column]:
    return [
        Column("types", "types", ", ".join),
        Column("calls", "calls", lambda n: str(n or "")),
        Column("ms", "ms", lambda ms: f"{ms:,.{digits}f}"),
        Column("share", "share", lambda x: f"{x:.2f} %"),
        Column("GFLOP/s", "gflops", rate),
        Column("GB/s", "gbs", rate),
        Column("FLOP/byte", "intensity", rate),
        Column("of roof", "of_roof", lambda x: share(x, " %")),
        Column("roof", "roof"),
        Column("of most FLOPs", "of_work", lambda x: f"{x:.0f} %"),
        Column("imbalance", "imbalance", lambda x: f"{x:.2f}"),
    ]


def listing(rows: Sequence[object], columns: Sequence[Column], name: str) -> Markup:
    """Make a table with a button in each heading, and a field that filters; a column without any value is left out."""
    values = [r if isinstance(r, Mapping) else vars(r) for r in rows]
    columns = [c for c in columns if any(r[c.field] not in (None, []) for r in values)]
    head = [tag("th", tag("button", c.name, type="button"), scope="col", class_=_side(c, values)) for c in columns]
    body = [tag("tr", [_cell(r[c.field], c) for c in columns]) for r in values]
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body), class_="listing", id=name)
    field = tag("input", type="search", placeholder="filter", aria_label=f"filter {name}", data_filter=name)
    return tag("div", field, tag("div", table, class_="scroll"))


def _side(column: Column, rows: Sequence[Mapping[str, Any]]) -> str | None:
    return "number" if any(isinstance(r[column.field], int | float) for r in rows) else None


def _cell(value: Any, column: Column) -> Markup:
    if value is None:
        return tag("td", data_value="", class_="number")
    text = column.show(value) if column.show else value
    if isinstance(value, int | float):
        return tag("td", text, data_value=repr(value), class_="number")
    return tag("td", text)
