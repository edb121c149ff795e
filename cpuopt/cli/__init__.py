"""The command line: a module for each verb; numba is imported only by the verb that needs it."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from .. import __version__
from ..errors import UserError
from ..wording import nearest, one_line, plain

DESCRIPTION = "A CPU performance laboratory for LLM training: train, profile, and swap one kernel at a time."
VERBS = (
    *("train", "profile", "scale", "bench", "generate", "eval", "program", "kernels"),
    *("check", "ab", "inspect", "new-kernel", "lab", "tune", "ad", "machine", "runs", "history"),
    *("convert", "verify", "data", "warmup"),
)
"""The verbs in the order of ``cpuopt -h``. The module of a verb has ``flags(parser)`` and ``run(args)``; its help is
the first line of its docstring."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cpuopt: {plain(message)}; see '{self.prog} -h'\n")

    def format_help(self) -> str:
        """Return the help; where there is a ``--model``, the presets stand at its end."""
        if "--model" in self._option_string_actions:
            from .. import models

            self.epilog = f"presets of --model: {', '.join(models.preset_names())}"
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cpuopt", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cpuopt {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    for name in VERBS:
        verb = import_module(f".{name.replace('-', '_')}", __name__)
        help_ = (verb.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")
        p = verbs.add_parser(name, help=help_, description=f"{help_[:1].upper()}{help_[1:]}.")
        verb.flags(p)
        p.set_defaults(run_verb=verb.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM."""
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        print(f"cpuopt: {plain(repr(words[0])[:80])}: no such verb; {nearest(words[0], VERBS)}", file=sys.stderr)
        return 2
    args = _parser().parse_args(argv)
    args.command = [*(sys.argv[1:] if argv is None else argv)]
    warnings.formatwarning = lambda message, *more: f"warning: {one_line(str(message))}\n"  # without a line of source
    try:
        return int(args.run_verb(args) or 0)
    except UserError as e:
        print(f"cpuopt: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cpuopt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
