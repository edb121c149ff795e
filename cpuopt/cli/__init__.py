"""The command line: a module for each verb; numba is imported only by the verb that needs it."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from .. import __version__
from ..check.result import exit_status
from ..errors import RefusedError, UserError
from ..wording import guess, nearest, one_line, plain

DESCRIPTION = "A CPU performance laboratory for LLM training: train, profile, and swap one kernel at a time."
GROUPS = {
    "measure a training step": ("profile", "scale", "bench", "program", "machine", "runs"),
    "write a kernel": ("kernels", "new-kernel", "check", "ab", "gate", "sweep", "lab", "inspect", "tune", "judge"),
    "train a model": ("train", "data", "generate", "eval", "convert"),
    "set up a shell": ("completion",),
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
"""The verbs in the order of ``cpuopt -h``. The module of a verb has ``flags(parser)`` and ``run(args)``. Its docstring
is the help: the first line for ``cpuopt -h``, then a description, then examples, each an indented line."""
MOVED = {
    "ad": "is now 'cpuopt new-kernel OP --backward'; --against is 'cpuopt ab OP_backward VARIANT generated'",
    "history": "is now 'cpuopt runs history'",
    "mcp": "is now 'cpuopt judge --mcp'",
    "verdicts": "was removed; 'cpuopt ab OP A A' compares a kernel with itself",
    "verify": "was removed; 'cpuopt eval' measures a model, and the tests hold llm.c's own test",
    "warmup": "is now 'cpuopt kernels --compile'",
}
"""What verbs of earlier versions answer."""


class _Help(argparse.HelpFormatter):
    """Help whose paragraphs are filled to the width of the terminal, and whose indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (
            part if part.startswith(" ") else super(_Help, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )
        return "\n\n".join(parts)


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line, and guesses what was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Help, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def error(self, message: str) -> NoReturn:
        """Refuse the flags; of a list of choices, name the nearest one."""
        if choice := re.search(r"(.*)invalid choice: '(.*)' \(choose from (.*)\)", message, re.S):
            known = re.findall(r"[\w.-]+", choice[3])
            message = f"{choice[1]}{choice[2]!r} is none of {', '.join(known)}{guess(choice[2], known)}"
        self.exit(2, _fitted(f"cpuopt: {plain(message)}; see '{self.prog} -h'") + "\n")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Refuse what no flag takes."""
        word = next((w for w in words if w.startswith("-")), words[0])
        parts = [p for a in self._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
        known = [flag for p in (self, *parts) for flag in p._option_string_actions]
        self.error(f"unrecognized argument {word!r}{guess(word.partition('=')[0], known)}")

    def format_help(self) -> str:
        """Return the help; if there is a ``--model``, the presets stand at its end."""
        shown = super().format_help()
        if "--model" in self._option_string_actions:
            from .. import models

            formatter = self._get_formatter()
            formatter.add_text(f"presets of --model: {', '.join(models.preset_names())}")
            shown += f"\n{formatter.format_help()}"
        return shown


def _fitted(message: str) -> str:
    """Return a message for stderr, whose lines end between words if that is a terminal."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in message.splitlines()
    )


def _parser() -> tuple[_Parser, Mapping[str, _Parser]]:
    """Make the parser, and those of the verbs."""
    parser = _Parser(
        prog="cpuopt",
        usage="cpuopt [-h] [-V] VERB ...",
        description=DESCRIPTION,
        epilog="'cpuopt VERB -h' has the flags of a verb and examples.",
    )
    parser.add_argument(
        "-V", "--version", action="version", version=f"cpuopt {__version__}", help="Show the version and exit."
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
        if words[0] in MOVED:
            print(_fitted(f"cpuopt {words[0]} {MOVED[words[0]]}"), file=sys.stderr)
            return 2
        refused = f"cpuopt: {plain(repr(words[0])[:80])}: no such verb; {nearest(words[0], VERBS)}"
        print(_fitted(refused), file=sys.stderr)
        return 2
    parser, verbs = _parser()
    if not words:
        parser.print_help()
        return 0
    args, left = parser.parse_known_args(argv)
    if left:
        verbs[args.verb].unknown(left)
    if not _is_somewhere():
        print("cpuopt: the working directory was removed; change to one that is there", file=sys.stderr)
        return 2
    args.command = [*(sys.argv[1:] if argv is None else argv)]
    warnings.formatwarning = lambda message, *more: f"warning: {one_line(str(message))}\n"  # without a line of source
    try:
        return int(args.run_verb(args) or 0)
    except RefusedError as e:
        if getattr(args, "json", False):
            print(json.dumps(e.to_json()), flush=True)
        print(_fitted(f"cpuopt: {e}"), file=sys.stderr)
        return exit_status([e.word])
    except UserError as e:
        print(_fitted(f"cpuopt: {e}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cpuopt: interrupted", file=sys.stderr)
        return 130
    except MemoryError as e:
        print(_fitted(f"cpuopt: out of memory{': ' * bool(str(e))}{one_line(str(e))}"), file=sys.stderr)
        return 1
    except OSError as e:
        if e.errno == errno.ENOENT and "usable temporary directory" in str(e):
            print("cpuopt: no directory for temporary files can be written; set TMPDIR to another", file=sys.stderr)
            return 2
        if e.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        if e.errno != errno.EPIPE:
            print(f"cpuopt: cannot write {e.filename or 'the output'}: {e.strerror}", file=sys.stderr)
        return 1
