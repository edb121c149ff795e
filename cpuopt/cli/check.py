"""``cpuopt check``: gradients against differences."""

from __future__ import annotations

import argparse
import json

from ..errors import UserError

HELP = "check gradients against differences of the float64 references"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("ops", nargs="*", metavar="OP", help="op, glob, or a family's first words; all if none is named")
    p.add_argument("--gradient", action="store_true", help="the backward references against differences")
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument("--seed", type=int, default=0, help="of inputs and directions (%(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    if args.gradient:
        return check_gradients(args)
    raise UserError("check: say what to check, as in 'cpuopt check --gradient gelu'")


def check_gradients(args: argparse.Namespace) -> int:
    """Check the gradients of the ops that match; return 1 if one is wrong."""
    from .. import ops, registry
    from ..lab.gradient import check_gradient

    if args.kernels:
        from .. import kernels

        kernels.load_all(args.kernels)
    chosen = [
        op
        for name, op in ops.ALL.items()
        if op.inverts
        and (not args.ops or any(registry.op_matches(n, p) for p in args.ops for n in (name, op.inverts.name)))
    ]
    if not chosen:
        known = [op.name for op in ops.ALL.values() if op.inverts]
        raise UserError(
            f"check --gradient {' '.join(args.ops)}: no op with a backward matches; known: {', '.join(known)}"
        )
    results = [r for op in chosen for r in check_gradient(op, seed=args.seed)]
    if args.json:
        print(json.dumps({"gradients": [r.describe() for r in results]}))
    else:
        for r in results:
            print(r)
    return int(any(r.verdict != "PASS" for r in results))
