"""``cpuopt judge``: judge a kernel that nobody vouches for, from its text.

The text is parsed, held against a whitelist, and compiled in a closed process; it is never imported here. What it
computes is compared with the float64 reference on public and on private cases. The exit status is 1 if it is refused.

Examples::

    cpuopt judge mygelu.py --op gelu_forward
    cpuopt judge mygelu.py --op gelu_forward --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UserError
from ..train import settings
from .common import shared, show, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    p.add_argument("file", metavar="FILE", help="Read the candidate from this file.")
    p.add_argument("--op", required=True, metavar="OP", help="Use the candidate for this op.")
    settings.flags(p, "threads")
    shared(p, "--json")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 1 if the candidate is refused."""
    start_numba(args.threads)
    from .. import kernels  # noqa: F401  (registers them)
    from ..judge.session import REFUSED, Judge, op_named
    from ..report import console
    from ..report import judge as report

    op_named(args.op)
    text = text_of(args.file)
    with console.saying() as say, Judge(args.threads, say) as session:
        ruling = session.check(text, args.op)
    show(args, ruling, lambda: report.tables(ruling))
    return int(ruling.verdict in REFUSED)


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
