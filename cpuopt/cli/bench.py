"""``cpuopt bench``: compare whole training steps with PyTorch or another variant.

Each round has one step of both sides on the same batch and weights, in random order. The ratio has a confidence
interval, and the losses of both must agree.

Examples::

    cpuopt bench --peer torch-compile --sizes 4x64,16x64
    cpuopt bench --model gpt2-tiny --against vanilla --sizes 2x32
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import models
from ..errors import UserError
from ..train import settings
from . import common
from .common import Parser, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *settings.KERNELS, "moments", "weights", model=models.DEFAULT, dtype=None)
    p.option(
        "--peer",
        "Compare with torch-eager, torch-compile, torch-amp, torch-amp-compile, torch-bf16 or transformers; with "
        "-tuned behind, as those who know PyTorch run it; torch-best: all tuned ones. Repeats. cpuopt takes the peer's "
        "type or --dtype. Default: torch-eager.",
        [],
    )
    p.option("--against", "Compare with this variant of the kernels; the flag repeats.", [], "VARIANT")
    p.option(
        "--sizes",
        "Compare at these batch sizes, as in 4x64,16x64. Default: up to seven that fit the context, 1x16 to 1x1024.",
    )
    p.option("--suite", "Compare on a table of models and sizes, and print the mean over all.", False)
    p.option("--rounds", "Run this many rounds, each with a trial of both sides.", 10)
    p.shared("--seed", help="Draw weights and the order of trials from this random seed.")
    p.option(
        "--peer-python",
        "Run peers with this Python, which has torch, and transformers. Default: this one.",
        sys.executable,
        "PATH",
    )
    p.option("--out", "Write the record to this file, rewritten after each size.", metavar="FILE", type=Path)
    p.shared("--json", "--runs")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..kernels.registry import AUTO
    from ..lab.peers import Bench, Plan, default_sizes, own_sizes, parse_sizes, suite
    from ..report import bench as report
    from ..report import console
    from ..train.job import Settings, build_only

    if args.suite and (args.sizes or args.model != models.DEFAULT):
        raise UserError("--suite: it has models and sizes of its own; leave --model and --sizes out")
    same = ("model", "variant", "fuse", "recompute", "dtype", "moments", "weights", "rounds", "seed", "peer_python")
    plan = Plan(
        **common.picked(args, *same),
        sizes=own_sizes(args.model, parse_sizes(args.sizes)) if args.sizes else default_sizes(args.model),
        peers=tuple(dict.fromkeys(args.peer or ([] if args.against else ["torch-eager"]))),
        against=tuple(dict.fromkeys(args.against)),
        swap=tuple(args.swap),
        kernels=tuple(args.kernels),
        threads=args.threads or common.cores(),
        processes=common.cores(),
    )
    common.check_targets(args)
    rows = [*suite.plans(plan)] if args.suite else [plan]
    for model, B, T in [(p.model, *size) for p in rows for size in p.sizes]:
        if AUTO in (args.variant, *args.against):
            more = common.picked(plan, "kernels", "threads", "moments", "weights")
            dtype = str(plan.dtype or settings.FLAGS["dtype"].default)
            job = Settings(model=model, B=B, T=T, variant=AUTO, dtype=dtype, **more)
            console.note(f"{model} {B}x{T}: {build_only(job).notes[0]}")
    with report.progress(sum(p.cost for p in rows)) as view:
        record = suite.run(rows, view, args.out) if args.suite else Bench(plan, view).run(args.out)
    common.keep(args.runs, "bench", "suite" if args.suite else args.model, record)
    show(args, record, lambda: report.tables(record))
    return 1 if any(r["refused"] for r in record["results"]) else 0
