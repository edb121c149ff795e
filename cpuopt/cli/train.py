"""``cpuopt train``: train a model and keep a record of the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..train import settings
from . import common
from .common import shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *settings.FLAGS, only_given=True)
    p.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, or a run's config.json; flags win")
    p.add_argument(
        *("--resume",),
        nargs="?",
        const="",
        metavar="RUN",
        help="run to continue from its newest whole checkpoint (the newest run)",
    )
    p.add_argument(
        "--accept-changes", action="store_true", help="permission to --resume with kernels that have changed since"
    )
    shared(p, "--runs", "--html", "--trace", "--speedscope", "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    given = (settings.read(args.config) if args.config else {}) | common.given(args)
    start_numba(given.get("threads"))
    from ..measure import rates as machine
    from ..report import console, html
    from ..train import checkpoint
    from ..train.job import prepare, resumed
    from ..train.trainer import train

    given["processes"] = common.cores()
    resume = None if args.resume is None else checkpoint.newest(checkpoint.find_run(args.runs, args.resume))
    asked = settings.Settings(**given) if resume is None else resumed(resume, given)
    asked.check()
    common.check_targets(args)
    for wrong in resume.passed_over if resume else ():
        console.warn(f"passed over a checkpoint: {wrong}")
    with console.compiling() as progress:
        job = prepare(asked, progress, resume, args.accept_changes)
    for note in job.notes:
        console.warn(f"since the checkpoint: {note}")
    with console.saying() as say:
        roofs = machine.roofs(job.engine.threads, say) if args.html else None
    with console.TrainingView(job, quiet=args.json) as view:
        if resume is not None:
            view.note_resume(resume)
        result = train(job, args.runs, view, resume=resume, roofs=roofs)
    if args.html and result.profile:
        html.write_report(args.html, result.profile, job.engine, result.path)
    common.write_traces(args, result.profile)
    for flag in common.FILES:
        if result.profile is None and getattr(args, flag):
            console.warn(f"--{flag} {getattr(args, flag)}: not written, because no step was done")
    with console.surviving_hangup():
        show(args, {**result.summary, "path": str(result.path)}, lambda: console.summary(result))
    if result.diagnosis:
        go_on = f"; the last checkpoint is {result.checkpoint}" if result.checkpoint else ""
        with console.surviving_hangup():
            print(f"cpuopt: {result.diagnosis}{go_on}", file=sys.stderr)
        return 1
    return 128 + result.stopped_by if result.stopped_by else 0
