"""The arena over a step: when each value lives, and where. Values that live at one time share no byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ...program.arena import LABELS, PERSISTENT, gb
from .markup import Markup, join, tag
from .svg import WIDTH, LinearScale, legend, phase_bars, picture, rect

if TYPE_CHECKING:
    from ...program.arena import ArenaPlan
    from ...program.program import Call, Value

LEFT, TOP, BOTTOM = 74, 40, 440


def arena_map(plan: ArenaPlan, calls: Sequence[Call]) -> Markup:
    """Draw persistent values as one bar, and the pool of all others as a map: calls to the right, bytes upwards."""
    scratch = {v for parts in plan.scratch.values() for v in parts.values()}

    def group(v: Value) -> str:
        return "scratch" if v in scratch else v.group

    pooled = [
        v for v in plan.lifetimes if group(v) not in PERSISTENT and v.nbytes and plan.offsets[v] < plan.total_bytes
    ]
    groups = [g for g in LABELS if any(group(v) == g for v in pooled)]
    return join(
        tag("p", f"{gb(plan.total_bytes)} in all.", class_="note"),
        _persistent(plan),
        tag(
            "p",
            f"The pool, {gb(plan.pool_bytes)}: the bytes of values of {gb(sum(plan.groups.get(g, 0) for g in groups))} "
            "in all, which do not live at one time.",
            class_="note",
        ),
        legend((g, LABELS[g]) for g in groups),
        _pool(plan, calls, pooled, group) if pooled else None,
    )


def _persistent(plan: ArenaPlan) -> Markup:
    """Draw a bar of the values that live through all steps, and of the pool."""
    sizes = {**{g: plan.groups[g] for g in PERSISTENT if plan.groups.get(g)}, "pool": plan.pool_bytes}
    x = LinearScale(0, max(sum(sizes.values()), 1), 0, WIDTH)
    parts, at = [], 0
    for g, n in sizes.items():
        name = f"{LABELS.get(g, 'pool')} {gb(n)}"
        parts.append(rect(x(at), x(at + n) - 1, 0, 22, g, name))
        if x(at + n) - x(at) > 7 * len(name):
            parts.append(tag("text", name, x=x(at) + 8, y=15.5, class_="inside"))
        at += n
    return join(
        legend((g, f"{LABELS.get(g, 'pool')} {gb(n)}") for g, n in sizes.items()),
        picture(22, "bytes of the arena by group", parts),
    )


def _pool(plan: ArenaPlan, calls: Sequence[Call], pooled: Sequence[Value], group: Callable[[Value], str]) -> Markup:
    start = min(plan.offsets[v] for v in pooled)
    x = LinearScale(0, max(len(calls), 1), LEFT, WIDTH - 10)
    y = LinearScale(0, plan.pool_bytes / 1e6, BOTTOM, TOP)
    parts: list[Markup] = []
    for t in y.ticks():
        parts.append(tag("line", x1=x.start, x2=x.end, y1=y(t), y2=y(t), class_="grid"))
        parts.append(tag("text", f"{t:g}", x=LEFT - 8, y=y(t) + 4, text_anchor="end", class_="tick"))
    parts.append(tag("text", "MB", x=LEFT - 8, y=TOP - 14, text_anchor="end", class_="name"))
    parts.append(
        tag("text", "calls of the program, in order", x=WIDTH - 10, y=BOTTOM + 40, text_anchor="end", class_="name")
    )
    runs = [[*run] for _, run in groupby(range(len(calls)), key=lambda i: calls[i].phase)]
    phases = ((calls[r[0]].phase, r[0], r[-1] + 1, f"{calls[r[0]].phase}: calls {r[0]} to {r[-1]}") for r in runs)
    parts += phase_bars(phases, x, BOTTOM + 4, BOTTOM + 22)
    last = len(calls) - 1
    for v in pooled:
        born, died = (min(max(i, 0), last) for i in plan.lifetimes[v])
        low, high = (plan.offsets[v] - start) / 1e6, (plan.offsets[v] - start + v.nbytes) / 1e6
        tip = f"{v.name} {list(v.shape)}\n{gb(v.nbytes)} at {gb(plan.offsets[v])}\ncalls {born} to {died}"
        tip += f": {calls[born].op.name} in {calls[born].layer} to {calls[died].op.name} in {calls[died].layer}"
        parts.append(rect(x(born), x(died + 1), y(high), max(y(low) - y(high), 0.4), f"value {group(v)}", tip))
    return picture(BOTTOM + 46, "when and where in the pool each value lives", parts)
