"""The tables of `cpuopt runs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..files.reading import from_json
from ..lab.records import Point, losses
from ..measure.profile import UNACCOUNTED, next_commands
from ..measure.roofline import share
from ..wording import four, one_line
from . import ab, bench, judge, lab, style, sweep, tables, tune

if TYPE_CHECKING:
    from ..lab.records import Entry

BARS, CELLS = "▁▂▃▄▅▆▇█", 56
"""The levels of a curve in text, and its width."""


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


def headroom(found: Mapping[str, Any]) -> list[RenderableType]:
    """Show the ops of a profile by ms above their roofs, and the commands to improve the first."""
    table = style.table("op", "variant", ">ms", ">above roof", ">of roof", ">vanilla takes")
    for r in found["headroom"]:
        gain = "" if r["gain"] is None else f"{r['gain']:.1f}x"
        table.add_row(r["op"], r["variant"], four(r["ms"]), four(r["above_ms"]), share(r["of_roof"]), gain)
    table.caption = f"ms of a step, of {one_line(found['run'])}: {one_line(found['what'])}"
    sizes = [found[name] for name in ("model", "B", "T")]
    return [table, *(Text(f"Next: {next_commands(r['op'], *sizes)}") for r in found["headroom"][:1])]


KINDS: Mapping[str, Callable[[Mapping[str, Any], str], Iterable[RenderableType]]] = {
    "ab": ab.tables,
    "bench": lambda content, path: bench.tables(content),
    "judge": lambda content, path: judge.ruling(content["ruling"]),
    "lab": lambda content, path: lab.kept(content),
    "sweep": sweep.tables,
    "tune": tune.tables,
}
"""What shows a record, by its kind; a profile and a run of training have more."""


def shown(e: Entry, detail: bool = False) -> list[RenderableType]:
    """Show a record in the form of the verb that made it."""
    from ..measure.profile import Profile

    commit = f"commit {e.content.get('commit') or 'unknown'}"
    head: RenderableType = Text("  ".join(map(one_line, (str(e.path), e.time, commit))), "dim")
    if e.kind in KINDS:
        return [head, *KINDS[e.kind](e.content, str(e.path))]
    if e.kind == "train":
        head = Group(head, "", *course({"": (losses(e.path), e.content["summary"])}), "")
    if e.content.get("profile"):
        return [head, *tables.profile_tables(from_json(Profile, e.content["profile"]), detail=detail)]
    table = style.table("", "")
    for k, v in e.content.get("summary", e.content).items():
        table.add_row(Text(one_line(k)), Text(one_line(str(v))))
    return [head, table]


Course = tuple[Mapping[str, Sequence[Point]], Mapping[str, Any]]
"""The losses of a run by name, and its summary."""


def course(runs: Mapping[str, Course]) -> list[RenderableType]:
    """Show the losses of runs, by the runs' names: figures, and curves with one scale for all runs."""
    lines: list[RenderableType] = []
    table = style.table("", *(f">{name}" for name in runs))
    for kind in "training loss", "validation loss":
        ends = [finite for line, _ in runs.values() if (finite := _finite(line.get(kind, ())))]
        if not ends:
            continue
        cells = []
        for line, _ in runs.values():
            here = _finite(line.get(kind, ()))
            best = min(here, key=lambda p: (p[1], p[0]), default=None)
            cells.append(f"{here[0][1]:.4f} -> {here[-1][1]:.4f}, lowest {best[1]:.4f} at {best[0]}" if best else "")
        table.add_row(kind, *cells)
        low, high = min(v for x in ends for _, v in x), max(v for x in ends for _, v in x)
        first, last = min(x[0][0] for x in ends), max(x[-1][0] for x in ends)
        for name, (line, _) in runs.items():
            drawn = sparkline(_finite(line.get(kind, ())), (first, last), (low, high))
            lines.append(Text(f"{kind:<15} {name:<{len(name) and 2}}{drawn}"))
        lines.append(Text(f"{'':<15} {low:.4f} to {high:.4f}, steps {first} to {last}", "dim"))
    times = [s.get("step_ms_quiet") or s.get("step_ms_median") for _, s in runs.values()]
    if any(times):
        table.add_row("ms a step", *(four(ms) if ms else "" for ms in times))
    return [table, "", *lines] if lines else []


def _finite(line: Sequence[Point]) -> list[tuple[int, float]]:
    return [(step, v) for step, v in line if v is not None and isfinite(v)]


def sparkline(line: Sequence[tuple[int, float]], steps: tuple[int, int], values: tuple[float, float]) -> str:
    """Draw a line in one row of at most `CELLS` characters: the mean of each part of the steps, or the value before."""
    cells: list[list[float]] = [[] for _ in range(CELLS)]
    for step, v in line:
        cells[min(CELLS - 1, (step - steps[0]) * CELLS // max(1, steps[1] - steps[0]))].append(v)
    while cells and not cells[-1]:
        cells.pop()
    scale = (len(BARS) - 1) / ((values[1] - values[0]) or 1)
    shown = [BARS[round((fmean(c) - values[0]) * scale)] if c else "" for c in cells]
    return "".join(accumulate(shown, lambda before, now: now or before or " "))


def comparison(c: Mapping[str, Any]) -> list[RenderableType]:
    """Show how two training runs differ, and a table with one row an op."""
    lines: list[RenderableType] = [Text(f"A {c['a']}\nB {c['b']}"), ""]
    if "training" in c:
        apart = style.table("setting", "A", "B")
        for name, values in c["settings"].items():
            apart.add_row(Text(one_line(name)), *(Text(one_line(str(v))) for v in values))
        lines += [apart if c["settings"] else Text("equal settings"), ""]
        runs = {k.upper(): (c["training"][k]["losses"], c["training"][k]["summary"]) for k in ("a", "b")}
        lines += [*course(runs), ""]
    return [*lines, *_by_op(c)] if c["rows"] else lines


def _by_op(c: Mapping[str, Any]) -> list[RenderableType]:
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
        table,
        "",
        Text(f"noise: {100 * c['noise']:.1f} %, the difference between ops with unchanged kernels"),
        Text(f"intervals of {c['rows'][0]['level']:g} %; a ratio is of steps with the same number"),
        *(
            [Text("* another kernel")]
            if any(not r["same_kernels"] for r in c["rows"][1:] if r["op"] != UNACCOUNTED)
            else []
        ),
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
