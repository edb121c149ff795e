"""What `cpuopt check` shows: a row a kernel, the worst element of each, and what is wrong. It fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..check.gate import Verdict
    from ..check.judge import Result

STYLE = {"PASS": "green", "MARGINAL": "yellow", "FAIL": "bold red"}


def tables(
    found: Sequence[Verdict], seed: int, threads: Sequence[int], *, detail: bool = False
) -> list[RenderableType]:
    """Show what checks found, and sum it up."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "kernel", "cases", "ratio", "worst element"):
        table.add_column(name, justify="right" if name in ("cases", "ratio") else "left", overflow="fold")
    for v in found:
        for r in v.results if detail else [v.worst]:
            table.add_row(
                Text(r.verdict, STYLE[r.verdict]),
                Text(r.kernel),
                Text(str(r.case) if detail else str(len(v.results))),
                "" if isinf(r.ratio) else f"{r.ratio:.3f}",
                Text(element(r)),
            )
    bad = [
        Text(f"{v.worst.kernel}: {v.worst.reason} ({v.worst.case})", STYLE[v.worst.verdict])
        for v in found
        if v.worst.reason
    ]
    counts = [f"{sum(v.worst.verdict == s for v in found)} {s}" for s in STYLE]
    skipped = sum(v.skipped for v in found)
    last = f"{', '.join(counts)} · threads {', '.join(map(str, threads))} · --seed {seed}"
    if skipped:
        last += f" · {skipped} cases left out, too large for the float64 reference"
    return [table, "", *bad, Text(last)]


def element(r: Result) -> str:
    """Say where a result's worst element is, and both values."""
    return f"{r.argument}{list(r.index)} {r.got:.6g}, expected {r.want:.6g}" if r.argument else ""
