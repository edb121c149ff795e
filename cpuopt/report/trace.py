"""A profile as a Chrome/Perfetto trace: step, phase and call, one below the other. Opens in ui.perfetto.dev.

Format: ``traceEvents`` of the Trace Event Format, complete events (``ph: "X"``) with ``ts`` and ``dur`` in µs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_text
from ..program.program import Value
from ..wording import count

if TYPE_CHECKING:
    from ..building import Bound
    from ..measure.profile import Profile, StepTimes

PID = TID = 1
"""Ids of the process and its thread: Perfetto expects small ids, and events on one thread that nest."""


def write_trace(path: Path, profile: Profile, steps: int = 10) -> None:
    """Write the newest steps of a profile, whole or not at all.

    Parameters
    ----------
    steps : the largest number of steps; a call takes about half a kilobyte.

    Raises
    ------
    UserError
        If the file cannot be written.
    """
    header = f"{profile.model} B {profile.B} T {profile.T}, {count(profile.threads, 'thread')}"
    about = {"model": profile.model, "variant": profile.variant, "swaps": ", ".join(profile.swaps)} | profile.versions
    events = trace_events(profile.raw[-steps:], header)
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_text(path, json.dumps(content, ensure_ascii=False, allow_nan=False))


def trace_events(steps: Sequence[StepTimes], process: str = "cpuopt") -> list[dict[str, Any]]:
    """Convert raw times to events, an outer one before those inside it."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": PID, "tid": TID, "args": {"name": process}},
        {"name": "thread_name", "ph": "M", "pid": PID, "tid": TID, "args": {"name": "calls"}},
    ]
    origin = steps[0].start if steps else 0

    def add(name: str, category: str, start: int, end: int, args: dict[str, Any]) -> None:
        ts = _us(start - origin)
        dur = _us(end - origin) - ts
        events.append(
            {"name": name, "cat": category, "ph": "X", "ts": ts, "dur": dur, "pid": PID, "tid": TID, "args": args}
        )

    for step in steps:
        add(f"step {step.number}", "step", step.start, step.end, {})
        for calls, marks in step.runs:
            if not calls:
                continue
            add(calls[0].call.phase, "phase", int(marks[0]), int(marks[-1]), {"calls": len(calls)})
            for bound, start, end in zip(calls, marks[:-1].tolist(), marks[1:].tolist(), strict=True):
                add(bound.call.op.name, bound.call.shown_phase, start, end, _args(bound, end - start))
    return events


def _us(ns: int) -> float:
    """Cut ns to eighths of a µs. Floats hold these exactly, so events that nest in ns also nest in the file."""
    return ns // 125 / 8


def _args(bound: Bound, ns: int) -> dict[str, Any]:
    call = bound.call
    return {
        "layer": call.layer,
        "variant": bound.kernel.variant,
        "label": call.op.label,
        "shapes": {n: list(v.shape) for n, v in call.args.items() if isinstance(v, Value)},
        "flops": call.flops,
        "bytes": call.bytes,
        "gflops": round(call.flops / ns, 3) if ns else 0.0,
    }
