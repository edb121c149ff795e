"""The page around the pictures: its policy lets a browser load nothing and run no script but the page's own."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from .markup import Markup, escape, join, tag


@dataclass(frozen=True)
class Section:
    """A picture or a table under a heading; `key` is its place in the page's address."""

    key: str
    heading: str
    body: Markup


def page(title: str, head: Markup, sections: Sequence[Section]) -> str:
    """Put a page together."""
    links = tag("nav", [tag("a", s.heading, href=f"#{s.key}") for s in sections])
    cards = [tag("section", tag("h2", s.heading), s.body, id=s.key) for s in sections]
    style, script = _file("page.css"), _file("page.js")
    return Template(_file("page.html")).substitute(
        title=escape(title),
        body=join(head, links if sections else None, cards),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def colours() -> tuple[str, str]:
    """Return the colours of the page as declarations of variables, for a light theme and for a dark one."""
    pairs = re.findall(r"(--\w+): light-dark\((#\w+), (#\w+)\);", _file("page.css"))
    light, dark = ("; ".join(f"{name}: {of[i]}" for name, *of in pairs) for i in range(2))
    return light, dark


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
