"""``cpuopt gate``: check and compare every kernel whose machine code differs between two commits.

It runs in a checkout of cpuopt. A change that leaves the machine code of all kernels as it is ends within seconds. The
exit status is 1 if a kernel is refused, or slower by more than --slower percent with confidence, and 3 if the machine
is too noisy to tell. Results are kept by the digests of the machine code, so nothing is measured twice.

Examples::

    cpuopt gate --base main
    cpuopt gate --base v0.1.0 --head main --slower 3 --markdown gate.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..files import write_whole
from . import common
from .common import shared, show, start_numba


def percent(text: str) -> float:
    """Read a positive number of percent."""
    if not 0 < (found := float(text)) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of percent")
    return found


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("--base", required=True, metavar="REV", help="Compare with this commit: a branch, a tag or an id.")
    p.add_argument("--head", default="", metavar="REV", help="Compare this commit. Default: the working tree.")
    p.add_argument(
        "--slower",
        type=percent,
        default=1.0,
        metavar="PERCENT",
        help="Fail if a kernel is slower by more than this. Default: %(default)g.",
    )
    p.add_argument("--only", default="*", metavar="GLOB", help="Compare kernels with such names, as in 'gelu*'.")
    p.add_argument("--markdown", type=Path, metavar="FILE", help="Write a table for a pull request to this file.")
    p.add_argument("--threads", type=int, metavar="N", help="Compare on this number of threads. Default: all cores.")
    shared(p, "--json", "--seed")
    shared(p, "--rounds", default=48)
    shared(p, "--limit", default=600)


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    threads = args.threads or common.cores()
    start_numba(threads)
    common.check_targets(args)
    from ..isolate.process import ended_by_sigterm
    from ..lab import gate
    from ..report import console
    from ..report import gate as report

    more = {"only": args.only, "rounds": args.rounds, "limit_s": args.limit, "seed": args.seed}
    with ended_by_sigterm(), console.saying() as say:
        found = gate.run(gate.GatePlan(args.base, args.head, args.slower, threads, **more), say)
    if args.markdown:
        write_whole(args.markdown, [report.markdown(found).encode("utf-8", "replace")])
    show(args, found, lambda: report.tables(found))
    return int(found["status"])
