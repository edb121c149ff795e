"""``cpuopt check``: kernels against their float64 references."""

from __future__ import annotations

import argparse
import json
import secrets
from typing import TYPE_CHECKING

from .. import models
from ..errors import UserError
from ..wording import plain
from . import common
from .common import start_numba

if TYPE_CHECKING:
    from ..ops.declaration import Op

HELP = "kernels against their float64 references"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("op", nargs="*", metavar="OP", help="ops, globs or families such as matmul (all)")
    p.add_argument(
        "--variant", action="append", default=[], help="only this one; repeatable (all, or those of --kernels)"
    )
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument(
        "--model", default=models.DEFAULT, help="whose sizes are checked too; 'none': only awkward sizes (%(default)s)"
    )
    p.add_argument("-B", type=int, default=1, help="rows of that model's batch (%(default)s)")
    p.add_argument("-T", type=int, default=64, help="tokens of a row (%(default)s)")
    p.add_argument(
        "--gradient",
        action="store_true",
        help="instead: each op's backward reference against differences of its forward",
    )
    p.add_argument("--quick", action="store_true", help="a few sizes only, and none of a model")
    p.add_argument("--threads", default="", metavar="N,...", help="must all give the same bits (1 and all cores)")
    p.add_argument("--seed", type=int, help="of the inputs (another one each time)")
    p.add_argument("--limit", type=float, default=120, metavar="S", help="seconds that a case may take (%(default)s)")
    p.add_argument("--detail", action="store_true", help="a row for every case")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 1 where a kernel or a gradient is wrong."""
    if args.gradient:
        return check_gradients(args)
    counts = common.thread_counts(args.threads)
    start_numba(max(counts))
    from ..check import worker
    from ..check.gate import conform, plan
    from ..isolate.child import Child
    from ..report import check as report
    from ..report import console
    from ..train.job import Settings, build_only

    if args.limit <= 0:
        raise UserError(f"--limit {args.limit:g}: expected a positive number of seconds")
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    with Child(worker.__name__, args.kernels, max(counts), args.limit) as child:
        wanted = choose(args.op, args.variant, args.kernels, [(k["op"], k["variant"]) for k in child.start()])
        calls = []
        if not args.quick and args.model != "none":
            for fuse in ("none", "all"):  # what a rewrite fuses is checked apart and together
                calls += build_only(Settings(model=args.model, B=args.B, T=args.T, fuse=fuse)).program.calls
        total = sum(len(plan(op, calls, args.quick)) for op, _ in wanted)
        with console.counting("cases", total) as advance:
            found = conform(
                child,
                wanted,
                calls,
                quick=args.quick,
                threads=counts,
                seed=seed,
                tick=lambda text: advance(),
            )
    if args.json:
        print(json.dumps({"seed": seed, "threads": counts, "kernels": [v.to_json() for v in found]}))
    else:
        console.show(report.tables(found, seed, counts, detail=args.detail))
    return 1 if any(v.worst.verdict == "FAIL" for v in found) else 0


def choose(
    patterns: list[str], variants: list[str], files: list[str], added: list[tuple[str, str]]
) -> list[tuple[Op, str]]:
    """List the kernels that the flags ask for; those of --kernels alone, where no variant is named.

    Parameters
    ----------
    added : op and variant of each kernel that `files` register.

    Raises
    ------
    UserError
        For an op or a variant that there is none of.
    """
    from .. import kernels, ops
    from ..kernels import registry

    kernels.load_all([])
    there = [key for key in registry.KERNELS if key not in added] + added
    for pattern in patterns:
        if not any(registry.op_matches(name, pattern) for name in ops.ALL):
            raise UserError(
                f"check {pattern!r}: no op matches; {registry.nearest(pattern, [*registry.FAMILIES, *ops.ALL])}"
            )
    for variant in variants:
        if not any(v == variant for _, v in there):
            raise UserError(
                f"--variant {variant!r}: no kernel is registered under it; "
                f"{registry.nearest(variant, dict.fromkeys(v for _, v in there))}"
            )
    if files and not added:
        raise UserError(f"--kernels {files[0]}: registers no kernel; expected functions under @kernel(op, 'name')")
    found = [
        (ops.ALL[op], variant)
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
    from .. import ops
    from ..check.gradient import check_gradient
    from ..kernels import registry

    if args.kernels:
        from .. import kernels

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
    if args.json:
        print(json.dumps({"gradients": [r.describe() for r in results]}))
    else:
        for r in results:
            print(plain(str(r)))
    return int(any(r.verdict != "PASS" for r in results))
