"""``cpuopt history``: how the speed of an op moved over the records of this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UserError

HELP = "how the speed of an op moved over the records of this machine"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("op", metavar="OP", help="as 'cpuopt kernels' lists it")
    p.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where records are (%(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from .. import ops
    from ..kernels.registry import nearest
    from ..lab import records
    from ..measure.rates import machine_id
    from ..report import console
    from ..report import records as report

    if args.op not in ops.ALL:
        raise UserError(f"history {args.op!r}: no such op; {nearest(args.op, ops.ALL)}")
    rows = records.history(records.entries(args.runs), args.op, machine_id())
    if args.json:
        print(json.dumps({"op": args.op, "rows": rows}))
    else:
        console.show(report.history(args.op, rows))
    return 0
