"""The tables of `cpuopt ab`: the verdict, both times, and each shape, in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..measure.comparison import LEVEL, marginal
from ..wording import call_count, count, size_of, spread, text_of
from . import style
from .style import verdict


def tables(content: Mapping[str, Any], path: str | None) -> list[RenderableType]:
    """Show what was compared and what came out."""
    c = content
    where = "in the training step" if c["in_step"] else "alone, caches flushed" if c["flush"] else "alone"
    model = f" · {c['model']} · layers {c['layer']}" if c["model"] else ""
    head = Text.assemble((c["op"], "bold"), f": {c['b']} against {c['a']}, {where}{model}")
    return [head, "", *compared(c), *[Text(f"record {path}")] * bool(path)]


def compared(c: Mapping[str, Any]) -> list[RenderableType]:
    """Show the results of a comparison, and the verdict."""
    table = style.table("", f">{c['a']}", f">{c['b']}", ">ratio", ">control", "verdict")
    for r in c["results"]:
        name = (
            ", ".join([size_of(r), count(r["threads"], "thread"), *filter(None, [call_count(r)])]) if size_of(r) else ""
        )
        _row(table, name, r["a_ms"], r["b_ms"], r)
        if b := r.get("beside"):
            digits = style.digits(b["a_ms"])
            times = [f"{b[ms]:,.{digits}f}" for ms in ("a_ms", "b_ms")]
            table.add_row(f"  {b['caches']} caches", *times, f"{b['b_ms'] / b['a_ms']:.3f}", "", "")
        for case in r.get("cases", []) if len(r.get("cases", [])) > 1 else []:
            name = f"  {text_of(case['sizes'])}, {len(case['layers'])}x"
            _row(table, name, case["a_ns"] / 1e6, case["b_ns"] / 1e6, case)
        if "step" in r:
            _row(table, "  the whole step", r["step"]["a_ns"] / 1e6, r["step"]["b_ns"] / 1e6, r["step"])
    table.caption = (
        f"ms; ratio: {c['b']}'s time over {c['a']}'s, with its {interval(c)}; control: {c['a']}'s over its own"
    )
    shown: list[RenderableType] = [table, "", Text.assemble("verdict: ", verdict(c["verdict"]), _because(c))]
    shown += [Text(line, "bold yellow") for line in marginal(c["results"])]
    if c.get("level", LEVEL) < LEVEL:
        shown += style.warnings([f"the rounds are too few for an interval of {LEVEL} %; take 9 or more"])
    for r in c["results"]:
        if "losses" in r:
            last = f"losses {', '.join(f'{x:.6f}' for x in r['losses']['A'])}"
            shown.append(Text(f"{last} with {c['a']}, {', '.join(f'{x:.6f}' for x in r['losses']['B'])} with {c['b']}"))
        shown += [Text(f"note: {n}") for n in r.get("notes", ())]
        shown += style.warnings(r["doubts"])
    return shown


def interval(c: Mapping[str, Any]) -> str:
    """Name the interval of a comparison by its level."""
    return f"{c.get('level', LEVEL):g} % interval"


def _because(c: Mapping[str, Any]) -> str:
    factor = c["ratio"]["median"]
    if c["verdict"] in ("faster", "slower"):
        factor = max(factor, 1 / factor)
        percent = f", by {100 * (factor - 1):.1f} %"
        return percent if factor < 2 else f", {factor:.1f} times as {'fast' if c['verdict'] == 'faster' else 'slow'}"
    return f" ({c['why']})" if c["why"] else ""


def _row(table: Table, name: str, a_ms: float, b_ms: float, r: Mapping[str, Any]) -> None:
    digits = style.digits(a_ms)
    figures = [f"{a_ms:,.{digits}f}", f"{b_ms:,.{digits}f}", spread(r["ratio"]), f"{r['control']['median']:.3f}"]
    table.add_row(name, *figures, verdict(r["verdict"]))
