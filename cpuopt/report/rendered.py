"""Tables and lines as text, and as HTML for a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import RenderableType

from .console import Plain, put

WIDTH = 80
Shown = Sequence[RenderableType]
"""Tables and lines, for rich."""
HTML = "<pre style=\"line-height:1.25;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"


def as_text(shown: Shown) -> str:
    """Return what the command line prints, without colours, in 80 columns."""
    return _recorded(shown).export_text().rstrip()


def as_html(shown: Shown) -> str:
    """Return what the command line prints as an element of HTML."""
    return _recorded(shown).export_html(inline_styles=True, code_format=HTML)


def echo(text: str) -> None:
    """Print a piece of another process's output as it is."""
    print(text, end="", flush=True)


def _recorded(shown: Shown) -> Plain:
    console = Plain(record=True, file=io.StringIO(), width=WIDTH)
    for r in shown:
        put(console, r)
    return console
