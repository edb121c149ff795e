"""``cpuopt kernels``: list ops and the variants that compute them.

An op and a variant in brackets, as in gelu_forward[vanilla], name a kernel; every flag takes these names.

Examples::

    cpuopt kernels
    cpuopt kernels --kernels mygelu.py
"""

from __future__ import annotations

import argparse

from ..train import settings
from .common import shared, show


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, "kernels")
    shared(p, "--json")


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
    show(args, {"kernels": table}, lambda: console.kernels_table(table))
    return 0
