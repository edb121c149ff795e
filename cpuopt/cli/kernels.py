"""``cpuopt kernels``: list ops and the variants that compute them.

An op and a variant in brackets, as in gelu_forward[vanilla], name a kernel; every flag takes these names.

Examples::

    cpuopt kernels matmul
    cpuopt kernels --kernels mygelu.py
"""

from __future__ import annotations

import argparse

from ..errors import UserError
from ..train import settings
from ..wording import nearest
from .common import shared, show


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument(
        "op", nargs="*", metavar="OP", help="List these ops: names, globs or families such as matmul. Default: all."
    )
    settings.flags(p, "kernels")
    shared(p, "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    from .. import kernels, ops
    from ..kernels import registry
    from ..report import console

    kernels.load_all(args.kernels)
    for pattern in args.op:
        if not any(registry.op_matches(name, pattern) for name in ops.ALL):
            raise UserError(f"kernels {pattern!r}: no op matches; {nearest(pattern, [*registry.FAMILIES, *ops.ALL])}")
    table = [
        {"op": name, "label": op.label, "variant": v, "where": registry.KERNELS[name, v].where}
        for name, op in ops.ALL.items()
        if not args.op or any(registry.op_matches(name, pattern) for pattern in args.op)
        for v in registry.variants(name)
    ]
    show(args, {"kernels": table}, lambda: console.kernels_table(table))
    return 0
