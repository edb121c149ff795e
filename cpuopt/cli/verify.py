"""``cpuopt verify``: compare with an llm.c debug state, as ``test_gpt2.c`` does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UserError
from . import common
from .common import kernel_flags, start_numba

HELP = "compare logits, loss, gradients and ten losses with an llm.c debug state"


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("state", type=Path, help="gpt2_124M_debug_state.bin, or one of your own")
    p.add_argument("--init", type=Path, metavar="MODEL.bin", help="its model (the file of that name beside it)")
    p.add_argument("--losses", metavar="X,...", help="expected of ten steps (those of llm.c's 124M state are known)")
    kernel_flags(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from .. import kernels
    from ..files.reading import to_json
    from ..report import console
    from ..train.job import Settings
    from ..train.verify import model_beside, verify
    from ..weights import llmc

    try:
        losses = [float(x) for x in args.losses.split(",")] if args.losses else []
    except ValueError as e:
        raise UserError(f"--losses {args.losses!r}: expected numbers with commas between") from e
    model = llmc.open_model(args.init or model_beside(args.state))
    state = llmc.open_state(args.state, model)
    kernels.load_all(args.kernels)
    settings = Settings(
        variant=args.variant,
        swap=tuple(args.swap),
        kernels=tuple(args.kernels),
        threads=args.threads,
        processes=common.cores(),
    )
    with console.compiling() as progress:
        rows = list(verify(state, model, settings, losses, progress))
    if args.json:
        print(json.dumps(to_json({"rows": rows, "passed": all(r.passed for r in rows)})))
    else:
        console.verify_table(rows)
    return 0 if all(r.passed for r in rows) else 1
