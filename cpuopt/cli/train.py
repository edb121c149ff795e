"""``cpuopt train``: train a GPT-2 and keep a record of the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .common import job_flags, settings_of, start_numba

HELP = "train a GPT-2 and keep a record of the run"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    job_flags(p, steps=40)
    p.add_argument("--lr", type=float, default=1e-4, help="learning rate (%(default)s)")
    p.add_argument("--beta1", type=float, default=0.9, help="(%(default)s)")
    p.add_argument("--beta2", type=float, default=0.999, help="(%(default)s)")
    p.add_argument("--eps", type=float, default=1e-8, help="of AdamW (%(default)s)")
    p.add_argument("--weight-decay", type=float, default=0.0, help="(%(default)s)")
    p.add_argument("--clip", type=float, help="scale the gradient down to this global norm (off)")
    p.add_argument("--val-every", type=int, default=10, help="steps between validations; 0: none (%(default)s)")
    p.add_argument("--val-batches", type=int, default=5, help="batches of a validation (%(default)s)")
    p.add_argument("--run", default="train", metavar="NAME", help="of the folder in runs/ (%(default)s)")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (%(default)s)")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a report to look at, in one file")
    p.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..job import prepare
    from ..lab import machine
    from ..record import finite
    from ..report import console, files, html
    from ..train import train

    settings = settings_of(args)
    settings.check()
    if args.html:
        files.check_target(args.html, "--html")
    with console.compiling() as progress:
        job = prepare(settings, progress)
    with console.saying() as say:
        roofs = machine.roofs(job.engine.threads, say) if args.html else None
    with console.TrainingView(job, quiet=args.json) as view:
        result = train(job, args.runs, view, roofs=roofs)
    if args.html and result.profile:
        html.write_report(args.html, result.profile, job.engine, result.path)
    elif args.html:
        console.warn(f"--html {args.html}: not written, because no step was done")
    if args.json:
        print(json.dumps(finite({**result.summary, "path": str(result.path)})))
    else:
        console.summary(result)
    return 128 + result.stopped_by if result.stopped_by else 0
