"""``cpuopt tune``: the fastest kernel for each op and shape of a model's step, for ``--variant auto``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UserError
from . import common
from .common import start_numba

HELP = "find the fastest kernel for each op and shape, for --variant auto"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("--model", default="gpt2-124M", help="preset, or sizes as in '{\"n_layer\": 4}' (%(default)s)")
    p.add_argument("-B", type=int, default=4, help="rows of a batch (%(default)s)")
    p.add_argument("-T", type=int, default=64, help="tokens of a row (%(default)s)")
    p.add_argument("--threads", type=int, help="for all kernels (the cores this process may use)")
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument("--fuse", default="auto", metavar="all|none|NAME,...", help="rewrites of the step (%(default)s)")
    p.add_argument(
        "--ops",
        action="append",
        default=[],
        metavar="PATTERN",
        help="measure only these, globs and families allowed; repeatable. The plan for the others stays",
    )
    p.add_argument("--data", default="builtin", help="of the steps (%(default)s)")
    p.add_argument("--rounds", type=int, default=24, help="of a comparison, at the most (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the inputs and the order of turns (%(default)s)")
    p.add_argument("--again", action="store_true", help="measure also what an interrupted run has measured")
    p.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for a comparison (%(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the record goes (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..files import alone, cache_folder

    with alone(cache_folder("machine") / "tune.lock", "runs 'cpuopt tune', and two would disturb each other's times"):
        return work(args)


def work(args: argparse.Namespace) -> int:
    """Do it, as the only process that does."""
    start_numba(args.threads)
    from ..files.reading import to_json
    from ..isolate.child import Child
    from ..lab.tune import compile_all, keep, survey, tune
    from ..measure.compare import looks_up_to
    from ..report import console
    from ..report import tune as report
    from ..train import plans
    from ..train.job import Settings

    if args.limit <= 0:
        raise UserError(f"--limit {args.limit:g}: expected a positive number of seconds")
    common.check_targets(args)
    looks = looks_up_to(args.rounds)
    given = {k: getattr(args, k) for k in ("model", "B", "T", "threads", "fuse", "data", "seed")}
    settings = Settings(**given, kernels=tuple(str(Path(f).resolve()) for f in args.kernels))
    tuning = survey(settings, args.ops or ("*",), args.again)
    with console.compiling() as progress:
        compile_all(tuning, common.cores(), progress)
    with Child(args.kernels, tuning.key["threads"], args.limit) as child, report.Progress(tuning) as view:
        tune(tuning, settings, child, looks=looks, seed=args.seed, view=view, save=keep)
    kept = keep(tuning)
    size = {"model": tuning.name, "B": args.B, "T": args.T, "threads": tuning.key["threads"]}
    content = {**size, **tuning.plan(), **to_json(tuning), "plan": str(plans.path(tuning.key)) if kept else None}
    path = common.keep(args.runs, "tune", f"{tuning.name}-{args.B}x{args.T}", content)
    if args.json:
        print(json.dumps({**content, "path": path}))
    else:
        console.show(report.tables(content, path))
    if tuning.finished:
        return 0 if kept else 1
    return 1 if tuning.why else 130
