"""The tables of `cpuopt runs` and `cpuopt history`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from ..files.reading import from_json
from ..measure.profile import UNACCOUNTED
from ..wording import four, one_line
from . import ab, judge, style, sweep, tables, verdicts
from . import bench as bench_report
from . import tune as tune_report

if TYPE_CHECKING:
    from ..lab.records import Entry


def listing(found: Sequence[Entry], root: Path) -> list[RenderableType]:
    """Make a table with one row a record; the folder's name holds time and kind."""
    if not found:
        return [
            Text(f"no records in {root}; make some: cpuopt profile, ab, sweep, bench or train; --runs DIR looks there")
        ]
    table = style.table("run", "what")
    table.columns[0].no_wrap = True  # to be copied whole
    for e in found:
        table.add_row(Text(one_line(e.path.name)), Text(one_line(e.what), "red" if e.trouble else ""))
    return [table]


def shown(e: Entry, detail: bool = False) -> list[RenderableType]:
    """Show a record in the form of the verb that made it."""
    from ..measure.profile import Profile

    commit = f"commit {e.content.get('commit') or 'unknown'}"
    head = Text("  ".join(map(one_line, (str(e.path), e.time, commit))), "dim")
    if e.kind == "ab":
        return [head, *ab.tables(e.content, str(e.path))]
    if e.kind == "bench":
        return [head, *bench_report.tables(e.content)]
    if e.kind == "judge":
        return [head, *judge.ruling(e.content["ruling"])]
    if e.kind == "sweep":
        return [head, *sweep.tables(e.content, str(e.path))]
    if e.kind == "verdicts":
        return [head, *verdicts.tables(e.content, str(e.path))]
    if e.kind == "tune":
        return [head, *tune_report.tables(e.content, str(e.path))]
    if e.content.get("profile"):
        return [head, *tables.profile_tables(from_json(Profile, e.content["profile"]), detail=detail)]
    table = style.table("", "")
    for k, v in e.content.get("summary", e.content).items():
        table.add_row(Text(one_line(k)), Text(one_line(str(v))))
    return [head, table]


def comparison(c: Mapping[str, Any]) -> list[RenderableType]:
    """Make a table with one row an op."""
    table = style.table("op", ">A ms", ">B ms", ">B/A [interval]", "verdict")
    for r in c["rows"]:
        if r["op"] == UNACCOUNTED:
            continue
        changed = "" if r["op"] == "step" or r["same_kernels"] else " *"
        word = "no difference" if r["verdict"] == "no difference shown" else r["verdict"]
        ratio = f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
        table.add_row(
            Text(r["op"] + changed), four(r["a_ms"]), four(r["b_ms"]), ratio, Text(word, style.STYLE[r["verdict"]])
        )
    lines: list[RenderableType] = [
        Text(f"A {c['a']}\nB {c['b']}"),
        "",
        table,
        "",
        Text(f"noise: {100 * c['noise']:.1f} %, the difference between ops with unchanged kernels"),
        Text(f"intervals of {c['rows'][0]['level']:g} %; a ratio is of steps with the same number"),
        *([Text("* another kernel")] if any(not r["same_kernels"] for r in c["rows"][1:]) else []),
    ]
    lines += [Text(f"only in {k[-1].upper()}: {', '.join(c[k])}") for k in ("only_a", "only_b") if c[k]]
    return [*lines, *style.warnings(c["doubts"])]


def history(op: str, rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Make one table a size, with one row a measurement."""
    if not rows:
        return [Text(f"no record of {op} on this machine; 'cpuopt ab {op} A B' and 'cpuopt profile' make some")]
    shown: list[RenderableType] = [Text(op, "bold")]
    for size in dict.fromkeys(r["size"] for r in rows):
        table = style.table("time", "variant", ">ms", ">GFLOP/s", "kernel", "commit")
        for r in rows:
            if r["size"] == size:
                first = r["time"][:16].replace("T", " "), Text(r["variant"]), f"{r['ms']:,.3f}"
                rate = f"{r['gflops']:.1f}" if r["gflops"] else ""
                table.add_row(*first, rate, r["hash"] or "", r["commit"] or "")
        shown += ["", Text(size), table]
    return shown
