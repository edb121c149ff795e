"""The tables of `cpuopt sweep`: time, rates and share of the roof of each size and variant, and their ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..check.result import MARGINAL
from ..measure.comparison import LEVEL
from ..measure.roofline import share
from ..ops.storage import WIDE
from ..wording import count, four, spread, text_of
from . import style
from .style import STYLE


def tables(content: Mapping[str, Any], path: str | None) -> list[RenderableType]:
    """Show what was measured, under what it was measured, and what was left out."""
    c = content
    shown: list[RenderableType] = [heading(c), ""]
    if c["rows"]:
        shown.append(speeds(c))
    if any("ratio" in r for r in c["rows"]):
        shown += ["", ratios(c)]
    shown += [Text(text, "bold red" if text.split(": ")[0] in c["refused"] else "yellow") for text in left_out(c)]
    return [*shown, *style.warnings([*c["roofs"]["doubts"], *c["doubts"]]), *[Text(f"record {path}")] * bool(path)]


def left_out(c: Mapping[str, Any]) -> list[str]:
    """List what has no figures, and why."""
    return [
        *(f"{variant}: no figures, because it is wrong: {why}" for variant, why in c["refused"].items()),
        *(f"not finished: {text}" for text in c["late"]),
        *(f"left out: {text}" for text in c["skipped"]),
    ]


def heading(c: Mapping[str, Any]) -> Text:
    """Name the op, the sizes that do not vary, and the number of threads."""
    return Text.assemble((c["op"], "bold"), *(f" · {part}" for part in conditions(c)))


def conditions(c: Mapping[str, Any]) -> list[str]:
    """List what holds at every size."""
    fixed = text_of(c["fixed"]) + (f" as in {c['source']}" if c["source"] else "")
    narrow = {r["operands"] for r in c["rows"]} - {WIDE}
    return [*[fixed] * bool(c["fixed"]), *narrow, count(c["threads"], "thread")]


def speeds(c: Mapping[str, Any]) -> RenderableType:
    """Make a table with a row for each size and variant."""
    several = len({r["variant"] for r in c["rows"]}) > 1
    names = [*c["over"]] + ["variant"] * several
    table = style.table(*names, ">ms", ">GFLOP/s", ">GB/s", "of roof", ">cold, ms", "of roof")
    before: list[int] = []
    for r in c["rows"]:
        sizes = [r["sizes"][s] for s in c["over"]]
        head = ["" if sizes == before else str(n) for n in sizes]
        warm, cold, before = r["warm"], r["cold"], sizes
        cells = [four(warm["ns"] / 1e6), four(warm["gflops"]), four(warm["gbs"]), of_roof(warm)]
        cells += [four(cold["ns"] / 1e6), of_roof(cold)]
        marginal = f" ({MARGINAL})" if r["check"]["status"].lower() == MARGINAL else ""
        table.add_row(*head, *[f"{r['variant']}{marginal}"] * several, *cells)
    table.caption = "lower quartile of the rounds; cold: other data fill the caches before each call"
    return table


def of_roof(x: Mapping[str, Any]) -> str:
    """Format the share of a roof, and its name."""
    return f"{share(x['of_roof'], ' %')} {x['roof']}"


def ratios(c: Mapping[str, Any]) -> RenderableType:
    """Make a table of the times over those of the first variant."""
    rows = [r for r in c["rows"] if "ratio" in r]
    others = dict.fromkeys(r["variant"] for r in rows)
    table = style.table(*c["over"], *(f">{v}" for v in others))
    for sizes in dict.fromkeys(tuple(r["sizes"][s] for s in c["over"]) for r in rows):
        found = {r["variant"]: r["ratio"] for r in rows if tuple(r["sizes"][s] for s in c["over"]) == sizes}
        cells = [Text(spread(v["ratio"]), STYLE[v["verdict"]]) if (v := found.get(name)) else "" for name in others]
        table.add_row(*map(str, sizes), *cells)
    level = min(r["ratio"].get("level", LEVEL) for r in rows)
    table.caption = f"time over that of {c['rows'][0]['variant']}, warm, with its {level:g} % interval"
    return table
