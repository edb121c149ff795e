"""The table of `cpuopt check`: a row a kernel, its worst element, and the errors found, in 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from ..check.result import MARGINAL, RIGHT, WORDS
from ..errors import UNCHECKED, WRONG
from . import style
from .style import STYLE, verdict

if TYPE_CHECKING:
    from ..check.cases import Case
    from ..check.result import Result


def tables(found: Sequence[Result], seed: int, threads: Sequence[int], *, detail: bool = False) -> list[RenderableType]:
    """Show the results of kernels, and a summary."""
    table = style.table("", "kernel", "cases" if detail else ">cases", ">ratio", "worst element")
    table.columns[1].no_wrap = True  # a name is copied into a command
    for v in found:
        for r in v.cases if detail else [v]:
            what = str(r.case) if detail else str(len(v.cases))
            table.add_row(verdict(r.verdict), r.kernel, what, ratio(r.ratio), element(r))
    said = [Text(f"{v.kernel}: {v.reason} ({v.case})", STYLE[v.verdict]) for v in found if v.reason]
    said += [Text(f"note: {v.kernel} asks for scratch of {v.scratch:.3g} times its arrays")
             for v in found if v.scratch > 1]  # fmt: skip
    for word in (MARGINAL, UNCHECKED):
        if of := [v.kernel for v in found if v.verdict == word]:
            said.append(Text(f"{word}: {', '.join(of)}: {WORDS[word]}", STYLE[word]))
    counts = Counter(v.verdict for v in found)
    each = [f"{counts[w]} {w}" for w in WORDS if counts[w] or w in (RIGHT, MARGINAL, WRONG)]
    last = f"{', '.join(each)} · threads {', '.join(map(str, threads))} · --seed {seed}"
    if left_out := sum(v.left_out for v in found):
        last += f" · {left_out} cases left out, too large for the float64 reference"
    return [table, "", *said, Text(last)]


def plan(plans: Mapping[str, tuple[Sequence[Case], int]], seed: int, threads: Sequence[int]) -> list[RenderableType]:
    """Show the cases on which the kernels of some ops are judged, and how."""
    table = style.table("op", "case", "judged by")
    for op, (cases, _) in plans.items():
        for c in cases:
            table.add_row(op, str(c), "the formula in float32, at its size" if c.sized else "the float64 reference")
    count = sum(len(cases) for cases, _ in plans.values())
    last = f"{count} cases · threads {', '.join(map(str, threads))} · --seed {seed}"
    if left_out := sum(n for _, n in plans.values()):
        last += f" · {left_out} left out, too large for the float64 reference"
    return [table, "", Text(last)]


def ratio(x: float) -> str:
    """Format a ratio: empty if there is none, short if it is large."""
    return "" if not isfinite(x) else f"{x:.3f}" if x < 1000 else f"{x:.1e}"


def element(r: Result) -> str:
    """Describe a result's worst element: its place, and both values."""
    return f"{r.argument}{list(r.index)} {r.got:.6g}, expected {r.want:.6g}" if r.index else ""
