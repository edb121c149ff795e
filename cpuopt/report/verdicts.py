"""The table of `cpuopt verdicts`: false alarms, and the power curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..wording import count
from . import style


def tables(c: Mapping[str, Any], path: str | None) -> list[RenderableType]:
    """Show how often the verdict was wrong, and how often each planted difference was found."""
    words = ", ".join(f"{n} {word}" for word, n in c["words"].items())
    said = f"false alarms: {c['false']:.1f} % of {count(c['runs'], 'comparison')} of a kernel with itself ({words})"
    table = style.table(">slower by", ">found")
    for p in c["power"]:
        table.add_row(f"{p['effect']:g} %", f"{p['found']:.0f} %")
    least = f"{c['effect']:g} %" if c["effect"] is not None else f"more than {c['power'][-1]['effect']:g} %"
    return [
        Text(f"the verdicts of cpuopt ab on {count(c['threads'], 'thread')}, on this machine as it is now", "bold"),
        "",
        Text(f"{said}; at most {c['at_most']:.1f} % with 95 % confidence"),
        Text(f"found in 95 % of the comparisons: a difference of {least}"),
        "",
        table,
        *style.warnings(c["doubts"]),
        *[Text(f"record {path}")] * bool(path),
    ]
