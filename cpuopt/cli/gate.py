"""``cpuopt gate``: check and compare every kernel whose machine code differs between two commits.

It runs in a checkout of cpuopt. A change that leaves the machine code of all kernels as it is ends within seconds. With
--steps, whole training steps are compared, too. The exit status is 1 if a kernel is refused, or if a kernel or a step
is slower by more than --slower percent with confidence, and 3 if the machine is too noisy to tell. Results are kept by
the digests of the code, so nothing is measured twice.

Examples::

    cpuopt gate --base main
    cpuopt gate --base v0.1.0 --head main --slower 3 --markdown gate.md
    cpuopt gate --base main --steps gpt2-tiny --sizes 4x64,1x16
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..files import write_text
from . import common
from .common import Parser, show, start_numba


def percent(text: str) -> float:
    """Read a positive number of percent."""
    if not 0 < (found := float(text)) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of percent")
    return found


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option("--base", "Compare with this commit: a branch, a tag or an id.", metavar="REV", required=True)
    p.option("--head", "Compare this commit. Default: the working tree.", "", "REV")
    p.option("--slower", "Fail if a kernel or a step is slower by more than this.", 1.0, "PERCENT", type=percent)
    p.option("--only", "Compare kernels with such names, as in 'gelu*'.", "*", "GLOB")
    p.option("--steps", "Compare whole training steps of this model, too.", "", "MODEL")
    p.option("--sizes", "Compare steps at these sizes, rows by tokens.", "4x64", "BxT,...")
    p.option("--markdown", "Write a table for a pull request to this file.", metavar="FILE", type=Path)
    p.option("--threads", "Compare on this number of threads. Default: all cores.", metavar="N", type=int)
    p.shared("--json", "--seed")
    p.shared("--rounds", default=48)
    p.shared("--limit", default=600)


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    threads = args.threads or common.cores()
    start_numba(threads)
    common.check_targets(args)
    from ..isolate.process import ended_by_sigterm
    from ..lab import gate
    from ..report import console
    from ..report import gate as report

    more = {
        "only": args.only,
        "steps": args.steps,
        "sizes": args.sizes,
        "rounds": args.rounds,
        "limit_s": args.limit,
        "seed": args.seed,
    }
    with ended_by_sigterm(), console.saying() as say:
        found = gate.run(gate.GatePlan(args.base, args.head, args.slower, threads, **more), say)
    if args.markdown:
        write_text(args.markdown, report.markdown(found))
    show(args, found, lambda: report.tables(found))
    return int(found["status"])
