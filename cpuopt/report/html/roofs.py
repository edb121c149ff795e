"""The roofline: GFLOP/s over FLOPs a byte, both in powers of ten, under the roofs of the machine.

An op is a point as large as its share of the step; a small one is the op in one layer. The scales span the large
points and the roofs: a layer that lies outside is counted below the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, degrees, hypot, sin, sqrt
from typing import TYPE_CHECKING

from ...measure.roofline import UNFIT, fits
from ...ops.storage import WIDE
from ...program.program import PARTS
from .labels import CHAR, Box, Label, along, around, place
from .markup import Markup, join, tag
from .svg import WIDTH, LogScale, axes, first_phases, legend, picture, short

if TYPE_CHECKING:
    from ...measure.profile import LayerRow, OpRow, Profile
    from ...measure.roofline import Roofs

HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 470, 62, WIDTH - 20, 425, 34
FRAME = Box(LEFT + 4, TOP - 2, WIDTH - 6, BOTTOM - 4)


def roofline(profile: Profile) -> Markup:
    """Draw every op that has FLOPs; the others are listed below."""
    rows = [r for r in profile.ops if r.kernels]
    drawn = sorted((r for r in rows if r.gflops > 0 and r.intensity > 0), key=lambda r: -r.share)
    left_out = [r.op for r in rows if r not in drawn]
    if not drawn:
        return tag("p", "No op of this step has FLOPs to count.", class_="note")
    peaks = _peaks(profile)
    x, y = _scales(drawn, profile.roofs, peaks)
    layers = [r for r in profile.layers if r.gflops > 0 and r.intensity > 0]
    shown = [r for r in layers if x.low <= r.intensity <= x.high and y.low <= r.gflops <= y.high]
    points = [(r, x(r.intensity), y(r.gflops), 3.5 + 1.3 * sqrt(max(r.share, 0))) for r in drawn]
    taken = [around(cx, cy, radius + 1) for _, cx, cy, radius in points]
    small = [around(x(r.intensity), y(r.gflops), 2.2) for r in shown]
    lines: list[Box] = []
    parts = axes(x, y, "FLOPs a byte", "GFLOP/s")
    if profile.roofs:
        parts += _roofs(profile.roofs, peaks, x, y, taken, lines)
    for one in shown:
        name = f"{one.layer}\n{one.op} [{one.variant}]"
        parts.append(_point(one, x(one.intensity), y(one.gflops), 2.2, f"{PARTS[one.phase]} layer", name))
    phase = first_phases(profile.layers)
    words: list[Markup] = []
    unnamed = []
    for r, cx, cy, radius in points:
        parts.append(_point(r, cx, cy, radius, PARTS[phase[r.kernels[0].partition("[")[0]]], r.op))
        label = place(r.op, cx, cy, radius, FRAME, taken, [*lines, *small])
        if label:
            taken.append(label.box)
            words += _named(label, cx, cy, radius)
        else:
            unnamed.append(r.op)
    notes = {
        "No roofs: this machine was not measured in this run.": not profile.roofs,
        f"Not drawn, for they have no FLOPs: {', '.join(left_out)}.": left_out,
        f"Without a name, for want of space: {', '.join(unnamed)}.": unnamed,
        f"Layers outside of the picture: {len(layers) - len(shown)} of {len(layers)}.": len(shown) < len(layers),
    }
    return join(
        legend(((p, p) for p in dict.fromkeys(PARTS.values())), "dot"),
        picture(HEIGHT, "roofline: GFLOP/s of each op over its FLOPs a byte", parts, words),
        [tag("p", text, class_="note") for text, true in notes.items() if true],
    )


def _peaks(profile: Profile) -> list[tuple[float, str]]:
    """List the GFLOP/s and names of the peaks that ops are held against, the lowest first."""
    types = {WIDE, *(name for r in profile.ops for name in r.types)}
    return sorted({profile.roofs.peak(name) for name in types}) if profile.roofs else []


def _scales(
    rows: Sequence[OpRow], roofs: Roofs | None, peaks: Sequence[tuple[float, str]]
) -> tuple[LogScale, LogScale]:
    xs, ys = [r.intensity for r in rows], [r.gflops for r in rows]
    if roofs:
        ridges = [gflops / roofs.bandwidth(v.name) for v in roofs.levels for gflops, _ in peaks]
        xs, ys = [*xs, *ridges], [*ys, *(gflops for gflops, _ in peaks)]
    return LogScale(min(xs) / 1.6, max(xs) * 1.6, LEFT, RIGHT), LogScale(min(ys) / 1.6, max(ys) * 1.6, BOTTOM, TOP)


def _roofs(
    roofs: Roofs, peaks: Sequence[tuple[float, str]], x: LogScale, y: LogScale, taken: list[Box], lines: list[Box]
) -> list[Markup]:
    """Draw a line for each peak of the multiply-adds, and one for each level of memory up to the highest of them.

    Parameters
    ----------
    taken, lines : to which the room of the names and that of the lines is added.
    """
    parts: list[Markup] = []
    names: list[Box] = []
    fastest = max(roofs.bandwidth(v.name) for v in roofs.levels)
    for gflops, name in peaks:
        top, flat = y(gflops), f"{name} {short(gflops)} GFLOP/s"
        label = Label(flat, x.end - CHAR * len(flat), top - 6)
        if any(label.box.meets(b) for b in names):  # equal peaks: their names stand side by side
            label = Label(flat, names[-1].left - CHAR * (len(flat) + 2), top - 6)
        ends = x(gflops / fastest), top, x.end, top
        parts += [_line(*ends, flat), tag("text", flat, x=label.x, y=label.y, class_="roof-name")]
        names.append(label.box)
        taken += [label.box, *along(*ends)]
    for level in (v.name for v in roofs.levels):
        bandwidth = roofs.bandwidth(level)
        start = max(x.low, y.low / bandwidth)
        ends = x(start), y(start * bandwidth), x(peaks[-1][0] / bandwidth), y(peaks[-1][0])
        text = f"{level} {short(bandwidth)} GB/s"
        parts.append(_line(*ends, text))
        lines += along(*ends)
        parts += _along(text, *ends, taken)
    return parts


def _along(text: str, x1: float, y1: float, x2: float, y2: float, taken: list[Box]) -> list[Markup]:
    """Write the name of a roof along its line, a little above it, if there is space; nothing if there is none."""
    length, width = hypot(x2 - x1, y2 - y1), CHAR * len(text)
    angle = atan((y2 - y1) / (x2 - x1)) if x2 > x1 else 0.0
    c, s = cos(angle), sin(angle)
    for at in range(8, int(length - width), 8):
        left, base = x1 + at * c + 5 * s, y1 + at * s - 5 * c
        # the middle of the text, covered by boxes of its height
        middle = left + 3.5 * s, base - 3.5 * c
        room = [*along(*middle, middle[0] + width * c, middle[1] + width * s, half=8.5)]
        if all(b.within(FRAME) for b in room) and not any(b.meets(t) for b in room for t in taken):
            taken += room
            turned = f"rotate({degrees(angle):.2f} {left:.1f} {base:.1f})"
            return [tag("text", text, x=left, y=base, transform=turned, class_="roof-name")]
    return []


def _line(x1: float, y1: float, x2: float, y2: float, tip: str) -> Markup:
    return tag("line", tag("title", tip), x1=x1, y1=y1, x2=x2, y2=y2, class_="roof")


def _point(r: OpRow | LayerRow, cx: float, cy: float, radius: float, class_: str, name: str) -> Markup:
    tip = f"{name}\n{short(r.gflops)} GFLOP/s at {short(r.intensity)} FLOPs a byte"
    tip += f"\n{short(r.ms)} ms, {r.share:.1f} % of the step"
    if r.of_roof is not None:
        of = f"{r.of_roof:.0f} % of the {r.roof} roof"
        tip += f"\n{of}" if fits(r.of_roof) else f"\nthe {r.roof} roof is {UNFIT}"
    return tag("circle", tag("title", tip), cx=cx, cy=cy, r=radius, class_=f"point {class_}")


def _named(label: Label, cx: float, cy: float, radius: float) -> list[Markup]:
    """Draw the name of a point, and a line to it where it lies at a distance."""
    b = label.box
    x, y = min(max(cx, b.left), b.right), min(max(cy, b.top), b.bottom)
    distance = hypot(x - cx, y - cy)
    text = tag("text", label.text, x=label.x, y=label.y, class_="point-name")
    if distance < radius + 10:
        return [text]
    part = radius / distance
    return [tag("line", x1=cx + (x - cx) * part, y1=cy + (y - cy) * part, x2=x, y2=y, class_="leader"), text]
