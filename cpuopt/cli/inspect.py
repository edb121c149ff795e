"""``cpuopt inspect``: show vector width, FMAs, spills and calls of a kernel's loops, with advice.

The kernel is compiled afresh, and its innermost loops are read from the machine code. Advice has the number of a rule,
a line of the kernel, the reason, and what to try; ``cpuopt lab`` has more, since it knows the time and the sizes too.

Examples::

    cpuopt inspect gelu_forward optimized
    cpuopt inspect gelu_forward vanilla optimized --json
"""

from __future__ import annotations

import argparse

from ..errors import UserError
from ..files import write_text
from ..train import settings
from . import common
from .common import Parser, known_op, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.shared("op", "--json", "--html")
    p.option("variant", "Inspect this variant; two are shown side by side.", metavar="VARIANT", nargs="+")
    settings.flags(p, "kernels")
    p.option("--parallel", "Print numba's parallel diagnostics at this level.", 0, "1-4")
    p.option("--target", "Compile for another machine, such as haswell, znver4 or neoverse-v2.", metavar="NAME")
    p.option("--asm", "Print the assembly text of one variant, and nothing else.", False)


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(None)
    common.check_targets(args)
    from .. import kernels
    from ..kernels import registry
    from ..lab.inspect import inspect
    from ..report import console
    from ..report import inspect as report
    from ..report.html.machine_code import machine_code

    kernels.load_all(args.kernels)
    known_op("inspect", args.op)
    if len(args.variant) > (1 if args.asm else 2):
        raise UserError(
            f"inspect: {len(args.variant)} variants; expected {'one with --asm' if args.asm else 'one or two'}"
        )
    if not 0 <= args.parallel <= 4:
        raise UserError(f"--parallel {args.parallel}: expected 1 to 4")
    found = [registry.find(args.op, v, "inspect: ") for v in args.variant]
    if args.target:
        return other(args)
    with console.saying() as say:
        shown = []
        for kernel in found:
            say(f"compiling {kernel.name}")
            kernel.compile()  # what runs, with which the inspected code is compared
            shown.append(inspect(args.op, kernel.variant, args.kernels, args.parallel))
    if args.html:
        write_text(args.html, machine_code(shown))
    if args.asm:
        print(shown[0].asm)
    else:
        show(args, {"kernels": shown}, lambda: report.tables(shown))
    return 0


def other(args: argparse.Namespace) -> int:
    """Show the code of another machine."""
    from ..lab import targets
    from ..report import console
    from ..report import inspect as report

    with console.saying() as say:
        say(f"compiling {args.op} for {args.target}")
        found = [targets.inspect(args.op, v, args.target, args.kernels) for v in args.variant]
    if args.asm:
        print(found[0].asm)
    else:
        show(args, {"kernels": found}, lambda: report.target_tables(found))
    return 0
