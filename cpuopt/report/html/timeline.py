"""The timeline of one step: time to the right, a row for each layer, a bar for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...program.program import PARTS, block_of
from .labels import shortened
from .markup import Markup, join, tag
from .svg import WIDTH, LinearScale, legend, phase_bars, picture, rect, short, time_axis

if TYPE_CHECKING:
    from ...measure.profile import StepTimes

LEFT, TOP, ROW = 130, 44, 17


def timeline(step: StepTimes) -> Markup:
    """Draw a step; the layers inside a block share the block's row."""
    calls = [
        (bound, int(start) - step.start, int(end) - step.start)
        for bounds, marks in step.runs
        for bound, start, end in zip(bounds, marks[:-1], marks[1:], strict=True)
    ]
    rows = {name: i for i, name in enumerate(dict.fromkeys(block_of(b.call.layer) for b, *_ in calls))}
    bottom = TOP + ROW * len(rows)
    x = LinearScale(0, (step.end - step.start) / 1e6, LEFT, WIDTH - 10)
    parts = time_axis(x, TOP - 6, bottom, "ms")
    for name, i in rows.items():
        parts.append(
            tag("text", shortened(name, 18), x=LEFT - 10, y=TOP + ROW * i + 13, text_anchor="end", class_="row")
        )
    ends = [(b[0].call.phase, int(m[0]) - step.start, int(m[-1]) - step.start) for b, m in step.runs if b]
    parts += phase_bars(((p, a / 1e6, b / 1e6, f"{p} {short((b - a) / 1e6)} ms") for p, a, b in ends), x, 26, 18)
    for bound, start, end in calls:
        c = bound.call
        tip = f"{c.layer}\n{bound.kernel.name}\n{short((end - start) / 1e6)} ms, from {short(start / 1e6)} ms"
        at = TOP + ROW * rows[block_of(c.layer)] + 2
        parts.append(rect(x(start / 1e6), x(end / 1e6), at, ROW - 4, PARTS[c.phase], tip))
    title = f"Step {step.number}, the lower quartile: {short((step.end - step.start) / 1e6)} ms"
    colours = legend((p, p) for p in dict.fromkeys(PARTS.values()))
    return join(tag("p", title, class_="note"), colours, picture(bottom + 38, "time of each call of a step", parts))
