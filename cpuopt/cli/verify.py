"""``cpuopt verify``: compare logits, loss, gradients and ten losses with an llm.c debug state.

The debug state holds what llm.c's PyTorch script computed; every row must be within its allowed difference.

Examples::

    cpuopt verify gpt2_124M_debug_state.bin
    cpuopt verify gpt2_124M_debug_state.bin --variant vanilla --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UserError
from ..train import settings
from .common import cores, settings_of, shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("state", type=Path, help="Read this debug state of llm.c, X_debug_state.bin.")
    p.add_argument(
        "--init",
        type=Path,
        metavar="MODEL.bin",
        help="Read the model of the debug state from here. Default: X.bin in the same folder.",
    )
    p.add_argument(
        "--losses", metavar="X,...", help="Expect these losses of ten steps. Default: those of llm.c's 124M state."
    )
    settings.flags(p, *settings.KERNELS)
    shared(p, "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from ..check.gate import load_files
    from ..report import console
    from ..train.verify import model_beside, verify
    from ..weights import llmc

    try:
        losses = [float(x) for x in args.losses.split(",")] if args.losses else []
    except ValueError as e:
        raise UserError(f"--losses {args.losses!r}: expected numbers with commas between") from e
    model = llmc.open_model(args.init or model_beside(args.state))
    state = llmc.open_state(args.state, model)
    load_files(args.kernels, args.threads or cores())
    with console.compiling() as progress:
        rows = list(verify(state, model, settings_of(args), losses, progress))
    passed = all(r.passed for r in rows)
    show(args, {"rows": rows, "passed": passed}, lambda: console.verify_table(rows))
    return 0 if passed else 1
