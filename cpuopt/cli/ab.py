"""``cpuopt ab``: two kernels of one op against each other, alone or inside real training steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import models
from ..errors import UserError
from . import common
from .common import start_numba

HELP = "two kernels of one op against each other, alone or in real training steps"
DEFAULTS = "4x64"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("op", metavar="OP", help="as 'cpuopt kernels' lists it")
    p.add_argument("a", metavar="A", help="the variant to compare with")
    p.add_argument("b", metavar="B", help="the variant that gets the verdict")
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument("--model", default=models.DEFAULT, help="whose shapes and steps (%(default)s)")
    p.add_argument("--sizes", default=DEFAULTS, metavar="BxT,...", help="rows by tokens (%(default)s)")
    p.add_argument("--threads", default="", metavar="N,...", help="(all cores)")
    p.add_argument(
        "--layer", default="*", metavar="GLOB", help="only the shapes, or with --in-step the calls, of these"
    )
    p.add_argument("--in-step", action="store_true", help="inside real training steps, both on the same batches")
    p.add_argument("--data", default="builtin", help="of the steps (%(default)s)")
    p.add_argument("--variant", default=common.DEFAULT, help="of all other ops in the steps (%(default)s)")
    p.add_argument("--flush", action="store_true", help="fill the caches with something else before each call")
    p.add_argument("--rounds", type=int, default=96, help="at the most; fewer where they suffice (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the inputs and the order of turns (%(default)s)")
    p.add_argument("--limit", type=float, default=600, metavar="S", help="seconds that one size may take (%(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the record goes (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    counts = common.thread_counts(args.threads or str(common.cores()))
    start_numba(max(counts))
    from .. import ops
    from ..isolate.child import Child
    from ..kernels import registry
    from ..lab import worker
    from ..lab.peers.plan import parse_sizes
    from ..measure.comparison import analyses_up_to, summed
    from ..report import ab as report
    from ..report import console

    if args.op not in ops.ALL:
        raise UserError(f"ab {args.op!r}: no such op; {registry.nearest(args.op, ops.ALL)}")
    if args.flush and args.in_step:
        raise UserError("--flush with --in-step: a step leaves the caches as they are; give one of the two")
    common.check_targets(args)
    analyses, results = analyses_up_to(args.rounds), []
    with Child(worker.__name__, args.kernels, max(counts), args.limit) as child, console.saying() as say:
        for B, T in parse_sizes(args.sizes):
            for n in counts:
                child.say = lambda text, at=f"{B}x{T}, {n} threads: ": say(at + text)  # type: ignore[misc]
                settings = {"model": args.model, "data": args.data, "variant": args.variant, "kernels": child.kernels}
                results.append(
                    child.ask(
                        "ab",
                        op=args.op,
                        variants=[args.a, args.b],
                        settings={**settings, "B": B, "T": T, "threads": n, "seed": args.seed},
                        layer=args.layer,
                        in_step=args.in_step,
                        flush=args.flush,
                        seed=args.seed,
                        analyses=analyses,
                    )
                )
    asked = {k: getattr(args, k) for k in ("op", "a", "b", "model", "layer", "in_step", "flush", "seed")}
    content = {**asked, **summed(results), "results": results}
    path = common.keep(args.runs, "ab", f"{args.op}-{args.a}-{args.b}", content)
    if args.json:
        print(json.dumps({**content, "path": path}))
    else:
        console.show(report.tables(content, path))
    return 0
