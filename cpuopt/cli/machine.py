"""``cpuopt machine``: show the measured roofs of this machine, its threads, and the noise now.

The roofs are the rates of FMAs, of float32 and of bf16, and the bandwidth of each level of memory. They are measured
once, and kept. T* is the number of tokens a step below which memory binds it.

Examples::

    cpuopt machine
    cpuopt machine --again --threads 1
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..train import settings
from .common import Parser, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option("--again", "Measure again, and replace the kept figures.", False)
    settings.flags(p, "threads")
    p.shared("--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..files.reading import to_json
    from ..kernels.toolkit.micro.amx import proved
    from ..kernels.toolkit.threads import start, threading_layer
    from ..machine import describe
    from ..measure import rates as machine
    from ..measure.schemes import SCHEMES
    from ..report import console
    from ..report.machine import tables

    noise = machine.noise()
    counts = [args.threads] if args.threads else machine.default_counts()
    known = machine.stored()
    missing = [n for n in counts if args.again or n not in known]
    with console.saying() as say:
        if missing:
            if args.threads and 1 not in missing:
                missing = [1, *missing]  # several threads should be faster than one: `rates.poor` compares
            known = machine.store(machine.Measurement(say=say).run(missing))
    start(max(counts))  # so that their layer is known where the roofs were
    lacks = machine.lacks(known)
    for warning in lacks:
        console.warn(warning)
    content = to_json(
        {
            "id": machine.machine_id(),
            "machine": describe(),
            "threading_layer": threading_layer(),
            "amx": asdict(found) if (found := proved()) else None,
            "roofs": {str(n): known[n] for n in sorted(known)},
            "schemes": [
                {"name": s.name, "moved_bytes": s.moved, "tokens": {str(n): s.tokens(known[n]) for n in sorted(known)}}
                for s in SCHEMES
            ],
            "lacks": lacks,
            "noise": noise,
            "measured_now": missing,
            "file": str(machine.file()) if machine.stored() == known else None,
        }
    )
    show(args, content, lambda: tables(content))
    return 0
