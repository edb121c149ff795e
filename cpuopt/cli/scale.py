"""``cpuopt scale``: show how a training step scales with threads, and why ops lose; predict more threads.

The step runs on 1, 2, 4, ... threads in turns. For each op the table has its efficiency, and what it loses to work on
one thread, imbalance, bandwidth and the start of threads. A prediction for threads that are not there is marked as one,
and lists what it assumes, and what of it was ever checked on a machine of many cores.

Examples::

    cpuopt scale
    cpuopt scale --model gpt2-tiny --project 16,32,64 --html scale.html
    cpuopt scale --project 64,128 --caches 8 --nodes 2 --bandwidth 400
"""

from __future__ import annotations

import argparse

from ..errors import UserError
from ..files import write_text
from ..train import settings
from . import common
from .common import Parser, settings_of, show, start_numba

LEAST = 3
"""The least number of steps: the times of one or two are noise, and so are shares of them."""


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *settings.JOB, *(n for n in settings.KERNELS if n != "threads"), steps=5)
    p.shared("--threads", help="Measure on these numbers of threads. Default: 1, 2, 4, ... and all cores.")
    p.option("--project", "Predict these numbers of threads, as in 16,32,64.", "", "N,...")
    p.option("--bandwidth", "Predict for this memory bandwidth. Default: as measured here.", metavar="GB/S", type=float)
    p.option("--caches", "Predict for N last-level caches. Default: 1.", 1, "N")
    p.option("--nodes", "Predict for N memory nodes. Default: 1.", 1, "N")
    p.shared("--detail", help="Print a second table, by layer.")
    p.shared("--runs", "--json", "--html")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    projected = common.thread_counts(args.project, "--project") if args.project else []
    counts = common.thread_counts(args.threads) if args.threads else None
    if 1 in projected:
        raise UserError("--project 1: one thread is what predictions start from")
    if args.steps < LEAST:
        raise UserError(f"--steps {args.steps}: expected {LEAST} or more, since a typical step is chosen among them")
    if args.bandwidth is not None and not 0 < args.bandwidth < 1e5:
        raise UserError(f"--bandwidth {args.bandwidth:g}: expected GB/s, as in 80")
    for flag, n in ("--caches", args.caches), ("--nodes", args.nodes):
        if not 1 <= n <= max(projected, default=1):
            raise UserError(f"{flag} {n}: expected 1 or more, up to the largest number of threads in --project")
    start_numba(max(counts) if counts else None)
    from ..files.reading import to_json
    from ..kernels.toolkit import regions
    from ..lab import scale
    from ..machine import Others
    from ..measure import rates
    from ..report import console
    from ..report import scale as report
    from ..report.html import scaling as page
    from ..train.job import prepare

    common.check_targets(args)
    del args.threads  # a list, and no setting of the job
    counts = sorted({1, *(counts or scale.usual_counts(common.cores()))})
    regions.watch()  # before any kernel is loaded
    with console.compiling() as progress:
        job = prepare(settings_of(args, run="scale", threads=max(counts)), progress)
    with console.saying() as say:
        roofs = {n: rates.roofs(n, say) for n in counts}
    sides = len({*counts, *projected}) + len(counts) - 1
    others = Others()
    with console.counting("steps", sides * (args.steps + scale.WARMUP)) as tick:
        watch = scale.measure(job, counts, projected, tick=tick)
    doubts = [*others.warnings(), *rates.lacks(roofs)]
    target = args.bandwidth, args.caches, args.nodes
    found = scale.scaling(job, watch, counts, projected, roofs, *target, doubts, rates.raised)
    show(args, found, lambda: report.tables(found, detail=args.detail))
    common.keep(args.runs, "scale", found.model, to_json(found))
    if args.html:
        write_text(args.html, page.report(found))
    return 0
