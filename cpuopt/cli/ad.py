"""``cpuopt ad``: print a generated backward kernel, each line with the forward line that it inverts."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UserError

HELP = "print the backward kernel generated from a forward kernel, and the reasons of its plan"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("op", metavar="OP", help="a backward op, or a forward one for all its backwards")
    p.add_argument("--from", dest="variant", default="vanilla", help="the forward's variant (%(default)s)")
    p.add_argument("--plan", action="store_true", help="what is kept, computed again or recorded, and why")
    p.add_argument("--against", metavar="VARIANT", help="also check and time it against this hand-written variant")
    p.add_argument("--html", type=Path, metavar="FILE", help="write both sources side by side, linked line by line")
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from .. import kernels, ops, registry
    from ..ad import show
    from ..ad.ops import backward

    kernels.load_all(args.kernels)
    names = [n for n, op in ops.ALL.items() if n in (args.op, f"{args.op}_backward") or (op.inverts and (
        op.inverts.name in (args.op, f"{args.op}_forward")))]  # fmt: skip
    chosen = [ops.ALL[n] for n in names if ops.ALL[n].inverts]
    if not chosen:
        known = [n for n, op in ops.ALL.items() if op.inverts]
        raise UserError(f"ad {args.op}: no op with a backward; {registry.nearest(args.op, known)}")
    status, pages = 0, []
    for op in chosen:
        assert op.inverts is not None
        forward = registry.KERNELS.get((op.inverts.name, args.variant))
        if forward is None:
            there = registry.variants(op.inverts.name)
            raise UserError(
                f"ad --from {args.variant}: {op.inverts.name} has no such variant; it has {', '.join(there)}"
            )
        made = backward(op, forward)
        pages.append(made)
        print(made.text)
        if args.plan:
            print("\n".join(show.plan(made)) + "\n")
        if args.against:
            status |= compare(op.name, args.against)
    if args.html:
        args.html.write_text(show.html(pages), encoding="utf-8")
        print(f"wrote {args.html}")
    return status


def compare(op: str, variant: str) -> int:
    """Check a generated kernel and a hand-written one on the same cases; print the worst of each."""
    from .. import registry
    from ..lab.check import check_all

    pair = [registry.KERNELS.get((op, v)) for v in ("generated", variant)]
    if pair[1] is None:
        raise UserError(f"ad --against {variant}: {op} has no such variant; it has {', '.join(registry.variants(op))}")
    worst = [max(check_all([k], quick=True), key=lambda r: r.ratio) for k in pair if k]
    for result in worst:
        print(result)
    return int(any(r.verdict == "FAIL" for r in worst))
