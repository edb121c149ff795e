"""The screens of `cpuopt judge`: a verdict, the tasks, a board, what was adopted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..errors import REFUSED
from ..judge.desk import task_text
from ..judge.session import FASTER
from ..wording import count, spread, text_of
from . import style


def tables(c: Mapping[str, Any]) -> list[RenderableType]:
    """Show an answer of the judge, with its notes."""
    if "tasks" in c:
        shown = tasks(c)
    elif "best" in c:
        shown = board(c)
    else:
        shown = ruling(c) if "verdict" in c else [Text(f"written to {c['path']}; use it with {c['use']}")]
    return [*shown, *style.warnings(c.get("notes", ()))]


def ruling(r: Mapping[str, Any]) -> list[RenderableType]:
    """Show a verdict."""
    head = Text(f"{r['op']}[{r['candidate'] or '?'}]: ", "bold")
    head.append(r["verdict"], "bold red" if r["verdict"] in REFUSED else "bold")
    shown: list[RenderableType] = [head]
    if r["reason"]:
        shown.append(Text(r["reason"]))
    if r["cases"]:
        shown.append(Text(f"right in {count(r['cases'], 'case')}, most of them private"))
    t = r["timed"]
    if t:
        table = style.table("shape", f">{t['against']} us", ">it us", ">ratio", ">% of roof")
        for case in t["cases"]:
            roof = "" if case["roof_percent"] is None else f"{case['roof_percent']:.0f}"
            times = f"{case['a_us']:.1f}", f"{case['b_us']:.1f}", spread(case["ratio"])
            table.add_row(Text(text_of(case["sizes"])), *times, roof)
        saves = f"{abs(t['saves_ms']):.3g} ms {'less' if t['saves_ms'] > 0 else 'more'}"
        shown += [Text(f"score {t['score']:.3f}; the calls of a step take {saves}"), table]
    if loops := t.get("loops"):
        widest, spills = max(v["width"] for v in loops), sum(v["spills"] for v in loops)
        shown.append(
            Text(f"{count(len(loops), 'innermost loop')}, vectors of up to {widest}, {count(spills, 'spill')}")
        )
    shown += [Text(a["said"]) for a in t.get("advice", ())]
    if step := t.get("in_step"):
        whole = spread(step["step"]["ratio"])
        shown.append(
            Text(f"in training steps: {step['a_ms']:.3g} ms become {step['b_ms']:.3g}, {step['verdict']}; step {whole}")
        )
    closed = f"closed by {r['isolation']['by']}; " if r["isolation"] else ""
    place = f"; place {r['place']}" if r.get("place") else ""
    shown.append(Text(f"{closed}text {r['text'][:12]}; {r['seconds']:.1f} s{place}", "dim"))
    missing = r["isolation"].get("missing") or []
    doubts = [*([f"this system does not allow: {', '.join(missing)}"] * bool(missing)), *t.get("doubts", ())]
    return [*shown, *style.warnings(doubts)]


def tasks(c: Mapping[str, Any]) -> list[RenderableType]:
    """List the tasks."""
    timed = "us" in c["tasks"][0]
    table = style.table("task", *((">vanilla us", ">fastest us", ">roof us") if timed else ("kernels",)), ">best score")
    for t in c["tasks"]:
        us = [t["us"]["vanilla"], t["us"][t["baseline"]], t["roof_us"]] if timed else []
        about = ["" if x is None else f"{x:.4g}" for x in us] or [", ".join(t["variants"])]
        table.add_row(Text(t["op"]), *map(Text, about), "" if t["best"] is None else f"{t['best']:.3f}")
    return [table]


def board(c: Mapping[str, Any]) -> list[RenderableType]:
    """List the submissions of a task."""
    others = [Text(f"others are kept for {'; '.join(map(task_text, c['others']))}")] if c["others"] else []
    if not c["best"]:
        said = f"no submission of {c['op']} is kept for {task_text(c['task'])}; make one: cpuopt judge FILE"
        return [Text(f"{said} --op {c['op']}"), *others]
    table = style.table(">", "kernel", ">score", ">ratio", "text")
    for i, row in enumerate(c["best"]):
        times = f"{row['score']:.3f}", spread(row["ratio"])
        place = str(i + 1) if row["verdict"] == FASTER else ""
        table.add_row(place, Text(row["candidate"]), *times, Text(row["text"][:12]))
    best = c["best"][0]
    head = f"{c['op']} for {task_text(c['task'])}: {count(c['tries'], 'submission')}, scores against {best['against']}"
    head += f" on {best['machine']}; who is faster has a place"
    return [Text(head), table, *others, Text("the text of the first:"), Text(best["source"])]
