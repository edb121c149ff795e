"""HTML reports of a profile or a training run: one file, without any network request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...check.result import MARGINAL
from ...files import write_text
from ...lab.records import Point, losses
from ...measure.profile import peaks
from ...measure.quartile import apart, lower_quartile
from ...measure.roofline import fits
from ...program.arena import gb
from ...wording import count, four
from ..tables import by_id, digits_of, estimator, failed_kernels, used_kernels
from .curves import curve
from .heat import heat
from .listing import layer_columns, listing, op_columns
from .markup import Markup, join, tag
from .matrix import matrix
from .memory import arena_map
from .page import Section, page
from .roofs import roofline
from .svg import short
from .timeline import timeline

if TYPE_CHECKING:
    from ...engine import Engine
    from ...measure.profile import Profile


def write_report(path: Path, profile: Profile, engine: Engine | None = None, run: Path | None = None) -> None:
    """Write a report, whole or not at all.

    Parameters
    ----------
    engine : the engine that ran, for its arena, if it still exists.
    run : the folder of a training run, for its losses.

    Raises
    ------
    UserError
        If the file cannot be written.
    """
    write_text(path, report(profile, engine, losses(run) if run else None))


def report(profile: Profile, engine: Engine | None = None, losses: Mapping[str, Sequence[Point]] | None = None) -> str:
    """Make the page; it has no figures if a kernel of the run did not pass its check in the same run.

    Parameters
    ----------
    engine : the engine that ran, for its arena. A record has none, nor the raw times, so these pictures are left out.
    losses : those of a training run, by name, each by its step; None is not finite.
    """
    title = f"{profile.model} · B {profile.B} · T {profile.T}"
    if refused := failed_kernels(profile):
        why = f"No figures, because these kernels did not pass their check in this run: {', '.join(refused)}"
        return page(title, join(_heading(profile, title), tag("p", why, class_="warnings")), [])
    digits = digits_of(profile)
    head = _head(profile, title)
    profile = by_id(profile)
    sections = []
    if losses:
        sections.append(Section("loss", "Loss", curve(losses, "loss")))
    if profile.raw:
        sections.append(
            Section(
                "timeline", "A step, layer by layer", timeline(lower_quartile(profile.raw, lambda s: s.end - s.start))
            )
        )
    sections.append(Section("matrix", "Layer by op", matrix(profile.layers, profile.variant, digits)))
    if profile.lines:
        sections.append(Section("lines", "Lines of source", heat(profile.lines)))
    sections.append(Section("roofline", "Roofline", roofline(profile)))
    if engine:
        sections.append(Section("arena", "Memory over a step", arena_map(engine.plan, engine.program.calls)))
    times = {"ms": list(enumerate(profile.step_ms_values, profile.warmup))}
    sections += [
        Section("steps", "Time of each step", curve(times, "ms", 220, zero=True)),
        Section("ops", "By op", listing(profile.ops, op_columns(digits), "ops-table")),
        Section("layers", "By layer and op", listing(profile.layers, layer_columns(digits), "layers-table")),
    ]
    return page(title, head, sections)


def _heading(p: Profile, title: str) -> Markup:
    swaps = "".join(f" + {s}" for s in p.swaps)
    how = [f"{p.variant}{swaps}", f"{count(p.threads, 'thread')} ({p.threading_layer})"]
    how += [f"{p.ranks} ranks"] * (p.ranks > 1)
    how.append(f"{count(p.steps, 'step')} after {p.warmup} of warm-up")
    where = {"CPU": p.origin.get("cpu"), "measured": _date(p.origin.get("time", "")), "commit": p.origin.get("commit")}
    where |= {"run": " · ".join(how), "versions": " · ".join(f"{name} {v}" for name, v in p.versions.items())}
    facts = [tag("div", tag("dt", name), tag("dd", text)) for name, text in where.items() if text]
    asked = p.origin.get("command")
    return join(tag("h1", title), tag("dl", facts, class_="facts"), tag("p", tag("code", asked)) if asked else None)


def _date(time: str) -> str:
    """Shorten a time such as ``2026-01-31T12:00:00+0100`` to the minute; another text stays as it is."""
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M %z").strip()
    except ValueError:
        return time


def _head(p: Profile, title: str) -> Markup:
    ms = p.step_ms
    also = f"mean {four(ms['mean'])}, " if apart(p.quiet_ms, ms["mean"]) else ""
    tiles = [
        (f"{four(p.quiet_ms)} ms", f"a step, {estimator(p)} ({also}{four(ms['min'])} to {four(ms['max'])})"),
        (f"{p.tokens_per_s:,.0f}", "tokens/s"),
        (gb(p.peak_rss_mb * 1e6), f"peak memory, planned {gb(p.planned_peak_mb * 1e6)}"),
        (f"{short(p.profiler_overhead_ms)} ms", "a step, the cost of profiling"),
    ]
    if fits(p.mfu):
        tiles.insert(2, (f"{p.mfu:.0f} %", f"of the {peaks(p.ops)} (MFU)"))
    return join(
        _heading(p, title),
        tag("div", [tag("div", tag("b", figure), tag("span", what)) for figure, what in tiles], class_="tiles"),
        tag("p", p.words, class_="words"),
        tag("ul", [tag("li", d) for d in p.doubts], class_="warnings") if p.doubts else None,
        tag("p", _checks(p), class_="note"),
    )


def _checks(p: Profile) -> str:
    if not p.checked:
        return "The kernels were not checked in this run."
    used = used_kernels(p)
    marginal = sorted({c["kernel"] for c in p.checked if c["status"].lower() == MARGINAL} & set(used))
    passed = f"{len(used) - len(marginal)} kernels passed their check against a float64 reference in this run"
    return f"{passed}; marginal: {', '.join(marginal)}." if marginal else f"{passed}."
