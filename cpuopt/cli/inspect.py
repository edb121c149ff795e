"""``cpuopt inspect``: what the compiler made of a kernel, or of two side by side."""

from __future__ import annotations

import argparse
import json

from ..errors import UserError
from .common import start_numba

HELP = "vector width, FMAs, spills and calls of a kernel's loops, and the compiler's remarks"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("op", metavar="OP", help="as 'cpuopt kernels' lists it")
    p.add_argument("variant", metavar="VARIANT", nargs="+", help="one, or two side by side")
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument("--parallel", type=int, default=0, metavar="1-4", help="numba's diagnostics of the parallel loops")
    p.add_argument("--asm", action="store_true", help="print the assembly text of one variant, and nothing else")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(None)
    from .. import kernels, ops
    from ..files.reading import to_json
    from ..kernels import registry
    from ..lab.inspect import inspect
    from ..report import console
    from ..report import inspect as report

    kernels.load_all(args.kernels)
    if args.op not in ops.ALL:
        raise UserError(f"inspect {args.op!r}: no such op; {registry.nearest(args.op, ops.ALL)}")
    if len(args.variant) > (1 if args.asm else 2):
        raise UserError(
            f"inspect: {len(args.variant)} variants; expected {'one with --asm' if args.asm else 'one or two'}"
        )
    if not 0 <= args.parallel <= 4:
        raise UserError(f"--parallel {args.parallel}: expected 1 to 4")
    for v in args.variant:
        if (args.op, v) not in registry.KERNELS:
            there = registry.variants(args.op)
            raise UserError(f"inspect: {args.op} has no variant {v!r}; {registry.nearest(v, there)}")
    with console.saying() as say:
        found = []
        for v in args.variant:
            say(f"compiling {args.op}[{v}]")
            found.append(inspect(args.op, v, args.kernels, args.parallel))
    if args.asm:
        print(found[0].asm)
    elif args.json:
        print(json.dumps({"kernels": to_json(found)}))
    else:
        console.show(report.tables(found))
    return 0
