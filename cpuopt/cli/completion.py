"""``cpuopt --completion``: the script by which a shell completes a command."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..errors import UserError, optional
from .common import complain

PATHS = re.compile(r"FILE|PATH|DIR$|DATA|SOURCE|TARGET|\.bin")
"""What a flag that takes a path calls its value."""


class Completion(argparse.Action):
    """Print the script for a shell, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, shell: Any, flag: Any = None) -> None:
        """Describe the parser, its verbs and their flags to `shtab`, which writes the script."""
        try:
            shtab = optional("shtab", "--completion", "completion")
        except UserError as e:
            complain(str(e))
            parser.exit(2)
        from .. import models, ops

        words = {"OP": [*ops.ALL], "MODEL": models.preset_names()}
        parsers = [parser]
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
        print(shtab.complete(parser, shell))
        parser.exit()
