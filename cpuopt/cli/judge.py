"""``cpuopt judge``: check and time an untrusted kernel.

The text is held against a whitelist and compiled in a sandbox; it is never imported here. What it computes is
compared with the float64 reference on public and private cases, then timed beside the fastest kernel of the package.

Examples::

    cpuopt judge mygelu.py --op gelu_forward
    cpuopt judge mygelu.py --op gelu_forward --check --json
    cpuopt judge --tasks
    cpuopt judge --board gelu_forward --adopt fast
    cpuopt judge --tasks --html boards.html
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .. import models
from ..check.result import exit_status
from ..errors import UserError
from ..train import settings
from . import common
from .common import Parser, show, start_numba


def flags(p: Parser) -> None:
    """Add the verb's flags."""
    p.option("file", "Read the candidate from this file.", metavar="FILE", nargs="?")
    p.option("--op", "Use the candidate for this op.", "", "OP", dest="of")
    p.option("--check", "Check only; time nothing, and keep nothing.", False)
    p.option("--serve", "Answer requests from stdin, a JSON object on each line.", False)
    p.option("--mcp", "Answer requests of the Model Context Protocol; needs pip install 'cpuopt[mcp]'.", False)
    p.option("--tasks", "List the ops that candidates can be written for.", False)
    p.option("--time", "Add the package's times and the roof's to --tasks; takes minutes.", False)
    p.option("--in-step", "Compare in training steps of the model too.", False)
    p.option("--board", "List the best submissions for this op and these sizes.", "", "OP")
    p.option("--adopt", "Write the best of --board to a file, as this variant.", "", "NAME")
    settings.flags(p, "kernels", "threads", model=models.DEFAULT)
    p.option("-B", "Compare at a batch of this many rows.", 4)
    p.option("-T", "Compare at rows of this many tokens.", 64)
    p.shared("--runs", "--json", "--html")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    asked = [name for name in ("file", "serve", "mcp", "tasks", "board") if getattr(args, name)]
    if len(asked) != 1:
        given = " and ".join(asked) or "nothing"
        raise UserError(f"judge: {given} given; expected one of FILE, --serve, --mcp, --tasks and --board")
    if args.adopt and not args.board:
        raise UserError(f"--adopt {args.adopt}: add --board OP, whose best it takes")
    if args.file and not args.of:
        raise UserError(f"judge {args.file}: add --op OP; 'cpuopt judge --tasks' lists all")
    if args.time and not args.tasks:
        raise UserError("--time: add --tasks, whose kernels it times; a FILE is timed without it")
    if args.in_step and (args.check or not args.file):
        raise UserError("--in-step: needs a FILE that is timed, without --check")
    if args.html and not (args.tasks or args.board):
        raise UserError(f"--html {args.html}: add --board OP for its board, or --tasks for the boards of all")
    common.check_targets(args)
    if args.mcp:
        from . import mcp

        return mcp.run(args)
    text, sizes = text_of(args.file) if args.file else "", (args.model, args.B, args.T)
    start_numba(args.threads)
    from .. import kernels, ops  # noqa: F401  (registers them)
    from ..files import write_text
    from ..judge.desk import Desk, answer
    from ..lab.ab import op_named
    from ..report import console
    from ..report import judge as report
    from ..report.html import board as page

    with console.saying() as say, Desk(args.runs, args.threads, say, args.kernels, [args.model]) as desk:
        for op in filter(None, (args.of, args.board)):
            op_named(op)
        if args.serve:
            for line in sys.stdin.buffer if sys.stdin else ():
                print(json.dumps(answer(desk, line), allow_nan=False), flush=True)
            return 0
        if args.file and args.check:
            found = desk.check(text, args.of)
        elif args.file:
            found = desk.submit(text, args.of, *sizes, args.in_step)
        elif args.tasks:
            found = desk.tasks(args.time, *sizes)
        else:
            found = desk.adopt(args.board, args.adopt, *sizes) if args.adopt else desk.board(args.board, *sizes)
        if args.html:
            boards = [desk.board(op, *sizes) for op in ([args.board] if args.board else ops.ALL)]
            write_text(args.html, page.report(boards))
    show(args, found, lambda: report.tables(found))
    return exit_status([found.get("verdict", "")])


def text_of(file: str) -> str:
    """Read a candidate's text.

    Raises
    ------
    UserError
        For a file that is missing, or no text.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        said = getattr(e, "strerror", None) or "it is not UTF-8"
        raise UserError(f"judge {file}: {said}; expected the text of a kernel, a Python file") from e
