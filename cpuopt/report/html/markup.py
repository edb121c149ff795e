"""Markup from Python, and the one place where text is escaped: anything that is not `Markup` counts as text."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = ("input", "meta")
"""Elements without an end tag."""


class Markup(str):
    """Text that is markup; only `escape`, `tag` and `join` make it, and the page's own files."""

    __slots__ = ()


def escape(x: object) -> Markup:
    """Convert anything to text that a browser shows as it is; numbers to 6 digits."""
    if isinstance(x, Markup):
        return x
    text = f"{x:.6g}" if isinstance(x, float) else str(x)
    return Markup(html.escape(text.encode("utf-8", "backslashreplace").decode()).replace("\0", "�"))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Make an element.

    Parameters
    ----------
    children : markup, text, or iterables of these; None is left out.
    attributes : None is left out; ``class_`` is ``class`` and ``text_anchor`` is ``text-anchor``.
    """
    given = [(k.rstrip("_").replace("_", "-"), escape(v)) for k, v in attributes.items() if v is not None]
    words = "".join(f' {k}="{v}"' for k, v in given)
    start = f"<{name}{words}>"
    return Markup(start if name in VOID else f"{start}{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Put markup and text one after the other."""
    return Markup("".join(_flat(children)))


def _flat(children: Iterable[object]) -> Iterable[str]:
    for child in children:
        if isinstance(child, str):
            yield escape(child)
        elif isinstance(child, Iterable):
            yield from _flat(child)
        elif child is not None:
            yield escape(child)
