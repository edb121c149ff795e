"""``cpuopt train``: train a GPT-2 and keep a record of the run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import common
from .common import job_flags, start_numba
from .config import check_types, leave_out_defaults, read_config

HELP = "train a GPT-2 and keep a record of the run"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    job_flags(p, steps=40)
    p.add_argument("--lr", type=float, default=1e-4, help="learning rate, the highest of the schedule (%(default)s)")
    p.add_argument("--schedule", default="constant", help="constant, cosine, linear or wsd (%(default)s)")
    p.add_argument(
        "--warmup-steps", type=int, default=0, metavar="N", help="that the learning rate rises (%(default)s)"
    )
    p.add_argument("--lr-end", type=float, default=0.0, metavar="SHARE", help="of --lr, to end with (%(default)s)")
    p.add_argument("--beta1", type=float, help="decay of the first moment, AdamW and Lion (0.9)")
    p.add_argument(
        "--beta2", type=float, help="decay of the second moment, AdamW (0.999); of the momentum, Lion (0.99)"
    )
    p.add_argument("--eps", type=float, help="term in the denominator, AdamW (1e-08)")
    p.add_argument("--momentum", type=float, help="share of the velocity that stays, SGD (0.9)")
    p.add_argument("--weight-decay", type=float, help="weight decay (0.0)")
    p.add_argument("--decay", default="all", help="which parameters decay: all or matrices (%(default)s)")
    p.add_argument("--clip", type=float, help="scale the gradient down to this global norm (off)")
    p.add_argument("--total-batch", type=int, metavar="TOKENS", help="of a step, gathered over micro-batches (B * T)")
    p.add_argument("--overfit", action="store_true", help="train on the first batch only, to see the loss go to 0")
    p.add_argument(
        "--guard",
        default="auto",
        help="on a step that is not finite: skip its update, stop, off, or auto (%(default)s)",
    )
    p.add_argument(
        "--guard-z",
        type=float,
        default=0.0,
        metavar="Z",
        help="and on one Z deviations above the last; 0: none (6 is usual)",
    )
    p.add_argument("--val-every", type=int, default=10, help="steps between validations; 0: none (%(default)s)")
    p.add_argument("--val-batches", type=int, default=5, help="batches of a validation (%(default)s)")
    p.add_argument("--sample-every", type=int, default=0, metavar="N", help="steps between samples of text (0: none)")
    p.add_argument("--sample-tokens", type=int, default=64, metavar="N", help="of a sample (%(default)s)")
    p.add_argument("--prompt", default="", help="what samples begin with")
    p.add_argument("--save", metavar="PATH", help="at the end, as NAME.bin (llm.c) or a Hugging Face directory")
    p.add_argument("--save-every", type=int, default=0, metavar="N", help="steps between checkpoints (0: none)")
    p.add_argument("--keep", type=int, default=2, metavar="K", help="checkpoints that stay (%(default)s)")
    p.add_argument("--run", default="train", metavar="NAME", help="of the folder in runs/ (%(default)s)")
    p.add_argument("--tensorboard", action=argparse.BooleanOptionalAction, default=False, help="write its events too")
    leave_out_defaults(p)
    p.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, or a run's config.json; flags win")
    p.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from the newest whole checkpoint of a run (the newest)",
    )
    p.add_argument("--accept-changes", action="store_true", help="with --resume: also where its kernels are others now")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (%(default)s)")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a report to look at, in one file")
    common.trace_flags(p)
    p.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    written = read_config(args.config) if args.config else {}
    own = ("verb", "run_verb", "config", "runs", "json", "html", "trace", "speedscope", "resume", "accept_changes")
    given: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in vars(args).items() if name not in own
    }
    threads = given.get("threads", written.get("threads"))
    start_numba(threads if isinstance(threads, int) else None)
    from ..files.reading import finite
    from ..measure import rates as machine
    from ..report import console, html
    from ..train import checkpoint
    from ..train.job import Settings, prepare, resumed
    from ..train.trainer import train

    given = {**check_types(written, Settings, args.config), **given, "processes": common.cores()}
    resume = None if args.resume is None else checkpoint.newest(checkpoint.find_run(args.runs, args.resume))
    settings = Settings(**given) if resume is None else resumed(resume, given)
    settings.check()
    common.check_targets(args)
    for wrong in resume.passed_over if resume else ():
        console.warn(f"passed over a checkpoint: {wrong}")
    with console.compiling() as progress:
        job = prepare(settings, progress, resume, args.accept_changes)
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
        if args.json:
            print(json.dumps(finite({**result.summary, "path": str(result.path)})), flush=True)
        else:
            console.summary(result)
    if result.diagnosis:
        go_on = f"; the last checkpoint is {result.checkpoint}" if result.checkpoint else ""
        with console.surviving_hangup():
            print(f"cpuopt: {result.diagnosis}{go_on}", file=sys.stderr)
        return 1
    return 128 + result.stopped_by if result.stopped_by else 0
