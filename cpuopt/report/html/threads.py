"""What each thread did in the slowest calls of an op, for ``cpuopt profile --lines --html``."""

from __future__ import annotations

import re

from ...measure.lines import WAITS, OpLines, SlowCall
from ...wording import count
from ..lines import short as short_place
from .markup import Markup, join, tag
from .svg import WIDTH, LinearScale, legend, picture, rect, short, time_axis

LEFT, TOP, ROW = 92, 8, 20
PART, LINE, MATH, WAITING, OTHER = KINDS = ("part", "forward", "backward", "scratch", "moment")
"""The classes of the bars and the marks of samples."""
MEANING = dict(
    zip(KINDS, ("part of a parallel loop", "line of source", "math functions", "waiting", "other code"), strict=True)
)
NOTE = "A row for each thread. A bar is the time of its part of a parallel loop, and a mark is a sample."


def slow_calls(op: OpLines) -> Markup | None:
    """Draw the slowest calls of an op, one below the other; None if none was kept."""
    if not op.slowest:
        return None
    used = {kind_of(p) for call in op.slowest for p in call.places}
    used |= {PART for call in op.slowest for t in call.threads if t.parts}
    colours = legend((kind, MEANING[kind]) for kind in KINDS if kind in used)
    title = tag("h3", count(len(op.slowest), "slowest call"))
    return join(title, tag("p", NOTE, class_="note"), colours, [_call(call) for call in op.slowest])


def kind_of(place: str) -> str:
    """Return the class of a place of `SlowCall.places`."""
    if place.startswith(WAITS):
        return WAITING
    return MATH if place.startswith("math functions") else LINE if re.search(r":\d+ ", place) else OTHER


def _call(call: SlowCall) -> Markup:
    unit, us = ("ms", 1e3) if call.us >= 1e3 else ("µs", 1.0)
    x, bottom = LinearScale(0, call.us / us, LEFT, WIDTH - 10), TOP + ROW * len(call.threads)
    parts = time_axis(x, TOP, bottom, unit)
    for i, t in enumerate(call.threads):
        at, name = TOP + ROW * i + 3, thread_name(t.thread)
        parts.append(tag("text", name, x=LEFT - 10, y=at + 11, text_anchor="end", class_="row"))
        for a, b in t.parts:
            tip = f"{name}: part of a parallel loop\n{short((b - a) / us)} {unit}, from {short(a / us)} {unit}"
            parts.append(rect(x(a / us), x(b / us), at, ROW - 6, PART, tip))
        for when, n in t.samples:
            tip = f"{name} at {short(when / us)} {unit}\n{short_place(call.places[n])}"
            parts.append(rect(x(when / us) - 1.5, x(when / us) + 1.5, at + 2, ROW - 10, kind_of(call.places[n]), tip))
    title = f"{call.layer} in step {call.step}: {short(call.us / us)} {unit}"
    return join(tag("p", title, class_="note"), picture(bottom + 34, f"threads of a call, {title}", parts))


def thread_name(thread: int) -> str:
    """Name a thread."""
    return "main" if thread == 0 else f"thread {thread}" if thread > 0 else "others"
