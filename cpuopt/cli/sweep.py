"""``cpuopt sweep``: measure kernels of one op over sizes, with warm and cold caches, under the roof.

Each kernel is checked on the arrays of a size before it is timed there; one that is wrong gets no figures. A range
doubles from its first number to its last. Ctrl-C keeps what was measured.

Examples::

    cpuopt sweep gelu_forward --over N=4096..16777216 --html gelu.html
    cpuopt sweep matmul_forward --over C=128..2048 --over BT=16,256 --csv a.csv
"""

from __future__ import annotations

import argparse

from ..check.result import exit_status
from ..errors import UNCHECKED, WRONG
from ..train import settings
from . import common
from .common import Parser, known_op, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.shared("op", "--runs", "--json", "--csv", "--svg", "--html")
    p.option(
        "--over",
        "Measure at these sizes of a symbol, A, 2 A, 4 A and so on up to B, or at a list, as in C=384,768; the "
        "flag repeats.",
        [],
        "SYMBOL=A..B",
    )
    p.option(
        "--variants",
        "Measure these variants; ratios are to the first. Default: optimized, and those of --kernels.",
        "",
        "A,B,...",
    )
    p.shared(
        "--sizes",
        help="Set the sizes of other symbols, as in OC=768. Default: those of the op's first call in --model.",
    )
    settings.flags(p, "kernels", "dtype", "threads", "B", "T", "model")
    p.option("--layer", "Use the sizes of a call in these layers of the model.", "*", "GLOB")
    p.shared("--rounds", default=7, help="Run this many rounds at each size.")
    p.shared("--seed", help="Draw inputs from this random seed.")
    p.shared("--limit", default=600, help="Stop one size after this many seconds.")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from .. import ops
    from ..lab import sweep
    from ..models import is_own
    from ..train.job import Settings

    over = sweep.parse_all(args.over)
    fixed = common.sizes_by_symbol(args.sizes)[0] if args.sizes else {}
    start_numba(args.threads)
    from ..files import write_text
    from ..files.reading import from_json
    from ..kernels import registry
    from ..lab import checked, worker
    from ..measure import rates
    from ..report import console
    from ..report import sweep as report
    from ..report.html import sweep as page

    common.check_targets(args)
    job = common.picked(args, "model", "B", "T", "dtype")
    if args.op in ops.ALL and not is_own(args.model or ""):  # refused before kernels are loaded and roofs measured
        sweep.plan(ops.ALL[args.op], over, fixed, Settings(**job).sized(), args.layer)
    threads = args.threads or common.cores()
    with worker.started(args.kernels, threads, args.limit) as child:
        added = [(k["op"], k["variant"]) for k in child.start()]
        known_op("sweep", args.op, (op for op, _ in added))
        mine = [v for op, v in added if op == args.op]
        known = dict.fromkeys([*registry.variants(args.op), *mine])
        variants = sweep.default_variants(args.op, args.variants, mine, [*known])
        asked = {"over": over, "sizes": fixed, "settings": job | {"kernels": child.kernels}, "layer": args.layer}
        plan: sweep.Grid = from_json(sweep.Grid, child.ask("plan", op=args.op, **asked))
        with console.saying() as say:
            roofs = rates.roofs(threads, say)
            ends = [dict(s.sizes) for s in (plan.shapes[0], plan.shapes[-1])]
            checked.require(child, threads, args.op, variants, [], ends, lambda i, n: say(f"checking, case {i}/{n}"))
        found = sweep.Sweep(args.op, variants, plan, roofs)
        more = {"threads": threads, "seed": args.seed, "rounds": args.rounds}
        with console.remaining() as progress:
            found.run(sweep.asking(child.ask, args.op, more), progress, [child])
    content = found.record(rates.raised, model=args.model, dtype=args.dtype, seed=args.seed)
    path = common.keep(args.runs, "sweep", args.op, content)
    for file, make in (args.csv, sweep.csv), (args.svg, page.picture), (args.html, page.report):
        if file:
            write_text(file, make(content))
    show(args, {**content, "path": path}, lambda: report.tables(content, path))
    status = exit_status([WRONG] * bool(found.refused) + [UNCHECKED] * bool(found.late))
    return status or (0 if found.finished else 130)
