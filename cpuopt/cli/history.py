"""``cpuopt history``: show the speed of an op over the records of this machine.

A row is one measurement, with the hash of the kernel's source and the commit.

Examples::

    cpuopt history gelu_forward
    cpuopt history matmul_forward --json
"""

from __future__ import annotations

import argparse

from .common import known_op, shared, show


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    shared(p, "op", "--runs", "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from ..lab import records
    from ..measure.rates import machine_id
    from ..report import records as report

    found = records.entries(args.runs)
    own = records.compared_ops(found)  # an op of one's own is in no package
    rows = records.history(found, known_op("history", args.op, own), machine_id())
    show(args, {"op": args.op, "rows": rows}, lambda: report.history(args.op, rows))
    return 0
