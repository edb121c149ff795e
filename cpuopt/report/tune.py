"""The display of `cpuopt tune`: measurements of each op and shape, the verdict on the step, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from types import TracebackType
from typing import Any

from rich.console import RenderableType
from rich.progress import TimeRemainingColumn
from rich.text import Text

from ..check.result import RIGHT
from ..lab.tune import UNKNOWN, TunedOp, TuneView, Tuning
from ..measure.comparison import marginal
from ..wording import count, four, spread
from . import style
from .console import ERR, on_stderr, put
from .style import STYLE

STEPS = 5
"""The estimated time of confirming the plan in whole steps, in comparisons."""


class Progress(TuneView):
    """Progress with the time that remains; without a terminal, a line for each comparison."""

    def __init__(self, tuning: Tuning) -> None:
        self.total = sum(len(row.candidates) for row in tuning.rows)
        self.count = 0
        columns = "{task.completed}/{task.total}", style.BAR, TimeRemainingColumn(), "{task.description}"
        self.bar = on_stderr(*columns)
        self.task = self.bar.add_task("", total=self.total + STEPS)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.stop()

    def at(self, text: str) -> None:
        """Show the measurement that begins."""
        self.bar.update(self.task, description=text)
        if self.bar.disable and self.count == self.total:  # whole steps, which `done` does not count
            put(ERR, text)

    def done(self, row: TunedOp, variant: str) -> None:
        """Count a comparison."""
        self.count += 1
        self.bar.advance(self.task)
        if self.bar.disable:
            found = row.tried[variant]
            said = f"{found['verdict']} {spread(found['ratio'])}" if "ratio" in found else found["why"]
            put(ERR, f"{self.count}/{self.total} {row}: {variant}: {said}")


def tables(content: Mapping[str, Any], path: str | None) -> list[RenderableType]:
    """Show the measurements and the plan."""
    c = content
    threads = count(c["threads"], "thread")
    where = "cold caches, as in the step" if c["flush"] else "warm caches, since they hold the step"
    head = Text.assemble((c["model"], "bold"), f" · {c['B']}x{c['T']} · {threads} · alone with {where}")
    shown: list[RenderableType] = [head, ""]
    for row in c["rows"]:
        shown += _row(row, c["rules"]) if row["tried"] else []
    left = 0
    for row in c["rows"]:
        codes = row.get("hashes", {})
        same = [v for v in codes if v != row["default"] and codes[v] == codes[row["default"]] != UNKNOWN]
        for v in same:
            shown.append(Text(f"{row['op']}[{v}] is the code of {row['default']}: nothing to compare"))
        left += not row["tried"] and not same
    if left:
        shown.append(Text(f"{left} more were not measured and keep the default", "dim"))
    if any(row["tried"] for row in c["rows"]):
        legend = "ratio: the time over that of the first line, with its 99.5 % interval (lower below 9 rounds)"
        shown += [Text(legend, "italic"), ""]
    shown += style.warnings(c["doubts"])
    if c["step"]:
        step = c["step"]
        a, b = step["a_ns"] / 1e6, step["b_ns"] / 1e6
        ratio = f"{a:,.1f} ms by default, {b:,.1f} with the plan, ratio {spread(step['ratio'])}: "
        shown.append(Text.assemble("whole steps: ", ratio, (step["verdict"], STYLE[step["verdict"]])))
    if not c["finished"]:
        again = "what was measured alone is kept, and the same command goes on from here"
        shown.append(Text(f"no plan is written: {c['why'] or 'interrupted'}; {again}", "bold"))
    elif not c["plan"]:
        shown.append(Text("the plan could not be kept: --variant auto will not use it", "bold red"))
    elif c["rules"]:
        shown.append(Text(f"plan {c['plan']}: --variant auto uses it"))
    else:
        shown.append(Text(f"--variant auto stays with the default: {c['why']}", "bold"))
    if c["finished"] and c.get("left"):
        shown.append(Text(f"the budget left out {count(c['left'], 'comparison')}; the same command goes on from here"))
    if path:
        shown.append(Text(f"record {path}"))
    return shown


def _row(row: Mapping[str, Any], rules: list[str]) -> list[RenderableType]:
    """Show an op on its shapes: the default, the other variants, and the choice of the plan."""
    layers = dict.fromkeys(layer for s in row["shapes"] for layer in s["layers"])
    taken = any(f"{row['op']}@{layer}={row['best']}" in rules for layer in layers)
    shown: list[RenderableType] = []
    for s in row["shapes"]:
        sizes = " ".join(f"{k}={n}" for k, n in s["sizes"].items())
        added = "".join(f", {n}_add" for n, on in s["adds"].items() if on)
        shown.append(Text.assemble((row["op"], "bold"), f" {sizes}{added}, {len(s['layers'])}x"))
    table = style.table("", ">", "", "")
    for column, width in zip(table.columns, (22, 8, 20), strict=False):
        column.min_width = width
    table.columns[2].no_wrap = True  # a ratio with its interval
    times = [t["a_ms"] for t in row["tried"].values() if "a_ms" in t]
    table.add_row(
        f"  {row['default']}", f"{four(median(times))} ms" if times else "", "", "" if taken else Text("stays", "dim")
    )
    for variant, t in row["tried"].items():
        if "ratio" not in t:
            table.add_row(Text(f"  {variant}"), "", "", Text(f"{t['verdict']}: {t['why']}", "yellow"))
            continue
        word = Text(t["verdict"], STYLE[t["verdict"]])
        if t.get("check") not in (None, RIGHT, "PASS"):
            word = Text(f"{t['verdict']}, but {t['check']}: {t['why']}", "bold red")
        elif variant == row["best"] and row["in_step"]:
            step = row["in_step"]
            word.append(f"; in steps {step['ratio']['median']:.3f}, {step['verdict']}", STYLE[step["verdict"]])
            word.append(": taken" if taken else "", "bold")
        for line in marginal([t]):
            word.append(f"; {line}", "bold yellow")
        table.add_row(Text(f"  {variant}"), f"{four(t['b_ms'])} ms", spread(t["ratio"]), word)
    return [*shown, table]
