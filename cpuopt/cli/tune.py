"""``cpuopt tune``: find the fastest kernel for each op and shape, for --variant auto.

The plan is kept for this model, size, machine and number of threads. An interrupted run goes on where it was.

Examples::

    cpuopt tune --model gpt2-tiny -B 2 -T 32
    cpuopt tune --ops matmul --budget 600
"""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from .. import models
from ..errors import UserError
from ..train import settings
from . import common
from .common import Parser, settings_of, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    settings.flags(p, "B", "T", "threads", "kernels", "fuse", "data", "dtype", model=models.DEFAULT)
    p.option(
        "--ops",
        "Measure this op: name, glob or family. The flag repeats, and the plan for other ops stays.",
        [],
        "PATTERN",
    )
    p.shared("--seed")
    p.option("--again", "Measure again in place of what an interrupted run kept.", False)
    p.option(
        "--budget",
        "Make the plan of what is measured after this many seconds. Default: no limit.",
        inf,
        "S",
        type=float,
    )
    p.shared("--rounds", default=24)
    p.shared("--limit", default=600)
    p.shared("--json", "--runs")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..files import alone, cache_folder

    with alone(cache_folder("machine") / "tune.lock", "runs 'cpuopt tune', and two would disturb each other's times"):
        return work(args)


def work(args: argparse.Namespace) -> int:
    """Tune while this process holds the lock."""
    start_numba(args.threads)
    from dataclasses import replace

    from ..files.reading import to_json
    from ..isolate.child import Child
    from ..lab import worker
    from ..lab.tune import compile_all, keep, survey, tune
    from ..measure.comparison import analyses_up_to
    from ..report import console
    from ..report import tune as report
    from ..train import plans

    if not args.budget > 0:
        raise UserError(f"--budget {args.budget:g}: expected a positive number of seconds")
    common.check_targets(args)
    analyses = analyses_up_to(args.rounds)
    job = replace(settings_of(args), kernels=tuple(str(Path(f).resolve()) for f in args.kernels), processes=1)
    tuning = survey(job, args.ops or ("*",), args.again)
    with console.compiling() as progress:
        compile_all(tuning, common.cores(), progress)
    threads, B, T = (tuning.key[name] for name in ("threads", "B", "T"))
    with Child(worker.__name__, args.kernels, threads, args.limit) as child, report.Progress(tuning) as view:
        asked = {"analyses": analyses, "seed": args.seed, "budget_s": args.budget}
        tune(tuning, job, child, view=view, save=keep, **asked)
    kept = keep(tuning)
    size = {"model": tuning.name, "B": B, "T": T, "threads": threads}
    content = {**size, **tuning.plan(), **to_json(tuning), "plan": str(plans.path(tuning.key)) if kept else None}
    path = common.keep(args.runs, "tune", f"{tuning.name}-{B}x{T}", content)
    show(args, {**content, "path": path}, lambda: report.tables(content, path))
    if tuning.finished:
        return 0 if kept else 1
    return 1 if tuning.why else 130
