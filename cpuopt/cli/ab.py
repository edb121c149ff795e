"""``cpuopt ab``: compare two kernels of one op, alone or in real training steps.

Both get the same arrays, in random order. The verdict has a confidence interval and a control, the baseline against
itself, which shows the noise of the machine. REV:VARIANT and REV:FILE.py are kernels of a commit of the repository that
you are in, and FILE.py is one as it lies there. Each is compiled by the package of its commit, which also trains with
it if --in-step is given.

Examples::

    cpuopt ab gelu_forward vanilla optimized
    cpuopt ab gelu_forward optimized mine --kernels mygelu.py --in-step
    cpuopt ab gelu_forward main:optimized HEAD:optimized
"""

from __future__ import annotations

import argparse
from typing import Any

from .. import models
from ..errors import UserError
from ..train import settings
from ..wording import text_of
from . import common
from .common import Parser, known_op, show, start_numba

USUAL = 4, 64
"""The usual B and T."""


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.shared("op", "--json", "--runs")
    p.option("a", "Use this variant, REV:VARIANT of a commit, or FILE.py as the baseline.", metavar="A")
    p.option("b", "Compare this variant with the baseline; the verdict is about it.", metavar="B")
    settings.flags(p, "kernels", "data", "variant", "dtype", model=models.DEFAULT)
    p.option("-B", f"Compare at a batch of this many rows. Default: {USUAL[0]}.", type=int)
    p.option("-T", f"Compare at rows of this many tokens. Default: {USUAL[1]}.", type=int)
    p.option(
        "--sizes",
        "Compare at several batch sizes, rows by tokens, or at sizes of the op by symbol, as in 'BT=256 C=768', "
        "which need no model. Default: that of -B and -T.",
        "",
        "BxT,...",
    )
    p.shared("--threads", help="Compare on these numbers of threads. Default: all cores.")
    p.option("--layer", "Compare on these layers: on their shapes, or with --in-step on their calls.", "*", "GLOB")
    p.option("--in-step", "Compare inside real training steps, on the same batches.", False)
    p.option(
        "--flush",
        "Fill the caches with other data before each call. Default: warm caches, with the cold times beside.",
        False,
    )
    p.shared("--seed")
    p.shared("--rounds", default=96)
    p.shared("--limit", default=600)


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    counts = common.thread_counts(args.threads or str(common.cores()))
    start_numba(max(counts))
    from ..isolate.process import ended_by_sigterm
    from ..lab import checked, commits, worker
    from ..measure.comparison import analyses_up_to, summed
    from ..report import ab as report
    from ..report import console

    jobs = sizes_of(args)
    if not args.kernels:
        known_op("ab", args.op)
    if args.flush and args.in_step:
        raise UserError("--flush with --in-step: a step leaves the caches as they are; give one of the two")
    common.check_targets(args)
    analyses, results = analyses_up_to(args.rounds), []
    of_commits = not args.kernels and any(":" in side or side.endswith(".py") for side in (args.a, args.b))
    more = max(counts), args.limit
    child: Any = (
        commits.CommitPair(args.op, (args.a, args.b), *more) if of_commits else worker.started(args.kernels, *more)
    )
    with ended_by_sigterm(), child, console.saying() as say:
        known_op("ab", args.op, (k["op"] for k in child.start()))
        given = [(args.model, size["B"], size["T"], child.kernels, args.dtype) for _, size, _ in jobs if size]
        every = [job for of in given for job in checked.jobs_at(*of)]
        plain = [sizes for _, _, sizes in jobs if sizes]
        checked.require(
            *(child, max(counts), args.op, [args.a, args.b], every, plain),
            tick=lambda done, total: say(f"checking, case {done}/{total}"),
        )
        for label, size, sizes in jobs:
            for n in counts:
                child.say = lambda text, at=f"{label}, {n} threads: ": say(at + text)
                job = common.picked(args, "model", "data", "variant", "dtype") | {"kernels": child.kernels}
                results.append(
                    child.ask(
                        "ab",
                        variants=[args.a, args.b],
                        settings={**job, **size, "threads": n, "seed": args.seed},
                        sizes=sizes,
                        other=True,
                        analyses=analyses,
                        **common.picked(args, "op", "layer", "in_step", "flush", "seed"),
                    )
                )
    asked = common.picked(args, "op", "a", "b", "model", "dtype", "layer", "in_step", "flush", "seed")
    asked["model"] = "" if jobs[0][2] else args.model
    content = {**asked, **summed(results), "results": results}
    path = common.keep(args.runs, "ab", f"{args.op}-{args.a}-{args.b}", content)
    show(args, {**content, "path": path}, lambda: report.tables(content, path))
    return 0


def sizes_of(args: argparse.Namespace) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """Read ``-B``, ``-T`` or ``--sizes``: of each size a label, the job's B and T, and sizes by symbol for no model."""
    from ..lab.peers.plan import parse_sizes

    if args.sizes and (args.B, args.T) != (None, None):
        raise UserError(f"--sizes {args.sizes!r} with -B or -T: each names the sizes; give one of the two")
    for flag, n in {"-B": args.B, "-T": args.T}.items():
        if n is not None and n < 1:
            raise UserError(f"{flag} {n}: expected 1 or more")
    if not args.sizes:
        B, T = args.B or USUAL[0], args.T or USUAL[1]
        return [(f"{B}x{T}", {"B": B, "T": T}, {})]
    if "=" not in args.sizes:
        return [(f"{B}x{T}", {"B": B, "T": T}, {}) for B, T in parse_sizes(args.sizes)]
    if args.in_step:
        raise UserError(f"--sizes {args.sizes!r} with --in-step: a step has the sizes of its model; give BxT")
    return [(text_of(sizes), {}, sizes) for sizes in common.sizes_by_symbol(args.sizes)]
