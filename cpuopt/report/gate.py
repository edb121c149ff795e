"""The table of `cpuopt gate`, on the console and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..lab.gate import STEP, is_noisy, is_slower
from ..wording import count, spread, text_of
from . import style
from .style import verdict


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """Show what differs between two commits, and what came out."""
    table = style.table("kernel", "sizes", f">{found['base']}, ms", f">{found['head']}, ms", ">ratio", "verdict")
    for row in found["rows"]:
        name, sizes, *figures = cells(row)
        table.add_row(name, sizes, *figures, verdict(row["verdict"]))
    shown: list[RenderableType] = [Text(heading(found), "bold"), ""]
    shown += [table, ""] * bool(found["rows"])
    return [*shown, *map(Text, reasons(found)), Text(conclusion(found), "bold")]


def markdown(found: Mapping[str, Any]) -> str:
    """Return the same as Markdown."""
    header = ["kernel", "sizes", f"{found['base']}, ms", f"{found['head']}, ms", "ratio", "verdict"]
    rows = [header, ["---"] * 2 + ["--:"] * 3 + ["---"], *([*cells(row), row["verdict"]] for row in found["rows"])]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    parts = [f"**{conclusion(found)}**", heading(found), "\n".join(lines) * bool(found["rows"])]
    return "\n\n".join(filter(None, [*parts, "\n".join(f"- {line}" for line in reasons(found))])) + "\n"


def heading(found: Mapping[str, Any]) -> str:
    """Name both commits, and count the kernels."""
    new = [f"{count(len(found[which]), 'kernel')} {which}" for which in ("new", "gone") if found[which]]
    return ", ".join([f"{found['head']} against {found['base']}", count(found["threads"], "thread"), *new])


def cells(row: Mapping[str, Any]) -> Sequence[str]:
    """Return the kernel, the sizes, both times and the ratio of a row."""
    types = dict.fromkeys(row["types"].values())
    sizes = ", ".join([text_of(row["sizes"]), *types])
    if "ratio" not in row:
        return [name_of(row), sizes, "", "", ""]
    times = [f"{row[ms]:,.{style.digits(row['a_ms'])}f}" for ms in ("a_ms", "b_ms")]
    return [name_of(row), sizes, *times, spread(row["ratio"])]


def name_of(row: Mapping[str, Any]) -> str:
    """Name a kernel, or the step of a model."""
    return f"{row['op']} of {row['variant']}" if row["op"] == STEP else f"{row['op']}[{row['variant']}]"


def reasons(found: Mapping[str, Any]) -> list[str]:
    """List the reasons of verdicts that have one, each with what changed in the source."""
    return [
        f"{name_of(row)}: {row['verdict']}: {row['reason']} (changed: {row['why']})"
        for row in found["rows"]
        if row["reason"] and row["verdict"] != "no difference shown"
    ]


def conclusion(found: Mapping[str, Any]) -> str:
    """Return the verdict on the change, in one line."""
    rows, percent = found["rows"], found["percent"]
    if not rows:
        alone = " of those that both have" * bool(found["new"] or found["gone"])
        new = "; new kernels are not checked" * bool(found["new"])
        return f"same code: no kernel's machine code differs{alone}{new}"
    bad = [row for row in rows if is_slower(row, percent)]
    parts = [f"{count(len(bad), 'comparison')} slower by more than {percent:g} %"] * bool(bad)
    refused = dict.fromkeys(name_of(r) for r in rows if "ratio" not in r and r["verdict"] != "right")
    parts += [f"refused: {', '.join(refused)}"] * bool(refused)
    noisy = sum(is_noisy(row, percent) for row in rows)
    parts += [f"{count(noisy, 'comparison')} without a verdict: the machine is too noisy"] * bool(noisy)
    what = "kernel or step" if any(row["op"] == STEP for row in rows) else "kernel"
    return "; ".join(parts) or f"no {what} is slower by more than {percent:g} %, of {count(len(rows), 'comparison')}"
