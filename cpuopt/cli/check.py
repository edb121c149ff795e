"""``cpuopt check``: check kernels against their float64 references.

Every kernel runs in a process of its own, on awkward shapes and on those of the model, and must give the same bits
on any number of threads.

Examples::

    cpuopt check gelu --variant optimized
    cpuopt check --kernels mygelu.py --detail
"""

from __future__ import annotations

import argparse
import secrets

from .. import models
from ..check.result import RIGHT, exit_status
from ..errors import UserError
from ..files.reading import to_json
from ..train import settings
from ..wording import nearest
from . import common
from .common import Parser, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option("op", "Check these ops: names, globs or families such as matmul. Default: all.", metavar="OP", nargs="*")
    p.option("--variant", "Check this variant; the flag repeats. Default: all, or those of --kernels.", [])
    settings.flags(p, "kernels", "B", "T")
    p.option("--model", "Check at the sizes of this model; 'none' means only awkward sizes.", models.DEFAULT)
    p.option("--gradient", "Check the backward references by differences of the forward references.", False)
    p.option("--quick", "Check at a few small sizes only, none of a model.", False)
    p.shared("--threads", help="Require the same bits on these numbers of threads. Default: 1 and all cores.")
    p.shared("--sizes")
    p.option("--seed", "Draw the inputs from this random seed. Default: a new one each time.", type=int)
    p.shared("--limit", default=120)
    p.option("--plan", "List the cases of each op and how each is judged, only.", False)
    p.shared("--detail", help="Print a row for every case.")
    p.shared("--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    if args.gradient:
        if args.plan:
            raise UserError("--plan with --gradient: gradients have no list of cases; give one of the two")
        return check_gradients(args)
    counts = common.thread_counts(args.threads)
    start_numba(max(counts))
    from ..isolate.child import Child
    from ..lab import checked, worker
    from ..report import check as report
    from ..report import console

    sizes = common.sizes_by_symbol(args.sizes) if args.sizes else []
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    with Child(worker.__name__, args.kernels, max(counts), args.limit) as child:
        wanted = choose(args.op, args.variant, args.kernels, [(k["op"], k["variant"]) for k in child.start()])
        plain = args.quick or args.model == "none" or sizes
        jobs = [] if plain else checked.jobs_at(args.model, args.B, args.T, child.kernels)
        plans = checked.planned(child, [op for op, _ in wanted], jobs, sizes, args.quick)
        if args.plan:
            listed = {op: {"cases": to_json(cases), "left_out": n} for op, (cases, n) in plans.items()}
            show(args, {"seed": seed, "threads": counts, "plan": listed}, lambda: report.plan(plans, seed, counts))
            return 0
        with console.counting("cases", sum(len(plans[op][0]) for op, _ in wanted)) as advance:
            found = checked.judge(child, wanted, plans, counts, seed, lambda case: advance())
    for k in child.added:
        if (k["op"], k["variant"]) in wanted and k["note"]:
            console.note(k["note"])
    content = {"seed": seed, "threads": counts, "kernels": [v.of_kernel() for v in found]}
    show(args, content, lambda: report.tables(found, seed, counts, detail=args.detail))
    return exit_status(v.verdict for v in found)


def choose(
    patterns: list[str], variants: list[str], files: list[str], added: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """List the kernels that the flags ask for: without --variant, only those of --kernels.

    Parameters
    ----------
    added : op and variant of each kernel that `files` register.

    Raises
    ------
    UserError
        For an op or a variant that does not exist.
    """
    from .. import ops
    from ..kernels import registry

    names = dict.fromkeys([*ops.ALL, *(op for op, _ in added)])
    there = [key for key in registry.KERNELS if key not in added] + added
    for pattern in patterns:
        if not any(registry.op_matches(name, pattern) for name in names):
            raise UserError(f"check {pattern!r}: no op matches; {nearest(pattern, [*registry.FAMILIES, *names])}")
    for variant in variants:
        if not any(v == variant for _, v in there):
            raise UserError(
                f"--variant {variant!r}: no kernel is registered under it; "
                f"{nearest(variant, dict.fromkeys(v for _, v in there))}"
            )
    if files and not added:
        raise UserError(f"--kernels {files[0]}: registers no kernel; expected functions under @kernel(op, 'name')")
    found = [
        (op, variant)
        for op, variant in (added if files and not variants else there)
        if (not patterns or any(registry.op_matches(op, p) for p in patterns)) and (not variants or variant in variants)
    ]
    if not found:
        raise UserError(
            f"check: no kernel is both one of {patterns} and of variant {variants or 'any'}; see 'cpuopt kernels'"
        )
    return found


def check_gradients(args: argparse.Namespace) -> int:
    """Check the gradients of the ops that match; return 1 if one is wrong."""
    from .. import kernels, ops
    from ..check.gradient import check_gradient
    from ..kernels import registry

    kernels.load_all(args.kernels)
    chosen = [
        op
        for op in ops.ALL.values()
        if op.inverts
        and (not args.op or any(registry.op_matches(n, p) for p in args.op for n in (op.name, op.inverts.name)))
    ]
    if not chosen:
        known = [op.name for op in ops.ALL.values() if op.inverts]
        raise UserError(
            f"check --gradient {' '.join(args.op)}: no op with a backward matches; known: {', '.join(known)}"
        )
    results = [r for op in chosen for r in check_gradient(op, seed=args.seed or 0)]
    show(args, {"gradients": [r.describe() for r in results]}, lambda: [str(r) for r in results])
    return int(any(r.verdict != RIGHT for r in results))
