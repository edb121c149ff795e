"""``cpuopt program``: print the traced program, its generated backward, and the memory plan.

A line is a call: its layer, op and arguments, the variant that runs it, and where in memory it writes.

Examples::

    cpuopt program --model gpt2-tiny --pass backward
    cpuopt program --model gpt2-tiny --fuse none --json
"""

from __future__ import annotations

import argparse

from ..comm import Serial
from ..train import settings
from . import ranks
from .common import settings_of, shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *settings.JOB, *settings.KERNELS, *settings.SHARING, steps=1)
    p.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="Show the program of the first of this many ranks."
    )
    p.add_argument(
        *("--pass",),
        dest="phase",
        choices=["forward", "evaluate", "backward", "reduce", "update", "all"],
        default="all",
        help="Print this part of the step: forward computes the loss, evaluate what only an evaluation needs, backward "
        "the gradients, reduce their sum over ranks, update the weights. "
        "Default: %(default)s.",
    )
    shared(p, "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..report import console
    from ..train.job import build_only

    asked, _ = ranks.shared(settings_of(args), args.ranks)
    comm = Serial()
    comm.size, comm.name = args.ranks, "messages"
    built = build_only(asked, comm)
    for note in built.notes:
        console.note(note)
    program, chosen, plan = built.program, built.kernels, built.plan()
    phases = {"all": (), "update": ("norm", "update")}.get(args.phase, (args.phase,))
    calls = [
        {
            "phase": c.shown_phase,
            "layer": c.layer,
            "op": c.op.name,
            "variant": k.variant,
            "flops": c.flops,
            "text": str(c),
        }
        for c, k in zip(program.calls, chosen, strict=True)
        if not phases or c.phase in phases
    ]
    content = {"calls": calls, "plan": plan.describe(), "flops": program.flops, "repeated": program.repeated_flops}
    show(args, content, lambda: console.program(program, chosen, plan, phases))
    return 0
