"""Shared parts of the verbs: flags, the start of numba, and the display of results."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UserError
from ..files.reading import to_json
from ..machine import ORDER, ORDERS, require_usable, waiting
from ..machine import cores as cores
from ..train.settings import BASES, FLAGS, MOST_THREADS, Settings
from ..wording import guess, nearest, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..measure.profile import Profile

LAYERS = ("default", "safe", "threadsafe", "forksafe", "omp", "tbb", "workqueue")
"""The names of numba's threading layers."""


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    if not (found := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of seconds")
    return found


SHARED: Mapping[str, Mapping[str, Any]] = {
    "op": {"metavar": "OP", "help": "Use this op, as 'cpuopt kernels' lists it."},
    "--sizes": {"default": "", "metavar": "SYMBOL=N,...", "help": "Set sizes of the op by symbol, as in N=4096."},
    "--rounds": {"help": "Run at most this many rounds of a comparison."},
    "--limit": {"type": seconds, "metavar": "S", "help": "Stop one comparison or check after this many seconds."},
    "--seed": {"default": 0, "help": "Draw inputs and the order of trials from this random seed."},
    "--threads": {"default": "", "metavar": "N,..."},
    "--detail": {"default": False},
    "--adapter": {
        "type": Path,
        "default": [],
        "metavar": "DIR",
        "help": "Add the LoRA adapter in this directory to the weights of --init; the flag repeats.",
    },
    "--base": {
        "dest": "blocks",
        "default": "",
        "choices": BASES[1:],
        "help": "Store the weights of linear layers in blocks in int8: w8a8 multiplies them with activations in int8, "
        "int8 and q8_0 turn them into numbers first.",
    },
    "--runs": {"type": Path, "default": Path("runs"), "metavar": "DIR", "help": "Keep records in this folder."},
    "--html": {"type": Path, "metavar": "FILE", "help": "Write an HTML report to this file."},
    "--svg": {"type": Path, "metavar": "FILE", "help": "Write the picture to this file."},
    "--csv": {"type": Path, "metavar": "FILE", "help": "Write the figures to this file, as comma-separated values."},
    "--trace": {"type": Path, "metavar": "FILE", "help": "Write a trace of the last ten steps, for ui.perfetto.dev."},
    "--json": {"default": False, "help": "Print one JSON object in place of text."},
}
"""Flags that mean the same for every verb."""
FILES = ("trace", "html", "svg", "csv", "out", "markdown")
"""Flags that name a file to write at the end."""


def complain(message: str) -> None:
    """Print an error on stderr; if that is a terminal, its lines end between words."""
    message = f"cpuopt: {message}"
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        message = textwrap.fill(message, columns, break_long_words=False, break_on_hyphens=False)
    print(message, file=sys.stderr, flush=True)


class _Help(argparse.HelpFormatter):
    """Help whose paragraphs are filled to the width of the terminal, and whose indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (
            part if part.startswith(" ") else super(_Help, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )
        return "\n\n".join(parts)


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line, and guesses what was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Help, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def option(self, name: str, help: str, default: Any = None, metavar: str | None = None, **more: Any) -> None:
        """Add a flag, or a word without dashes: its kind follows from its default, which its help names.

        Parameters
        ----------
        default : False is that of a switch, and a list that of a flag that repeats.
        """
        if default is False:
            more["action"] = "store_true"
        else:
            more = {"metavar": metavar, "type": type(default) if isinstance(default, int | float) else None, **more}
            if isinstance(default, list):
                more["action"] = "append"
        shown = default is not False and default not in (None, "", [])
        more["help"] = f"{help} Default: %(default)s." if shown and "Default: " not in help else help
        self.add_argument(name, default=default, **more)

    def shared(self, *names: str, **more: Any) -> None:
        """Add flags that several verbs have; `more` changes the flag where only one is named."""
        for name in names:
            self.option(name, **{**SHARED[name], **more})

    def error(self, message: str) -> NoReturn:
        """Refuse the flags; of a list of choices, name the nearest one."""
        if choice := re.search(r"(.*)invalid choice: '(.*)' \(choose from (.*)\)", message, re.S):
            known = re.findall(r"[\w.-]+", choice[3])
            message = f"{choice[1]}{choice[2]!r} is none of {', '.join(known)}{guess(choice[2], known)}"
        complain(f"{plain(message)}; see '{self.prog} -h'")
        self.exit(2)

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


def picked(source: object, *names: str) -> dict[str, Any]:
    """Return some attributes of flags or of a plan, by name."""
    return {name: getattr(source, name) for name in names}


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a job that the flags of a verb give."""
    return {n: tuple(x) if isinstance(x, list) else x for n, x in vars(args).items() if n in FLAGS}


def settings_of(args: argparse.Namespace, **more: Any) -> Settings:
    """Build the settings of a job from the flags of a verb."""
    return Settings(**given(args) | {"processes": cores()} | more)


def known_op(verb: str, name: str, more: Iterable[str] = ()) -> str:
    """Return the name of an op; raise `UserError` if neither the package nor `more` has it."""
    from .. import ops

    known = dict.fromkeys([*ops.ALL, *more])
    if name not in known:
        raise UserError(f"{verb} {name!r}: no such op; {nearest(name, known)}; 'cpuopt kernels' lists all")
    return name


def sizes_by_symbol(text: str) -> list[dict[str, int]]:
    """Read ``N=4096``, or several as in ``B=4 T=64,B=16 T=64``: a symbol that has a size already begins the next.

    Raises
    ------
    UserError
        For anything else.
    """
    found: list[dict[str, int]] = []
    for word in text.replace(",", " ").split():
        size = re.fullmatch(r"([A-Za-z_]\w*)=([1-9][0-9]{0,11})", word)
        if not size:
            raise UserError(f"--sizes {text!r}: {word!r} is no size; expected SYMBOL=NUMBER, as in 'BT=256 C=768'")
        if not found or size[1] in found[-1]:
            found.append({})
        found[-1][size[1]] = int(size[2])
    if len({frozenset(sizes) for sizes in found}) != 1:
        raise UserError(f"--sizes {text!r}: expected the same symbols in each size")
    return found


def check_targets(args: argparse.Namespace, asked: Settings | None = None) -> None:
    """Refuse files, and a folder of records, that cannot be written or must not be, before anything runs.

    Parameters
    ----------
    asked : the settings of the run, if they do not come from the flags alone.
    """
    from ..files import outputs
    from ..train import inputs, record

    given = vars(args) | (vars(asked) if asked else {})
    found = [outputs.Output(f"--{flag}", path) for flag in FILES if (path := given.get(flag)) is not None]
    for o in found:
        outputs.check(o.path, o.flag)
    if found:
        outputs.check_unread(found, inputs.of(given))
    if (root := given.get("runs")) is not None:
        if args.verb != "runs":  # which only reads there
            record.check_root(root)
        found.append(outputs.Output("--runs", root))
    if (save := given.get("save")) is not None:
        found += inputs.saved("--save", Path(save))
    outputs.check_apart(found)


def write_trace(args: argparse.Namespace, profile: Profile | None) -> None:
    """Write the file of ``--trace``, if there is a profile."""
    from ..report import trace

    if args.trace and profile:
        trace.write_trace(args.trace, profile)


def keep(root: Path, kind: str, name: str, content: Mapping[str, Any]) -> str | None:
    """Keep a record and return its folder; None, and a warning, if it cannot be kept."""
    from ..lab import records
    from ..report.console import warn

    try:
        return str(records.keep(root, kind, name, content))
    except UserError as e:
        warn(f"the record is not kept: {e}")
        return None


def show(args: argparse.Namespace, content: Any, shown: Callable[[], Sequence[RenderableType]]) -> None:
    """Print a result: with ``--json`` as one object, else as the tables that `shown` makes."""
    from ..report import console

    if args.json:
        print(json.dumps(to_json(content)), flush=True)
    else:
        console.show(shown())


def use_order(order: str | None) -> None:
    """Choose the order in which products of bfloat16 are added, before kernels are imported; None: the processor's."""
    if order in ORDERS:  # a wrong one is refused with the other settings
        os.environ[ORDER] = str(order)


def start_numba(threads: int | None) -> None:
    """Fix the number of threads, which numba and BLAS read when they are first imported."""
    from ..report.console import warn

    require_usable()
    there = cores()
    if threads is not None:
        if not 1 <= threads <= MOST_THREADS:
            raise UserError(f"--threads {threads}: expected 1 or more, up to {MOST_THREADS:,}")
        if threads > there:
            slow = "threads that share a core slow each other down"
            warn(f"{threads} threads on {there} cores: {slow}; take --threads {there}")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise UserError("NUMBA_DISABLE_JIT is set: kernels would run as Python, thousands of times slower; unset it")
    layer = os.environ.get("NUMBA_THREADING_LAYER", "default")
    if layer not in LAYERS:
        raise UserError(f"NUMBA_THREADING_LAYER={layer}: numba knows no such layer; unset it, or take omp or workqueue")
    if "numba" not in sys.modules:  # once it runs, numba refuses another number
        os.environ["NUMBA_NUM_THREADS"] = str(threads or there)
    waiting(threads or there)  # which refuses a wrong variable now
    if layer in ("tbb", "safe"):  # whose library may be missing, which a child process could not say
        from ..kernels.toolkit.threads import start

        start(threads or there)


def thread_counts(text: str, flag: str = "--threads") -> list[int]:
    """Read ``1,2,4``; by default one and all cores.

    Raises
    ------
    UserError
        For anything else.
    """
    words = [w.strip() for w in text.split(",")] if text else ["1", str(cores())]
    if not all(w.isdecimal() and len(w) < 5 and 0 < int(w) <= MOST_THREADS for w in words):
        raise UserError(f"{flag} {text!r}: expected numbers of threads up to {MOST_THREADS:,}, as in 1,2,4")
    return sorted({int(w) for w in words})
