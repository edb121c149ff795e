"""The table of `cpuopt check`: a row a kernel, its worst element, and the errors found, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from . import style
from .style import STYLE, verdict

if TYPE_CHECKING:
    from ..check.gate import GateVerdict
    from ..check.judge import CheckResult


def tables(
    found: Sequence[GateVerdict], seed: int, threads: Sequence[int], *, detail: bool = False
) -> list[RenderableType]:
    """Show the results of checks, and a summary."""
    table = style.table("", "kernel", "cases" if detail else ">cases", ">ratio", "worst element")
    table.columns[1].no_wrap = True  # a name is copied into a command
    for v in found:
        for r in v.results if detail else [v.worst]:
            what = str(r.case) if detail else str(len(v.results))
            table.add_row(verdict(r.verdict), r.kernel, what, ratio(r.ratio), element(r))
    bad = [
        Text(f"{v.worst.kernel}: {v.worst.reason} ({v.worst.case})", STYLE[v.worst.verdict])
        for v in found
        if v.worst.reason
    ]
    marginal = [v.worst.kernel for v in found if v.worst.verdict == "MARGINAL"]
    bad += [Text(style.explained(marginal), STYLE["MARGINAL"])] * bool(marginal)
    bad += [Text(f"note: {v.op}[{v.variant}] asks for scratch of {v.scratch:.3g} times its arrays")
            for v in found if v.scratch > 1]  # fmt: skip
    unchecked = [v.worst.kernel for v in found if v.worst.verdict == "UNCHECKED"]
    bad += [Text(f"UNCHECKED: {', '.join(unchecked)}: not judged, so neither right nor wrong",
                 STYLE["UNCHECKED"])] * bool(unchecked)  # fmt: skip
    words = ("PASS", "MARGINAL", "FAIL", *["UNCHECKED"] * bool(unchecked))
    counts = [f"{sum(v.worst.verdict == s for v in found)} {s}" for s in words]
    skipped = sum(v.skipped for v in found)
    last = f"{', '.join(counts)} · threads {', '.join(map(str, threads))} · --seed {seed}"
    if skipped:
        last += f" · {skipped} cases left out, too large for the float64 reference"
    return [table, "", *bad, Text(last)]


def ratio(x: float) -> str:
    """Format a ratio: empty if there is none, short if it is large."""
    return "" if not isfinite(x) else f"{x:.3f}" if x < 1000 else f"{x:.1e}"


def element(r: CheckResult) -> str:
    """Describe a result's worst element: its place, and both values."""
    return f"{r.argument}{list(r.index)} {r.got:.6g}, expected {r.want:.6g}" if r.argument else ""
