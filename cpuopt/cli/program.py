"""``cpuopt program``: print the traced program, its generated backward, and the memory plan."""

from __future__ import annotations

import argparse
import json

from .common import job_flags, settings_of, start_numba

HELP = "print the traced program, its generated backward, and the memory plan"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    job_flags(p, steps=1)
    p.add_argument("--pass", dest="phase", choices=["forward", "evaluate", "backward", "update", "all"], default="all")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..report import console
    from ..train.job import build_only

    built = build_only(settings_of(args))
    for note in built.notes:
        console.warn(note)
    program, chosen, plan = built.program, built.kernels, built.plan()
    phases = {"all": (), "update": ("norm", "update")}.get(args.phase, (args.phase,))
    if args.json:
        calls = [
            {
                "phase": c.phase,
                "layer": c.layer,
                "op": c.op.name,
                "variant": k.variant,
                "flops": c.flops,
                "text": str(c),
            }
            for c, k in zip(program.calls, chosen, strict=True)
            if not phases or c.phase in phases
        ]
        print(json.dumps({"calls": calls, "plan": plan.describe(), "flops": program.flops}))
    else:
        console.program(program, chosen, plan, phases)
    return 0
