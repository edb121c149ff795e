"""The tables of `cpuopt inspect`: sums of one or two kernels, their innermost loops, and advice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .style import table

if TYPE_CHECKING:
    from ..lab import targets
    from ..lab.inspect import Inspection

WIDTHS = {0: "", 1: "scalar"}
ROWS = {
    "loops": "innermost loops",
    "scalar_loops": "of them scalar",
    "width": "floats a vector",
    "fmas": "FMAs",
    "loads": "loads",
    "stores": "stores",
    "spills": "spills and reloads",
    "doubles": "doubles",
    "calls": "calls",
}

DIGEST = re.compile(r"(?:.*/)?(\w+)_[0-9a-f]{32}(?=\.py)")


def brief(where: str) -> str:
    """Shorten the place of a generated file, whose name ends in a digest; ``new-kernel --backward`` prints its text."""
    return DIGEST.sub(r"generated/\1", where)


def tables(found: Sequence[Inspection]) -> list[RenderableType]:
    """Show kernels, those of one op side by side."""
    head = Text.assemble((found[0].op, "bold"), f" on {found[0].cpu}")
    made = table("in the innermost loops", *(f">{f.variant}" for f in found))
    for key, name in ROWS.items():
        cells = [f.summary[key] for f in found]
        made.add_row(name, *(Text(", ".join(c) if isinstance(c, list) else str(c)) for c in cells))
    shown: list[RenderableType] = [head, "", made]
    for f in found:
        ran = {True: ", which runs here", False: ", not the code that runs here", None: ""}[f.same]
        code = f" · code {f.code}{ran}" if f.code else ""
        shown += ["", Text.assemble((f"{f.op}[{f.variant}]", "bold"), f"  {brief(f.where)}{code}")]
        if not f.compiled:
            shown.append(Text("a Python function: nothing is compiled"))
            continue
        if not f.machine.startswith("x86_64"):
            shown.append(Text(f"loops are read on x86-64 only; this is {f.machine}. --asm prints the text", "yellow"))
        shown.append(loop_table(f))
        shown += [Text(f"{a.said}\n    {a.line}: {a.text}") for a in f.advice]
        if f.diagnostics:
            shown.append(Text(f.diagnostics))
    return shown


def loop_table(f: Inspection) -> Table:
    """Make a table with one row for each loop; equal ones, such as copies of one loop, share a row."""
    made = table("loop", *(f">{n}" for n in ["instr", "width", "FMA", "load", "store", "spill", "double"]), "calls")
    rows = Counter[tuple[str | None, ...]]()
    for v in f.innermost:
        bad = v.spills or v.doubles or v.calls or (v.width == 1 and not v.remainder)
        numbers = (v.fmas, v.loads, v.stores, v.spills, v.doubles)
        name = (brief(v.where) or v.function) + (", rest" if v.remainder else "")
        cells = (str(v.instructions), WIDTHS.get(v.width, str(v.width)), *(str(n) if n else "" for n in numbers))
        rows["yellow" if bad else None, name, *cells, ", ".join(dict.fromkeys(v.calls))] += 1
    return _filled(made, rows)


def _filled(made: Table, rows: Counter[tuple[str | None, ...]]) -> Table:
    """Add rows to a table, each a style and cells, with the number of equal ones."""
    for (colour, name, *cells), n in rows.items():
        made.add_row(Text(f"{name}" + f", {n}x" * (n > 1)), *(Text(c or "") for c in cells), style=colour)
    return made


def target_tables(found: Sequence[targets.ForeignInspection]) -> list[RenderableType]:
    """Show the loops of kernels that multiply and add, as another machine would run them."""
    shown: list[RenderableType] = []
    for f in found:
        names = ["instr", "width", "FMA", "load", "spill", "port limit", "cycles"]
        made, rows = table("loop", *(f">{n}" for n in names)), Counter[tuple[str | None, ...]]()
        for v in f.loops:
            numbers = [str(n) for n in (v.instructions, v.width, v.fmas, v.loads, v.spills or "")]
            cycles = "" if v.cycles is None else f"{v.cycles:.1f}"
            rows["yellow" if v.spills else None, v.function, *numbers, f"{v.limit:.1f}", cycles] += 1
        title = Text.assemble((f"{f.op}[{f.variant}]", "bold"), f" for {f.target}  {f.where}")
        shown += [title, _filled(made, rows)]
    if not any(v.cycles for f in found for v in f.loops):
        shown.append(Text("no cycles: there is no llvm-mca (Debian's package llvm), or it has no model of the machine"))
    return shown
