"""A profile for speedscope, which also works offline: phase, layer and call, one below the other, a profile a step.

Format: https://www.speedscope.app/file-format-schema.json, evented profiles: each frame opens and closes, in order of
time and properly nested. The file of `trace` does not serve: speedscope makes the arguments of an event part of
its name, so no two calls of a kernel would be one function in its views.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..wording import count
from .files import write_json

if TYPE_CHECKING:
    from ..measure.profile import Profile, StepTimes

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write_speedscope(path: Path, profile: Profile, steps: int = 10) -> None:
    """Write the newest steps of a profile, whole or not at all.

    Raises
    ------
    UserError
        Where the file cannot be written.
    """
    name = f"{profile.model} B {profile.B} T {profile.T}, {count(profile.threads, 'thread')}"
    write_json(path, speedscope(profile.raw[-steps:], name))


def speedscope(steps: Sequence[StepTimes], name: str = "cpuopt") -> dict[str, Any]:
    """Convert raw times to speedscope's object; times are in ns from a step's start."""
    frames: dict[str, int] = {}
    profiles = []
    for step in steps:
        events: list[tuple[str, str, int]] = []
        for bounds, marks in step.runs:
            if not bounds:
                continue
            times = [int(t) - step.start for t in marks]
            phase = bounds[0].call.phase
            events.append(("O", phase, times[0]))
            calls = zip(bounds, times[:-1], times[1:], strict=True)
            for layer, inside in groupby(calls, key=lambda c: c[0].call.layer):
                group = list(inside)
                events.append(("O", layer, group[0][1]))
                for bound, start, end in group:
                    events += [("O", bound.kernel.name, start), ("C", bound.kernel.name, end)]
                events.append(("C", layer, group[-1][2]))
            events.append(("C", phase, times[-1]))
        opened = [{"type": kind, "frame": frames.setdefault(f, len(frames)), "at": at} for kind, f, at in events]
        about = {"type": "evented", "name": f"step {step.number}", "unit": "nanoseconds"}
        profiles.append(about | {"startValue": 0, "endValue": step.end - step.start, "events": opened})
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": "cpuopt",
        "shared": {"frames": [{"name": n} for n in frames]},
        "profiles": profiles,
    }
