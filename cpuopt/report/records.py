"""What `cpuopt runs` and `cpuopt history` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from . import ab, tables
from . import bench as bench_report
from . import tune as tune_report

if TYPE_CHECKING:
    from ..lab.records import Entry


def listing(found: Sequence[Entry]) -> list[RenderableType]:
    """One row a record."""
    table = _table("time", "kind", "what", "folder")
    for e in found:
        table.add_row(e.time[:16], e.kind, Text(e.what), Text(e.path.name))
    return [table] if found else [Text("no records yet: ab, bench, profile, tune and train make some")]


def shown(e: Entry) -> list[RenderableType]:
    """Show a record as the verb that made it did."""
    from ..profile import Profile

    head = Text(f"{e.path}  {e.time}  commit {e.content.get('commit') or 'unknown'}", "dim")
    if e.kind == "ab":
        return [head, *ab.tables(e.content, str(e.path))]
    if e.kind == "bench":
        return [head, *bench_report.tables(e.content)]
    if e.kind == "tune":
        return [head, *tune_report.tables(e.content, str(e.path))]
    if e.content.get("profile"):
        return [head, *tables.profile_tables(Profile.from_json(e.content["profile"]))]
    table = _table("", "")
    for k, v in e.content.get("summary", e.content).items():
        table.add_row(k, Text(str(v)))
    return [head, table]


def comparison(c: Mapping[str, Any]) -> list[RenderableType]:
    """One row an op."""
    table = _table("op", "A ms", "B ms", "B/A", "interval", "kernels", "verdict")
    for r in c["rows"]:
        kernels = "" if r["op"] == "step" else "same" if r["same_kernels"] else "changed"
        figures = [f"{r['a_ms']:,.3f}", f"{r['b_ms']:,.3f}", f"{r['ratio']:.3f}", f"{r['low']:.3f} to {r['high']:.3f}"]
        table.add_row(Text(r["op"]), *figures, kernels, Text(r["verdict"], ab.STYLE[r["verdict"]]))
    lines: list[RenderableType] = [
        Text(f"A {c['a']}\nB {c['b']}"),
        "",
        table,
        "",
        Text(f"noise between the two: {100 * c['noise']:.1f} %"),
    ]
    lines += [Text(f"only in {k[-1].upper()}: {', '.join(c[k])}") for k in ("only_a", "only_b") if c[k]]
    return [*lines, *(Text(f"doubt: {d}", "yellow") for d in c["doubts"])]


def history(op: str, rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """One row a measurement."""
    table = _table("time", "size", "variant", "ms", "GFLOP/s", "kernel", "commit")
    for r in rows:
        rate = f"{r['gflops']:.1f}" if r["gflops"] else ""
        table.add_row(
            r["time"][:16], r["size"], Text(r["variant"]), f"{r['ms']:,.3f}", rate, r["hash"] or "", r["commit"] or ""
        )
    return [Text(op, "bold"), table] if rows else [Text(f"no record of {op} on this machine: ab and profile make some")]


def _table(*names: str) -> Table:
    numbers = ("ms", "A ms", "B ms", "B/A", "GFLOP/s")
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table
