"""``cpuopt verdicts``: measure how often ab errs on this machine, and which difference it finds.

A kernel is compared with itself for two minutes: each ``faster`` or ``slower`` is a false alarm. The same comparisons
are replayed with slower times, which gives the share of differences that are found. Ctrl-C keeps what was measured.

Examples::

    cpuopt verdicts
    cpuopt verdicts --threads 1 --seconds 60 --json
"""

from __future__ import annotations

import argparse

from ..train import settings
from . import common
from .common import shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, "threads")
    p.add_argument(
        "--seconds", type=common.seconds, default=120, metavar="S", help="Measure for this long. Default: %(default)s."
    )
    shared(p, "--seed", help="Draw the orders from this random seed. Default: %(default)s.")
    shared(p, "--runs", "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 1 if no comparison was made."""
    start_numba(args.threads)
    from .. import kernels  # noqa: F401  (registers them)
    from ..building import set_threads
    from ..kernels import registry
    from ..lab import verdicts
    from ..report import console
    from ..report import verdicts as report

    common.check_targets(args)
    kernel = registry.find("gelu_forward", "optimized")
    kernel.compile()
    n = set_threads(args.threads, [kernel])
    with console.remaining() as progress:
        found, doubts = verdicts.measure(kernel, args.seconds, args.seed, progress)
    content = {"threads": n, "seed": args.seed, **verdicts.rates(found), "doubts": doubts}
    path = common.keep(args.runs, "verdicts", kernel.op.name, content)
    show(args, {**content, "path": path}, lambda: report.tables(content, path))
    return 0 if found else 1
