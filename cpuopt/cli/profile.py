"""``cpuopt profile``: show the time of each op and layer of a training step.

A table by op has times, rates and shares of the machine's roofs; a second one has the layers. Every kernel is checked
before a time is printed. The record stays in runs/.

Examples::

    cpuopt profile --model gpt2-tiny --html report.html
    cpuopt profile --swap 'gelu_forward@h.0.*=vanilla' --detail
    cpuopt profile --lines matmul_update
"""

from __future__ import annotations

import argparse
import os
from math import inf

from ..comm.agree import Agreement
from ..errors import UserError
from ..machine import beside_others
from ..measure.lines import LINES_S, MOST_STEPS, SMALL
from ..measure.quartile import ENOUGH_S, LEAST, MOST
from ..train import settings
from . import common, ranks
from .common import settings_of, shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *(n for n in settings.JOB if n != "steps"), *settings.KERNELS, *settings.SHARING)
    p.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"Run and time this many steps. Default: as many as take {ENOUGH_S:g} s, {LEAST} to {MOST}; several ranks "
        f"{MOST}.",
    )
    ranks.flags(p)
    p.add_argument(
        "--warmup", type=int, default=1, help="Run this many steps first, which are not counted. Default: %(default)s."
    )
    p.add_argument("--detail", action="store_true", help="Print a row for every op of every layer.")
    p.add_argument(
        "--lines",
        nargs="?",
        const="*",
        metavar="OP",
        help="Sample the threads, and show which lines of source take the time of this op, or of a family such as "
        f"matmul. Without OP: of every op with {SMALL:g} %% or more. Steps then take {LINES_S:g} s by default.",
    )
    shared(p, "--runs", "--json", "--html", "--trace")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    return ranks.run(args, lambda rank: _profile(args, rank))


def _profile(args: argparse.Namespace, rank: ranks.Rank) -> int:
    """Profile this rank; the first one shows its own times."""
    comm = rank.comm
    args.threads = args.threads or (rank.place.threads if rank.place else None)
    start_numba(args.threads)
    from ..kernels.compile.sampling import unavailable
    from ..kernels.toolkit import regions
    from ..measure import rates as machine
    from ..profiler import profile
    from ..report import console, html, tables
    from ..train.job import prepare

    with Agreement(comm) as agreement:
        enough_s = ENOUGH_S if args.lines is None else LINES_S
        enough_s = enough_s if args.steps is None and comm.size == 1 else inf
        args.steps = (MOST if args.lines is None else MOST_STEPS) if args.steps is None else args.steps
        asked, _ = ranks.shared(settings_of(args, run="profile"), comm.size)
        if args.warmup < 0:
            raise UserError(f"--warmup {args.warmup}: expected 0 or more")
        if args.lines and (why := unavailable()):
            raise UserError(f"--lines: {why}")
        if not comm.rank:
            common.check_targets(args)
        agreement.settle(ranks.facts(asked, [*settings.FLAGS]))
    watched = regions.watch()  # before any kernel is loaded
    with console.compiling() as progress, Agreement(comm) as agreement:
        job = prepare(asked, progress, comm=comm, agreed=agreement.settle)
    if comm.rank:
        profile(job, warmup=args.warmup)
        return 0
    with console.saying() as say:
        roofs = machine.roofs(job.engine.threads, say)
    if layer := machine.slow_layer():
        console.warn(layer)
    if roofs.doubts:
        console.warn(f"the roofs may be too low: {'; '.join(roofs.doubts)}. When it is quiet: cpuopt machine --again")
    for note in job.engine.notes:
        console.note(note)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > common.cores() and comm.size == 1:
        others = "other processes make these times too long"
        console.warn(f"load average {busy:.1f} on {common.cores()} cores: {others}; {beside_others()}")
    with console.counting("steps", args.steps + args.warmup) as tick:
        more = {"tick": tick, "roofs": roofs, "regions": watched, "enough_s": enough_s, "lines": args.lines}
        report = profile(job, warmup=args.warmup, **more)
    show(args, report, lambda: tables.profile_tables(report, detail=args.detail))
    common.keep(args.runs, "profile", report.model, {"profile": report})
    common.write_trace(args, report)
    if args.html:
        html.write_report(args.html, report, job.engine)
    return 0
