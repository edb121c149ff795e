"""The command line: a module for each verb; numba is imported only by the verb that needs it."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module

from .. import __version__
from ..check.result import exit_status
from ..errors import RefusedError, UserError
from ..wording import nearest, one_line, plain
from .common import Parser, complain
from .completion import Completion

DESCRIPTION = "A CPU performance laboratory for LLM training: train, profile, and swap one kernel at a time."
GROUPS = {
    "measure a training step": ("profile", "scale", "bench", "machine", "runs"),
    "write a kernel": ("kernels", "new-kernel", "check", "ab", "gate", "sweep", "lab", "inspect", "tune", "judge"),
    "train a model": ("train", "data", "generate", "eval", "convert"),
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
"""The verbs in the order of ``cpuopt -h``. The module of a verb has ``flags(parser)`` and ``run(args)``. Its docstring
is the help: the first line for ``cpuopt -h``, then a description, then examples, each an indented line."""
MOVED = {
    "ad": "is now 'cpuopt new-kernel OP --backward'; --against is 'cpuopt ab OP_backward VARIANT generated'",
    "completion": "is now 'cpuopt --completion SHELL'",
    "history": "is now 'cpuopt runs history'",
    "mcp": "is now 'cpuopt judge --mcp'",
    "program": "is now 'cpuopt profile --program'",
    "verdicts": "was removed; 'cpuopt ab OP A A' compares a kernel with itself",
    "verify": "was removed; 'cpuopt eval' measures a model, and the tests hold llm.c's own test",
    "warmup": "is now 'cpuopt kernels --compile'",
}
"""What verbs of earlier versions answer."""


def _parser() -> tuple[Parser, Mapping[str, Parser]]:
    """Make the parser, and those of the verbs."""
    parser = Parser(
        prog="cpuopt",
        usage="cpuopt [-h] [-V] [--completion SHELL] VERB ...",
        description=DESCRIPTION,
        epilog="'cpuopt VERB -h' has the flags of a verb and examples.",
    )
    parser.add_argument(
        "-V", "--version", action="version", version=f"cpuopt {__version__}", help="Show the version and exit."
    )
    parser.add_argument(
        "--completion",
        action=Completion,
        metavar="SHELL",
        choices=("bash", "zsh"),
        help="Print the script by which this shell, bash or zsh, completes verbs, flags, ops, presets and paths. bash "
        "reads it from ~/.local/share/bash-completion/completions/cpuopt, zsh from a file _cpuopt in $fpath.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, help=argparse.SUPPRESS, prog="cpuopt")
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            verb = import_module(f".{name.replace('-', '_')}", __name__)
            first, _, more = (verb.__doc__ or "").partition("\n")
            help_ = first.partition(": ")[2].rstrip(".")
            about, _, examples = more.strip("\n").partition("Examples::\n\n")
            p = verbs.add_parser(
                name,
                help=help_,
                description=f"{help_[:1].upper()}{help_[1:]}.\n\n{about}",
                epilog=f"examples:\n\n{examples.rstrip()}" if examples else None,
            )
            group._group_actions.append(verbs._choices_actions[-1])  # shown, not parsed
            verb.flags(p)
            p.set_defaults(run_verb=verb.run)
    return parser, verbs.choices


def _is_somewhere() -> bool:
    """Return whether the working directory is still there; paths, and the processes to start, begin in it."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, or show the help; return the exit status, of which `docs/lab.md` has the table."""
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        complain(
            f"{words[0]} {MOVED[words[0]]}"
            if words[0] in MOVED
            else f"{plain(repr(words[0])[:80])}: no such verb; {nearest(words[0], VERBS)}"
        )
        return 2
    parser, verbs = _parser()
    if not words:
        parser.print_help()
        return 0
    args, left = parser.parse_known_args(argv)
    if left:
        verbs[args.verb].unknown(left)
    if not _is_somewhere():
        complain("the working directory was removed; change to one that is there")
        return 2
    args.command = [*(sys.argv[1:] if argv is None else argv)]
    warnings.formatwarning = lambda message, *more: f"warning: {one_line(str(message))}\n"  # without a line of source
    try:
        return int(args.run_verb(args) or 0)
    except RefusedError as e:
        if getattr(args, "json", False):
            print(json.dumps(e.to_json()), flush=True)
        complain(str(e))
        return exit_status([e.word])
    except UserError as e:
        complain(str(e))
        return 2
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except MemoryError as e:
        complain(f"out of memory{': ' * bool(str(e))}{one_line(str(e))}")
        return 1
    except OSError as e:
        if e.errno == errno.ENOENT and "usable temporary directory" in str(e):
            complain("no directory for temporary files can be written; set TMPDIR to another")
            return 2
        if e.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        if e.errno != errno.EPIPE:
            complain(f"cannot write {e.filename or 'the output'}: {e.strerror}")
        return 1
