"""``cpuopt profile``: time per op and per layer of a training step."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from ..errors import UserError
from . import common
from .common import job_flags, settings_of, start_numba

HELP = "time per op and per layer of a training step"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    job_flags(p, steps=5)
    p.add_argument("--warmup", type=int, default=1, help="steps that are not counted (%(default)s)")
    p.add_argument("--detail", action="store_true", help="a row for every op of every layer")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the record goes (%(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a report to look at, in one file")
    common.trace_flags(p)


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..files.reading import to_json
    from ..kernels.toolkit import regions
    from ..measure import rates as machine
    from ..profiler import codes, forget_peak, hashes, profile
    from ..report import console, html, tables
    from ..train.job import prepare

    settings = settings_of(args, run="profile")
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup}: expected 0 or more")
    common.check_targets(args)
    watched = regions.watch()  # before any kernel is loaded
    with console.compiling() as progress:
        job = prepare(settings, progress)
    with console.saying() as say:
        roofs = machine.roofs(job.engine.threads, say)
    forget_peak()  # measuring roofs takes more memory than a small model
    if layer := machine.slow_layer():
        console.warn(layer)
    if roofs.doubts:
        console.warn(f"the roofs are doubtful: {'; '.join(roofs.doubts)}. When it is quiet: cpuopt machine --again")
    others = machine.Others()
    for note in job.engine.notes:
        console.warn(note)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > common.cores():
        console.warn(f"load average {busy:.1f} on {common.cores()} cores: other processes make these times too long")
    with console.counting("steps", settings.steps + args.warmup) as tick:
        report = profile(
            job,
            warmup=args.warmup,
            tick=tick,
            roofs=roofs,
            regions=watched,
            doubts=lambda: [*others.doubts(), *machine.lower_now(roofs)],
        )
    report.hashes, report.codes = hashes(job.engine), codes(job.engine)
    common.write_traces(args, report)
    if args.html:
        html.write_report(args.html, report, job.engine)
    common.keep(args.runs, "profile", report.model, {"profile": report})
    if args.json:
        print(json.dumps(to_json(report)))
    else:
        console.show(tables.profile_tables(report, detail=args.detail))
    return 0
