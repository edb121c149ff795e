"""The roofline: GFLOP/s over FLOPs a byte, both in powers of ten, under the roofs of the machine.

A kind of op is a point as large as its share of the step; a small one is an op in one layer.
"""

from __future__ import annotations

from math import atan, degrees, sqrt
from typing import TYPE_CHECKING

from .markup import Markup, join, tag
from .svg import PHASES, WIDTH, Log, axes, first_phases, legend, picture, short

if TYPE_CHECKING:
    from ...measure.profile import LayerRow, OpRow, Profile
    from ...measure.roofline import Roofs

HEIGHT, LEFT, BOTTOM, TOP = 470, 62, 425, 30
CHAR = 6.9
"""Width of a character of a label."""


def roofline(profile: Profile) -> Markup:
    """Draw every op that has FLOPs; the others are listed below."""
    rows = [r for r in profile.ops if r.kernels]
    drawn = [r for r in rows if r.gflops > 0 and r.intensity > 0]
    layers = [r for r in profile.layers if r.gflops > 0 and r.intensity > 0]
    left_out = [r.op for r in rows if r not in drawn]
    if not drawn:
        return tag("p", "No op of this step has FLOPs to count.", class_="note")
    x, y = _scales([*drawn, *layers], profile.roofs)
    parts = axes(x, y, "FLOPs a byte", "GFLOP/s")
    roofs = profile.roofs
    if roofs:
        parts += _roofs(roofs, x, y)
    for one in layers:
        name = f"{one.layer}\n{one.op} [{one.variant}]"
        parts.append(_point(one, x(one.intensity), y(one.gflops), 2.2, f"{PHASES[one.phase]} layer", name))
    phase = first_phases(profile.layers)
    places = [(r, x(r.intensity), y(r.gflops), 3.5 + 1.3 * sqrt(max(r.share, 0))) for r in drawn]
    places.sort(key=lambda p: -p[3])
    taken = [(cx - radius, cy - radius, cx + radius, cy + radius) for _, cx, cy, radius in places]
    if roofs:
        lows = [min(y.start, y(x.low * roofs.bandwidth(v.name))) for v in roofs.levels]
        taken += [(LEFT, low - 50, LEFT + 120, low) for low in lows]  # the names of the roofs
        taken.append((LEFT, y(roofs.gflops) - 4, WIDTH, y(roofs.gflops) + 4))
    for r, cx, cy, radius in places:
        parts.append(_point(r, cx, cy, radius, PHASES[phase[r.kernels[0].partition("[")[0]]], r.op))
    for r, cx, cy, radius in places:
        parts += _label(r, cx, cy, radius, taken)
    notes = []
    if not roofs:
        notes.append("No roofs: this machine was not measured in this run.")
    if left_out:
        notes.append(f"Not drawn, for they have no FLOPs: {', '.join(left_out)}.")
    return join(
        legend(((p, p) for p in dict.fromkeys(PHASES.values())), "dot"),
        picture(HEIGHT, "roofline: GFLOP/s of each op over its FLOPs a byte", parts),
        [tag("p", n, class_="note") for n in notes],
    )


def _scales(rows: list[OpRow | LayerRow], roofs: Roofs | None) -> tuple[Log, Log]:
    xs, ys = [r.intensity for r in rows], [r.gflops for r in rows]
    if roofs:
        ridges = [roofs.gflops / roofs.bandwidth(v.name) for v in roofs.levels]
        xs, ys = [*xs, *ridges], [*ys, roofs.gflops]
    return (
        Log(min(xs) / 1.6, max(xs) * 1.6, LEFT, WIDTH - 20),
        Log(min(ys) / 1.6, max(ys) * 1.6, BOTTOM, TOP),
    )


def _roofs(roofs: Roofs, x: Log, y: Log) -> list[Markup]:
    """Draw a line for each level of memory up to the roof of the multiply-adds, and one for that roof."""
    ridges = {v.name: roofs.gflops / roofs.bandwidth(v.name) for v in roofs.levels}
    first = min(ridges.values())
    flat = f"FMA {short(roofs.gflops)} GFLOP/s"
    parts = [
        _line(x(first), y(roofs.gflops), x.end, y(roofs.gflops), flat),
        tag("text", flat, x=x.end, y=y(roofs.gflops) - 7, text_anchor="end", class_="name"),
    ]
    for name, ridge in ridges.items():
        bandwidth = roofs.bandwidth(name)
        start = max(x.low, y.low / bandwidth)
        ends = x(start), y(start * bandwidth), x(ridge), y(roofs.gflops)
        text = f"{name} {short(bandwidth)} GB/s"
        parts.append(_line(*ends, text))
        # a label lies along its line, a little above it
        slope = (ends[3] - ends[1]) / (ends[2] - ends[0])
        at = ends[0] + 8, ends[1] + 8 * slope - 5
        angle = degrees(atan(slope))
        parts.append(
            tag(
                "text",
                text,
                x=at[0],
                y=at[1],
                transform=f"rotate({angle:.1f} {at[0]:.1f} {at[1]:.1f})",
                class_="roof-name",
            )
        )
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, tip: str) -> Markup:
    return tag("line", tag("title", tip), x1=x1, y1=y1, x2=x2, y2=y2, class_="roof")


def _point(r: OpRow | LayerRow, cx: float, cy: float, radius: float, class_: str, name: str) -> Markup:
    tip = f"{name}\n{short(r.gflops)} GFLOP/s at {short(r.intensity)} FLOPs a byte"
    tip += f"\n{short(r.ms)} ms, {r.share:.1f} % of the step"
    if r.of_roof is not None:
        tip += f"\n{r.of_roof:.0f} % of the {r.roof} roof"
    return tag("circle", tag("title", tip), cx=cx, cy=cy, r=radius, class_=f"point {class_}")


def _label(
    r: OpRow, cx: float, cy: float, radius: float, taken: list[tuple[float, float, float, float]]
) -> list[Markup]:
    """Label a point where there is space beside, above or below it."""
    width = CHAR * len(r.op)
    for anchor, at, left, base in (
        ("start", cx + radius + 4, cx + radius + 4, cy + 4),
        ("end", cx - radius - 4, cx - radius - 4 - width, cy + 4),
        ("middle", cx, cx - width / 2, cy - radius - 5),
        ("middle", cx, cx - width / 2, cy + radius + 13),
    ):
        box = left, base - 10, left + width, base + 3
        inside = box[0] > LEFT and box[2] < WIDTH - 10 and box[1] > TOP - 12 and box[3] < BOTTOM
        if inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
            taken.append(box)
            return [tag("text", r.op, x=at, y=base, text_anchor=anchor, class_="point-name")]
    return []
