"""A process that renders one chat template; `data.templates.Template` is the other end.

A template is a program of unknown origin. It runs in Jinja's sandbox, in a process whose memory is limited and that can
open no file, socket or pipe. The parent limits the time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import UserError
from .serve import Say, serve

MEMORY = 512 << 20
"""Bytes of memory of the process."""
LONGEST = 1 << 21
"""Characters of a rendered chat."""


class Generation(Extension):
    """The blocks ``{% generation %}`` around what an assistant says, which change nothing here."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[Node]:
        """Return what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainNamespace(Namespace):
    """A namespace without the names that Python's own protocols look for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have {name!r}")
        super().__setitem__(name, value)


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def renderer(source: str, environment: type[jinja2.Environment] = ImmutableSandboxedEnvironment) -> Callable[..., str]:
    """Return the function from a template's variables to its text, as ``transformers`` renders it.

    The date of ``strftime_now`` is that of this call, or of ``SOURCE_DATE_EPOCH``.
    """
    made = environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now()
    made.filters["tojson"] = _json
    made.globals |= {"raise_exception": _raise, "strftime_now": now.strftime, "namespace": PlainNamespace}
    template = made.from_string(source)

    def render(**variables: Any) -> str:
        pieces, size = [], 0
        for piece in template.generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST:
                raise UserError(f"it makes more than {LONGEST:,} characters of a chat")
        return "".join(pieces)

    return render


def alike(a: str, b: str) -> int:
    """Return the number of characters with which two texts begin alike."""
    if a.startswith(b):
        return len(b)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def reason(e: BaseException) -> str:
    """Return why a template failed, in its own words if it has some."""
    if isinstance(e, MemoryError):
        return f"it needs more than {MEMORY >> 20} MB of memory"
    if isinstance(e, RecursionError):
        return "it is nested too deeply"
    if isinstance(e, jinja2.TemplateSyntaxError):
        return f"line {e.lineno}: {e.message}"
    words = str(e)[:500]
    return words if words and isinstance(e, UserError | jinja2.TemplateError) else f"{type(e).__name__}: {words}"


class Answers:
    """What the process is asked: ``confine`` itself, ``load`` a template, and ``render`` chats."""

    def confine(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        """Limit the memory, and open nothing more."""
        confine()
        return {}

    def load(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        """Compile a template; the variables are those of all chats."""
        self.render_one = self._tried(renderer, request["template"])
        self.variables = request["variables"] | {"tools": None, "documents": None}
        return {}

    def render(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        """Render stretches of a chat: each as the characters that it shares with the first, and the rest."""
        first, texts = "", list[tuple[int, str]]()
        for start, end, prompt in request["stretches"]:
            asked = {"messages": request["messages"][start:end], "add_generation_prompt": prompt}
            text = self._tried(self.render_one, **self.variables, **asked)
            n = alike(first, text)
            texts.append((n, text[n:]))
            first = first or text
        return {"texts": texts}

    def _tried(self, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return do(*args, **kwargs)
        except Exception as e:
            raise UserError(reason(e)) from None


def confine() -> None:
    """Limit the memory of this process, and let it open nothing more."""
    with suppress(jinja2.TemplateError):  # imports what Jinja and Python import when they first need it
        renderer("{{ strftime_now('%Z')|pprint }}{{ ''.x.y }}")()
    limits = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_CORE: 0}
    for what, most in (limits | ({resource.RLIMIT_AS: MEMORY} if sys.platform == "linux" else {})).items():
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    answers = Answers()
    serve({"confine": answers.confine, "load": answers.load, "render": answers.render})
