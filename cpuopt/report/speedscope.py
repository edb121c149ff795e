"""A profile for speedscope, which also works offline: phase, layer and call, one below the other, a profile a step.

Format: https://www.speedscope.app/file-format-schema.json, evented profiles: each frame opens and closes, in order of
time and properly nested.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    name = f"{profile.model} B {profile.B} T {profile.T}, {profile.threads} threads"
    write_json(path, speedscope(profile.raw[-steps:], name))


def speedscope(steps: Sequence[StepTimes], name: str = "cpuopt") -> dict[str, Any]:
    """Turn raw times into speedscope's object; times are in ns from a step's start."""
    frames: dict[str, int] = {}
    profiles = []
    for step in steps:
        events: list[dict[str, Any]] = []

        def event(kind: str, frame: str, at: int, events: list[Any] = events, start: int = step.start) -> None:
            events.append({"type": kind, "frame": frames.setdefault(frame, len(frames)), "at": at - start})

        for bounds, marks in step.runs:
            if not bounds:
                continue
            times = [int(t) for t in marks]
            event("O", bounds[0].call.phase, times[0])
            calls = zip(bounds, times[:-1], times[1:], strict=True)
            for layer, inside in groupby(calls, key=lambda c: c[0].call.layer):
                group = list(inside)
                event("O", layer, group[0][1])
                for bound, start, end in group:
                    event("O", bound.kernel.name, start)
                    event("C", bound.kernel.name, end)
                event("C", layer, group[-1][2])
            event("C", bounds[0].call.phase, times[-1])
        profiles.append(
            {
                "type": "evented",
                "name": f"step {step.number}",
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": step.end - step.start,
                "events": events,
            }
        )
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": "cpuopt",
        "shared": {"frames": [{"name": n} for n in frames]},
        "profiles": profiles,
    }
