"""``cpuopt kernels``: list ops and the variants that compute them."""

from __future__ import annotations

import argparse
import json

HELP = "list ops and the variants that compute them"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("--kernels", action="append", default=[], metavar="FILE.py", help="your own kernels; repeatable")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from .. import kernels, ops
    from ..kernels import registry
    from ..report import console

    kernels.load_all(args.kernels)
    table = [
        {"op": name, "variant": v, "where": registry.KERNELS[name, v].where}
        for name in ops.ALL
        for v in registry.variants(name)
    ]
    if args.json:
        print(json.dumps({"kernels": table}))
    else:
        console.kernels_table(table)
    return 0
