"""``cpuopt lab``: check, compare, place under the roof and inspect a file of kernels on each save.

Each round checks every kernel of the file, compares it with the best variant alone and in training steps, and reads its
machine code. Ctrl-C ends it.

Examples::

    cpuopt lab mygelu.py
    cpuopt lab mygelu.py --once --no-step --threads 1
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .. import models
from ..check.result import exit_status
from ..errors import UserError
from ..train import settings
from . import common
from .common import Parser, start_numba

if TYPE_CHECKING:
    from ..lab.rounds import KernelRow, RoundPlan, RoundView
    from ..measure.roofline import Roofs
    from ..report.lab import Screen


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option(
        "file", "Watch this file with @kernel functions; 'cpuopt new-kernel' writes one.", metavar="FILE.py", type=Path
    )
    p.option("--against", "Compare with this variant. Default: optimized, else vanilla.", "", "VARIANT")
    settings.flags(p, "B", "T", "threads", model=models.DEFAULT)
    p.option("--no-step", "Compare alone only, without training steps.", False)
    p.shared("--sizes")
    p.shared("--rounds", default=24)
    p.shared("--limit", default=120)
    p.shared("--runs")
    p.option("--once", "Do one round without waiting for a save, and exit with its status.", False)
    p.option("--json", "Print one JSON object in place of text; this needs --once.", False)


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    start_numba(args.threads)
    from .. import kernels
    from ..isolate.process import ended_by_sigterm
    from ..lab import rounds
    from ..measure import rates as machine
    from ..measure.comparison import analyses_up_to
    from ..report import console
    from ..report.lab import Screen

    if args.file.is_dir():
        raise UserError(f"lab {args.file}: a directory; expected a Python file of kernels")
    if not args.file.is_file():
        raise UserError(f"lab {args.file}: no such file; 'cpuopt new-kernel OP --out {args.file}' writes one")
    if args.json and not args.once:
        raise UserError("--json: only a single round can be one JSON object; add --once")
    analyses_up_to(args.rounds)
    threads = args.threads or common.cores()
    sizes = tuple(common.sizes_by_symbol(args.sizes)) if args.sizes else ()
    if len(sizes) > 1:
        raise UserError(f"--sizes {args.sizes!r}: a round is at one size; 'cpuopt ab' compares at several")
    size = args.model, args.B, args.T, threads, sizes
    plan = rounds.RoundPlan(args.file, *size, args.against, not args.no_step, args.rounds, args.limit)
    kernels.load_all([])
    if args.against:
        rounds.require_against(plan)
    with console.saying() as say:
        roofs = machine.roofs(threads, say)
    if args.once:
        screen = Screen(plan, live=False, quiet=args.json)
        rows = rounds.work(plan, roofs, screen)
        path = keep(args.runs, plan, rows)
        if args.json:
            results = [{"op": r.op, "variant": r.variant, "bad": r.bad, "said": r.said, **r.found} for r in rows]
            print(json.dumps({"kernels": results, "path": path}))
        return exit_status(r.found.get("verdict", "") for r in rows) or 2 * any(r.bad for r in rows)
    with ended_by_sigterm(), Screen(plan) as screen, suppress(KeyboardInterrupt):
        follow(plan, roofs, screen, args.runs)
    return 0


def keep(root: Path, plan: RoundPlan, rows: Sequence[KernelRow]) -> str | None:
    """Keep the record of a round that was not ended by the next save; return its folder."""
    from ..lab import rounds

    return common.keep(root, "lab", plan.file.stem, rounds.record(plan, rows)) if rounds.whole(rows) else None


def follow(plan: RoundPlan, roofs: Roofs, screen: Screen, root: Path) -> None:
    """Do a round now and after each save, of the file or of one that it imports from beside it.

    A save during a round ends it and begins the next. A round that ends keeps its record in `root`.
    """
    from watchfiles import watch

    from ..isolate.child import Child
    from ..lab import rounds
    from ..lab.worker import started

    def begin() -> Child:
        child = started([str(plan.file)], plan.threads, plan.limit_s)
        view = screen.begin()  # from now on no earlier round is shown
        threading.Thread(target=work, args=(view, child), daemon=True).start()
        return child

    def work(view: RoundView, child: Child) -> None:
        try:
            keep(root, plan, rounds.work(plan, roofs, view, child))
        except UserError as e:
            if not child.ended:
                view.problem(str(e))

    text, child = read(plan.file), begin()
    try:
        for changes in watch(plan.file.parent.resolve(), recursive=False, rust_timeout=1000, yield_on_timeout=True):
            before, text = text, read(plan.file)
            followed = {plan.file.name, *(Path(file).name for file in child.files)}
            saved = any(Path(path).name in followed for _, path in changes)
            if text is None and before is not None:
                child.end()
                screen.begin().problem(f"{plan.file} is gone")
            elif text is not None and (saved or text != before):
                child.end()  # code of the earlier text ends with its process
                child = begin()
    finally:
        child.end()


def read(path: Path) -> bytes | None:
    """Read a file; None if it is missing, as it is for a moment while some editors save."""
    try:
        return path.read_bytes()
    except OSError:
        return None
