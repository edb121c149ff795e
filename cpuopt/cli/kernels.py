"""``cpuopt kernels``: list ops and the variants that compute them, or compile these kernels.

An op and a variant in brackets, as in gelu_forward[vanilla], name a kernel; every flag takes these names. Compiled
kernels are kept on disk. A command compiles what it needs; with --compile, it is there before.

Examples::

    cpuopt kernels matmul
    cpuopt kernels --kernels mygelu.py
    cpuopt kernels --compile
    cpuopt kernels --headroom
"""

from __future__ import annotations

import argparse

from ..errors import UserError
from ..train import settings
from ..wording import nearest
from .common import Parser, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option("op", "List these ops: names, globs or families such as matmul. Default: all.", metavar="OP", nargs="*")
    p.option("--compile", "Compile the kernels of these ops, one process a core.", False)
    p.option(
        "--headroom",
        "Rank the ops of the newest profile in --runs by the time above their roofs, with what is gained so far.",
        False,
    )
    settings.flags(p, "kernels")
    p.shared("--runs", "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    if args.compile:
        start_numba(None)
    from .. import kernels, ops
    from ..kernels import registry
    from ..report import console

    kernels.load_all(args.kernels)
    for pattern in args.op:
        if not any(registry.op_matches(name, pattern) for name in ops.ALL):
            raise UserError(f"kernels {pattern!r}: no op matches; {nearest(pattern, [*registry.FAMILIES, *ops.ALL])}")
    if args.headroom:
        from ..lab import records
        from ..measure.rates import machine_id
        from ..report.records import headroom

        ranked = records.headroom(records.entries(args.runs), machine_id())
        wanted = args.op or ["*"]
        ranked["headroom"] = [r for r in ranked["headroom"] if any(registry.op_matches(r["op"], p) for p in wanted)]
        show(args, ranked, lambda: headroom(ranked))
        return 0
    found = [
        registry.KERNELS[name, variant]
        for name in ops.ALL
        if not args.op or any(registry.op_matches(name, pattern) for pattern in args.op)
        for variant in registry.variants(name)
    ]
    if args.compile:
        from ..kernels.compile import jit

        with console.compiling() as progress:
            compiled = jit.compile_kernels(found, files=args.kernels, progress=progress)
        content = {"compiled": compiled, "there": len(found) - compiled}
        show(args, content, lambda: [f"{compiled} kernels compiled, {len(found) - compiled} were there"])
        return 0
    table = [{"op": k.op.name, "label": k.op.label, "variant": k.variant, "where": k.where} for k in found]
    show(args, {"kernels": table}, lambda: console.kernels_table(table))
    return 0
