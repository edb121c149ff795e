"""The page of `cpuopt scale`: the speedup by number of threads, measured and predicted, and where threads lose."""

from __future__ import annotations

from ...lab.scale import Scaling
from ...measure.scaling import MEANING, REASONS, Row
from ...wording import count
from .markup import Markup, join, tag
from .page import Section, page
from .svg import WIDTH, LogScale, axes, legend, lines, picture

LEFT, TOP, HEIGHT = 62, 30, 360


def report(s: Scaling) -> str:
    """Make the page."""
    title = f"Scaling of {s.model} · B {s.B} · T {s.T}"
    facts = f"{s.variant} · {s.steps} steps on each number of threads"
    said = [tag("p", "Predictions assume:", class_="note"), tag("ul", [tag("li", a) for a in s.assumptions])]
    head = join(tag("h1", title), tag("p", facts, class_="facts"), said if s.assumptions else None)
    doubts = tag("ul", [tag("li", d) for d in s.doubts], class_="warnings") if s.doubts else None
    return page(title, join(head, doubts), [Section("speedup", "Speedup", speedup(s)), Section("ops", "By op", ops(s))])


def speedup(s: Scaling) -> Markup:
    """Draw the speedup of the step over threads, beside a perfect one."""
    one = s.step.ms[1]
    drawn = {
        "perfect": {n: float(n) for n in (*s.threads, *s.projected)},
        "measured": {n: one / ms for n, ms in s.step.ms.items()},
        "predicted": {n: one / ms for n, ms in s.step.predicted_ms.items()},
    }
    speedups = [v for line in drawn.values() for v in line.values()]
    most = max(2.0, *speedups)
    x, y = LogScale(1, most, LEFT, WIDTH - 20), LogScale(min(speedups), most, HEIGHT - 45, TOP)
    series = [
        (f"line line{i}", [(n, v, f"{count(n, 'thread')}, {name}\n{v:.2f} times one thread") for n, v in line.items()])
        for i, (name, line) in enumerate(drawn.items())
    ]
    parts = [*axes(x, y, "threads", "speedup", drawn["perfect"]), *lines(x, y, series)]
    colours = legend(((f"line{i}", name) for i, name in enumerate(drawn)), "line")
    return join(colours, picture(HEIGHT, "speedup over threads", parts))


def ops(s: Scaling) -> Markup:
    """Make the table of ops: time, efficiency, and the ms lost by reason on the most threads."""
    most = s.threads[-1]
    names = ["op", *(f"ms, {n}" for n in s.threads), "efficiency", *(f"{r}, ms" for r in REASONS)]
    names += [f"predicted, {n}" for n in s.projected]
    rows = [tag("tr", [tag("td", cell) for cell in _cells(r, most, s)]) for r in (*s.ops, s.step)]
    meaning = [tag("li", tag("b", reason), f": {what}") for reason, what in MEANING.items()]
    table = tag("table", tag("tr", [tag("th", name) for name in names]), rows, class_="sums")
    return join(table, tag("p", f"ms lost on {count(most, 'thread')}, by reason:", class_="note"), tag("ul", meaning))


def _cells(r: Row, most: int, s: Scaling) -> list[str]:
    lost = r.lost_ms.get(most, dict.fromkeys(REASONS, 0.0))
    cells = [r.name, *(f"{ms:,.3f}" for ms in r.ms.values()), f"{100 * r.efficiency[most]:.0f} %"]
    return [
        *cells,
        *(f"{lost[x]:z,.3f}" for x in REASONS),
        *(f"{100 * r.predicted_efficiency[n]:.0f} %" for n in s.projected),
    ]
