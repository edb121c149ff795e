"""``cpuopt completion``: print the script by which a shell completes verbs, flags, ops, presets and paths.

It needs the extra ``completion``: pip install 'cpuopt[completion]'. For bash, write the output to
~/.local/share/bash-completion/completions/cpuopt; for zsh, to a file _cpuopt in a directory of $fpath.

Examples::

    cpuopt completion bash
    cpuopt completion zsh
"""

from __future__ import annotations

import argparse
import re

from ..errors import UserError

SHELLS = ("bash", "zsh")
PATHS = re.compile(r"FILE|PATH|DIR$|DATA|SOURCE|TARGET|\.bin")
"""What a flag that takes a path calls its value."""


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("shell", choices=SHELLS, metavar="SHELL", help="Print the script for this shell, bash or zsh.")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    try:
        import shtab
    except ImportError:
        raise UserError(
            "completion: its library is not installed; pip install 'cpuopt[completion]' (in a clone: pip install -e "
            "'.[completion]')"
        ) from None
    from .. import models, ops
    from . import _parser

    words = {"OP": [*ops.ALL], "MODEL": models.preset_names()}
    parsers: list[argparse.ArgumentParser] = [_parser()[0]]
    for p in parsers:
        for action in p._actions:
            of = "MODEL" if action.dest == "model" else str(action.metavar or action.dest.upper())
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
                action.help = ""  # what help hides would not be completed
            elif of in words:
                action.choices = words[of]
            elif PATHS.search(of):
                action.complete = shtab.DIRECTORY if of == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parsers[0], args.shell))
    return 0
