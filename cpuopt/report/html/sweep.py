"""The picture of `cpuopt sweep`: speed over size under the roof, in a panel for each size of the other symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...measure.roofline import PEAKS, share
from ...wording import text_of
from ..sweep import conditions, left_out
from .labels import CHAR
from .listing import Column, listing, rate
from .markup import Markup, join, tag
from .page import Section, colours, page
from .svg import LinearScale, LogScale, Points, axes, legend, lines, short

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 360, 250, 46, 32, 40, 40
"""A panel, and the room around its frame."""
LINES = 6
"""The number of colours of lines."""
SPAN = 20.0
"""The ratio of the largest to the least value from which an axis is logarithmic."""
NAMESPACE = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Panel:
    """The lines of one panel: each with its class and points."""

    title: str
    lines: Sequence[tuple[str, Points]]


def report(c: Mapping[str, Any]) -> str:
    """Make the page."""
    title = f"{c['op']} over {' and '.join(c['over'])}"
    head = [tag("h1", title), tag("p", " · ".join(conditions(c)), class_="facts")]
    notes = [*left_out(c), *c["roofs"]["doubts"], *c["doubts"]]
    head += [tag("ul", [tag("li", note) for note in notes], class_="warnings")] * bool(notes)
    if not c["rows"]:
        return page(title, join(head), [])
    unit, panels = _panels(c)
    scales, drawn = _scales(panels), list[Markup]()
    for p in panels:
        about = {"viewBox": f"0 0 {WIDE} {HIGH}", "role": "img", "aria_label": _label(p, unit)}
        drawn.append(tag("svg", _panel(p, *scales, unit, c), **about))
    names = legend(_names(c), "line")
    sections = [Section("speed", "Speed over size", join(names, tag("div", drawn, class_="panels")))]
    sections.append(Section("sizes", "By size", _table(c)))
    return page(title, join(head), sections)


def picture(c: Mapping[str, Any]) -> str:
    """Make a picture in a file of its own, which follows the reader's theme."""
    if not c["rows"]:
        return tag("svg", tag("text", "no figures", x=8, y=20), xmlns=NAMESPACE, viewBox="0 0 200 30")
    unit, panels = _panels(c)
    scales, across = _scales(panels), 1 if len(panels) < 3 else 2
    texts, names = _names(c), list[Markup]()
    cell = 40 + CHAR * max(len(name) for _, name in texts)
    beside = max(1, int((across * WIDE - LEFT) // cell))
    for i, (class_, name) in enumerate(texts):
        x, y = LEFT + i % beside * cell, 46 + i // beside * 18
        names.append(tag("line", x1=x, x2=x + 20, y1=y - 4, y2=y - 4, class_=f"line {class_}"))
        names.append(tag("text", name, x=x + 26, y=y))
    top, parts = y + 4, list[Markup]()
    for i, p in enumerate(panels):
        at = f"translate({i % across * WIDE} {top + i // across * HIGH:g})"
        parts.append(tag("g", _panel(p, *scales, unit, c), transform=at))
    size = across * WIDE, top + -(-len(panels) // across) * HIGH
    said = f"{c['op']}: {unit} over {' and '.join(c['over'])}"
    title = tag("text", f"{c['op']} · {conditions(c)[-1]}", x=LEFT, y=22, class_="title")
    back = tag("rect", width=size[0], height=size[1], class_="back")
    attributes = {"xmlns": NAMESPACE, "viewBox": f"0 0 {size[0]} {size[1]:g}", "width": size[0]}
    attributes |= {"role": "img", "aria_label": said}
    return f"{tag('svg', tag('title', said), tag('style', _style()), back, title, names, parts, **attributes)}\n"


def _label(p: Panel, unit: str) -> str:
    return f"{unit} over size{': ' + p.title if p.title else ''}"


def _axis(c: Mapping[str, Any]) -> str:
    """Return the symbol with most sizes."""
    return str(max(c["over"], key=lambda s: len(c["over"][s])))


def _panels(c: Mapping[str, Any]) -> tuple[str, list[Panel]]:
    """Return the unit, GFLOP/s if arithmetic bounds most sizes and else GB/s, and the panels."""
    rows, along = c["rows"], _axis(c)
    computes = 2 * sum(r["warm"]["roof"] in PEAKS for r in rows) > len(rows)
    unit, work, key = ("GFLOP/s", "flops", "gflops") if computes else ("GB/s", "bytes", "gbs")
    others = [s for s in c["over"] if s != along]
    panels = []
    for at in dict.fromkeys(tuple(r["sizes"][s] for s in others) for r in rows):
        mine = [r for r in rows if tuple(r["sizes"][s] for s in others) == at]
        found: list[tuple[str, Points]] = []
        for caches in ("cold", "warm"):
            roof = {r["sizes"][along]: (r[work] / r[caches]["roof_ns"], r[caches]["roof"]) for r in mine}
            points = [
                (n, v, f"{along}={n}\n{name} roof, {caches}\n{short(v)} {unit}")
                for n, (v, name) in sorted(roof.items())
            ]
            found.append((f"line roof {caches}", points))
        for i, variant in enumerate(_variants(c)):
            for caches in ("cold", "warm"):
                own = [(r["sizes"][along], r[caches]) for r in mine if r["variant"] == variant]
                points = [(n, x[key], _tip(along, n, variant, caches, x)) for n, x in own]
                found += [(f"line line{i % LINES} {caches}", points)] * bool(points)
        panels.append(Panel(text_of(dict(zip(others, at, strict=True))), found))
    return unit, panels


def _tip(along: str, n: int, variant: str, caches: str, x: Mapping[str, Any]) -> str:
    rates = f"{short(x['ns'] / 1e6)} ms, {short(x['gflops'])} GFLOP/s, {short(x['gbs'])} GB/s"
    return f"{along}={n}\n{variant}, {caches} caches\n{rates}\n{share(x['of_roof'], ' %')} of the {x['roof']} roof"


def _variants(c: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(r["variant"] for r in c["rows"]))


def _names(c: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the classes and texts of the legend."""
    variants = [(f"line{i % LINES}", v) for i, v in enumerate(_variants(c))]
    return [*variants, ("line0 cold", "dashed: cold caches"), ("roof", "the machine's roof")]


def _scales(panels: Sequence[Panel]) -> tuple[LinearScale, LinearScale]:
    """Return the axes of all panels."""
    points = [p for panel in panels for _, line in panel.lines for p in line]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    ends = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) / 2, max(xs) * 2)
    x = LogScale(*ends, LEFT, WIDE - RIGHT)
    if max(ys) > SPAN * min(ys):
        return x, LogScale(min(ys) / 1.2, max(ys) * 1.2, HIGH - BOTTOM, TOP)
    return x, LinearScale(0, max(ys) * 1.05, HIGH - BOTTOM, TOP)


def _panel(panel: Panel, x: LinearScale, y: LinearScale, unit: str, c: Mapping[str, Any]) -> Markup:
    """Draw a panel in a box of `WIDE` times `HIGH`."""
    sizes = sorted({n for _, line in panel.lines for n, _, _ in line})
    title = tag("text", panel.title, x=x.end, y=y.end - 10, text_anchor="end", class_="name")
    return join(axes(x, y, _axis(c), unit, sizes), title, lines(x, y, panel.lines))


def _table(c: Mapping[str, Any]) -> Markup:
    columns = [Column(s, s) for s in c["over"]] + [Column("variant", "variant")]
    rows = []
    for r in c["rows"]:
        timed = {f"{caches}_{k}": x for caches in ("warm", "cold") for k, x in r[caches].items()}
        rows.append({**r["sizes"], "variant": r["variant"], **timed})
    for caches in ("warm", "cold"):
        columns.append(Column(f"{caches}, ms", f"{caches}_ns", lambda ns: short(ns / 1e6)))
        columns += [Column("GFLOP/s", f"{caches}_gflops", rate), Column("GB/s", f"{caches}_gbs", rate)]
        columns.append(Column("of roof", f"{caches}_of_roof", lambda x: share(x, " %")))
        columns.append(Column("roof", f"{caches}_roof"))
    return listing(rows, columns, "sizes-table")


def _style() -> Markup:
    """Return the style of a picture without a page: the page's own colours, by the reader's theme."""
    light, dark = colours()
    rules = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink2) } .tick { font-size: 11px }
.name { fill: var(--ink) } .title { font-size: 15px; font-weight: 600; fill: var(--ink) } .back { fill: var(--card) }
.grid { stroke: var(--grid) } .ask { fill: transparent }
.line { fill: none; stroke-width: 2px; stroke-linejoin: round } .cold { stroke-dasharray: 5 4 }
.line0 { stroke: var(--forward) } .line1 { stroke: var(--backward) } .line2 { stroke: var(--update) }
.line3 { stroke: var(--violet) } .line4 { stroke: var(--yellow) } .line5 { stroke: var(--pink) }
.roof { stroke: var(--ink2); stroke-width: 1.4px }
"""
    return Markup(f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}{rules}")
