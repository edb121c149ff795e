"""``cpuopt train``: train a model and keep a record of the run.

Each step's loss, gradient norm and speed are printed and kept in the folder of the run, with its settings, its profile
and its checkpoints. Kernels of one's own are checked first; a wrong one trains nothing.

Examples::

    cpuopt train --model gpt2-tiny --steps 20
    cpuopt train --config run.toml --lr 3e-4 --save-every 100
    cpuopt train --resume
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ..comm.agree import Agreement
from ..comm.watchdog import Watchdog
from ..errors import UserError
from ..train import settings
from . import common, ranks
from .common import Parser, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *settings.FLAGS, only_given=True)
    p.option("--config", "Read settings from TOML, or from a run's config.json; flags win.", metavar="FILE", type=Path)
    p.option(
        "--resume",
        "Continue this run from its newest whole checkpoint. Default: the newest run.",
        metavar="RUN",
        nargs="?",
        const="",
    )
    p.option("--accept-changes", "Allow --resume with kernels that have changed since.", False)
    p.option("--dry-run", "Show memory, time and end of the run after a few steps; keep nothing.", False)
    ranks.flags(p, elastic=True)
    p.shared("--runs", "--html", "--trace", "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    return ranks.run(args, lambda rank: _train(args, rank))


def _train(args: argparse.Namespace, rank: ranks.Rank) -> int:
    """Train on this rank."""
    comm = rank.comm
    if args.dry_run and (args.resume is not None or comm.size > 1):
        raise UserError("--dry-run: plans a new run of one process; leave --resume and --ranks out")
    with Agreement(comm) as agreement:
        from ..train import checkpoint

        given = settings.merged(settings.read(args.config) if args.config else {}, common.given(args))
        resume = None if args.resume is None else checkpoint.newest(checkpoint.find_run(args.runs, args.resume))
        common.use_order(given.get("order") or (resume.state["settings"].get("order") if resume else None))
        threads = given.get("threads") or (rank.place.threads if rank.place else None)
        start_numba(threads)
        from ..measure import rates as machine
        from ..report import console, html
        from ..train.forecast import roof_ms, sample
        from ..train.job import prepare
        from ..train.resume import resumed
        from ..train.trainer import train

        given["processes"] = common.cores()
        asked = settings.Settings(**given) if resume is None else resumed(resume, given)
        asked, default = (asked, list[str]()) if resume else ranks.shared(asked, comm.size)
        asked.check()
        if not comm.rank:
            common.check_targets(args, asked)
        agreement.settle(ranks.facts(asked, [*settings.FLAGS]) | {"--resume": resume and resume.path.name})
    if args.dry_run:
        return _plan(args, asked)
    rank.link.tell(micro_batches=asked.micro_batches, total_batch=asked.total_batch)
    for wrong in resume.passed_over if resume else ():
        console.warn(f"passed over a checkpoint: {wrong}")
    with console.compiling() as progress, Agreement(comm) as agreement:
        job = prepare(asked, progress, resume, args.accept_changes, comm=comm, agreed=agreement.settle)
    if rank.place and not args.json:
        there = comm.everyone([rank.place.host, *rank.place.cores])
        table = console.ranks_table(there, comm.everyone(threads))
        with console.surviving_hangup():
            console.show([*table, *default])
    for note in job.notes:
        console.note(f"since the checkpoint: {note}")
    with console.saying() as say:
        roofs = machine.roofs(job.engine.threads, say) if args.html and not comm.rank else None
    known = machine.stored().get(job.engine.threads)
    least = roof_ms(job.engine, known, sample(job)) if known else None
    with console.TrainingView(job, quiet=args.json, roof_ms=least) as view:
        if resume is not None:
            view.note_resume(resume)
        began = lambda path: None if comm.rank else rank.link.tell(run=str(path))  # noqa: E731
        with Watchdog(file=rank.link.fileno()) if comm.size > 1 else nullcontext() as watchdog:
            watch = watchdog.watch_step if watchdog else nullcontext
            result = train(job, args.runs, view, resume=resume, roofs=roofs, watch=watch, began=began, last=True)
    if comm.rank:
        return result.status
    if args.html and result.profile:
        html.write_report(args.html, result.profile, job.engine, result.path)
    common.write_trace(args, result.profile)
    for flag in common.FILES:
        if result.profile is None and getattr(args, flag, None):
            console.warn(f"--{flag} {getattr(args, flag)}: not written, because no step was done")
    with console.surviving_hangup():
        show(args, {**result.summary, "path": str(result.path)}, lambda: console.summary(result, job))
    if result.diagnosis:
        go_on = f"; the last checkpoint is {result.checkpoint}" if result.checkpoint else ""
        with console.surviving_hangup():
            print(f"cpuopt: {result.diagnosis}{go_on}", file=sys.stderr)
    return result.status


def _plan(args: argparse.Namespace, asked: settings.Settings) -> int:
    """Show what a run takes: planned, then with a few measured steps."""
    from datetime import datetime

    from ..kernels.toolkit.threads import set_threads
    from ..machine import age
    from ..measure import rates
    from ..report import console
    from ..train.forecast import forecast, measured, require_fit, room, sample
    from ..train.job import model_of, open_data, prepare

    began = age()
    needed, available = room(asked)
    since = age()

    def compiled(done: int, total: int, kernel: str) -> None:
        nonlocal since
        progress(done, total, kernel)
        since = age()  # a run finds what is compiled here

    with console.compiling() as progress:  # first, so that the process takes the memory of a run
        job = prepare(asked, compiled) if needed <= available else None
    if job:
        asked = replace(asked, steps=job.settings.steps)
    elif asked.epochs is not None:
        asked, model = model_of(asked)
        data = open_data(model, **asked.some(*settings.DATA, *settings.EXAMPLES))
        asked = asked.of_epochs(len(data.batches("train", asked.B, asked.T)))
    began += age() - since
    with console.saying() as say:
        roofs = rates.roofs(set_threads(asked.threads), say)
        say("planning")
        found = forecast(asked, roofs, available, sample(job) if job else ())
        if job:
            say("measuring a few steps")
            found = measured(found, job, args.runs, began)
    show(args, found, lambda: console.forecast(found, datetime.now()))
    require_fit(found, asked)
    return 0
