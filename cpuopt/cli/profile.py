"""``cpuopt profile``: show the time of each op and layer of a training step.

A table by op has times, rates and shares of the machine's roofs; a second one has the layers. Every kernel is checked
before a time is printed. The record stays in runs/. With --program, the traced program is printed and nothing is timed:
a line is a call with its layer, op and arguments, the variant that runs it, and where in memory it writes.

Examples::

    cpuopt profile --model gpt2-tiny --html report.html
    cpuopt profile --swap 'gelu_forward@h.0.*=vanilla' --detail
    cpuopt profile --lines matmul_update
    cpuopt profile --model gpt2-tiny --program backward
"""

from __future__ import annotations

import argparse
import os
from math import inf

from ..comm import Comm
from ..comm.agree import Agreement
from ..errors import UserError
from ..machine import beside_others
from ..measure.lines import LINES_S, MOST_STEPS, SMALL
from ..measure.quartile import ENOUGH_S, LEAST, MOST
from ..train import settings
from . import common, ranks
from .common import Parser, settings_of, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    settings.flags(p, *(n for n in settings.JOB if n != "steps"), *settings.KERNELS, *settings.SHARING)
    p.option(
        "--steps",
        f"Run and time this many steps. Default: as many as take {ENOUGH_S:g} s, {LEAST} to {MOST}; several ranks "
        f"{MOST}.",
        metavar="N",
        type=int,
    )
    ranks.flags(p)
    p.option("--warmup", "Run this many steps first, which are not counted.", 1)
    p.option("--detail", "Print a row for every op of every layer.", False)
    p.option(
        "--lines",
        "Sample the threads, and show which lines of source take the time of this op, or of a family such as "
        f"matmul. Without OP: of every op with {SMALL:g} %% or more. Steps then take {LINES_S:g} s by default.",
        metavar="OP",
        nargs="?",
        const="*",
    )
    p.option(
        "--program",
        "Print the program and the memory plan, and time nothing; or a part: forward computes the loss, evaluate what "
        "only an evaluation needs, backward the gradients, reduce their sum over ranks, update the weights.",
        metavar="PART",
        nargs="?",
        const="all",
        choices=("forward", "evaluate", "backward", "reduce", "update", "all"),
    )
    p.shared("--runs", "--json", "--html", "--trace")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    return _program(args) if args.program else ranks.run(args, lambda rank: _profile(args, rank))


def _program(args: argparse.Namespace) -> int:
    """Print the program of the first rank."""
    if given := [f"--{name}" for name in ("html", "trace", "lines") if getattr(args, name)]:
        raise UserError(f"--program with {given[0]}: nothing is timed; give one of the two")
    start_numba(args.threads)
    from ..report import console
    from ..train.job import build_only

    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks {args.ranks}: expected 1 or more")
    args.steps, comm = args.steps or 1, Comm()
    comm.size, comm.name = args.ranks or 1, "messages"
    built = build_only(ranks.shared(settings_of(args), comm.size)[0], comm)
    for note in built.notes:
        console.note(note)
    program, chosen, plan = built.program, built.kernels, built.plan()
    phases = {"all": (), "update": ("norm", "update")}.get(args.program, (args.program,))
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


def _profile(args: argparse.Namespace, rank: ranks.Rank) -> int:
    """Profile this rank; the first one shows its own times."""
    comm = rank.comm
    args.threads = args.threads or (rank.place.threads if rank.place else None)
    start_numba(args.threads)
    from ..kernels.compile.sampling import unavailable
    from ..kernels.toolkit import regions
    from ..measure import rates as machine
    from ..profiler import profile
    from ..report import console, html, tables
    from ..train.job import prepare

    with Agreement(comm) as agreement:
        enough_s = ENOUGH_S if args.lines is None else LINES_S
        enough_s = enough_s if args.steps is None and comm.size == 1 else inf
        args.steps = (MOST if args.lines is None else MOST_STEPS) if args.steps is None else args.steps
        asked, _ = ranks.shared(settings_of(args, run="profile"), comm.size)
        if args.warmup < 0:
            raise UserError(f"--warmup {args.warmup}: expected 0 or more")
        if args.lines and (why := unavailable()):
            raise UserError(f"--lines: {why}")
        if not comm.rank:
            common.check_targets(args)
        agreement.settle(ranks.facts(asked, [*settings.FLAGS]))
    watched = regions.watch()  # before any kernel is loaded
    with console.compiling() as progress, Agreement(comm) as agreement:
        job = prepare(asked, progress, comm=comm, agreed=agreement.settle)
    if comm.rank:
        profile(job, warmup=args.warmup)
        return 0
    with console.saying() as say:
        roofs = machine.roofs(job.engine.threads, say)
    if layer := machine.slow_layer():
        console.warn(layer)
    if roofs.doubts:
        console.warn(f"the roofs may be too low: {'; '.join(roofs.doubts)}. When it is quiet: cpuopt machine --again")
    for note in job.engine.notes:
        console.note(note)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > common.cores() and comm.size == 1:
        others = "other processes make these times too long"
        console.warn(f"load average {busy:.1f} on {common.cores()} cores: {others}; {beside_others()}")
    with console.counting("steps", args.steps + args.warmup) as tick:
        more = {"tick": tick, "roofs": roofs, "regions": watched, "enough_s": enough_s, "lines": args.lines}
        report = profile(job, warmup=args.warmup, **more)
    show(args, report, lambda: tables.profile_tables(report, detail=args.detail))
    common.keep(args.runs, "profile", report.model, {"profile": report})
    common.write_trace(args, report)
    if args.html:
        html.write_report(args.html, report, job.engine)
    return 0
