"""Write docs/api.md: every public name of `import cpuopt`, from the docstrings.

python docs/api.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import cpuopt
from cpuopt import ops

PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """# API

Every public name of `import cpuopt`. `python docs/api.py` writes this page from the docstrings, and a test runs its
examples. Arrays are NumPy's, C-contiguous; numbers are float32 and ids int32 where nothing else is said. A mistake in
what you pass raises `cpuopt.UserError`: one line with what came, what was expected and what to do.

`import cpuopt` alone loads nothing: a name is imported when it is first used, and numba with those that need it.
"""
SECTIONS = ("Parameters", "Attributes", "Returns", "Raises", "Examples")
UNITS = """Sizes are symbols: `B` rows of a batch, `T` tokens of a row, `BT` both as one axis, `C` channels, `OC`
channels of the result, `V` the vocabulary, `NH` heads, `N` all elements. FLOPs are those that the formula needs,
whatever a kernel does. An argument marked + is updated in place, a gradient where its flag `_add` is set; one marked ?
may be absent.
"""


def public(module: ModuleType) -> dict[str, Any]:
    """Return the classes and functions that a module of the package offers, by name."""
    homes = [module.__name__]
    if module is cpuopt.functional:
        homes = ["cpuopt.nn.functional", "cpuopt.nn.values"]
    if module is cpuopt.nn:
        homes = ["cpuopt.nn.modules"]
    found = {name: x for name, x in vars(module).items() if not name.startswith("_") and callable(x)}
    mine = {
        n: x for n, x in found.items() if f"{getattr(x, '__module__', '')}.".startswith(tuple(f"{h}." for h in homes))
    }
    return dict(sorted(mine.items(), key=lambda item: (not isinstance(item[1], type), item[0])))


def signature(x: Any) -> str:
    """Return the parameters with their defaults; annotations stand in the text where they matter."""
    try:
        parameters = [p for p in inspect.signature(x).parameters.values() if p.name not in ("self", "cls")]
    except (TypeError, ValueError):
        return "()"
    words, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            words, starred = [*words, "*"], True
        starred |= p.kind is p.VAR_POSITIONAL
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        plain = isinstance(p.default, str | int | float | tuple | None)
        default = "" if p.default is p.empty else f"={p.default!r}" if plain else "=..."
        words.append(f"{star}{p.name}{default}")
    return f"({', '.join(words)})"


def text(doc: str) -> str:
    """Turn a docstring into Markdown: a list for each section of names, a block for examples."""
    out: list[str] = []
    section = ""
    for line in doc.replace("``", "`").splitlines():
        entry = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*) : (.*)", line)
        if line in SECTIONS:
            section = line
            out += [f"**{section}**", ""]
        elif set(line) == {"-"}:
            continue
        elif section in ("Parameters", "Attributes") and entry:
            out.append(f"- `{entry[1]}`: {entry[2]}")
        elif section in ("Parameters", "Attributes", "Raises") and line and not line.startswith(" "):
            out.append(f"- `{line}`:")
        elif section in ("Parameters", "Attributes", "Raises") and line:
            out[-1] += f" {line.strip()}"
        else:
            out.append(line)
    lines, inside = [], False
    for line in out:
        code = line.startswith((">>>", "...")) or (inside and bool(line.strip()))
        if code != inside:
            lines.append("```python" if code else "```")
        lines.append(line)
        inside = code
    return "\n".join([*lines, "```"] if inside else lines).strip()


def members(found: type, inherited: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield the public methods and properties of a class, perhaps with those that it inherits within the package."""
    if issubclass(found, BaseException):
        return
    seen: set[str] = set()
    for base in found.__mro__ if inherited else (found,):
        for name, x in vars(base).items():
            if name.startswith("_") or name in seen or not base.__module__.startswith("cpuopt"):
                continue
            seen.add(name)
            x = x.__func__ if isinstance(x, classmethod | staticmethod) else x
            if inspect.isfunction(x) and x.__name__ == name:
                yield name, x, signature(x)
            elif isinstance(x, property | cached_property):
                yield name, x, ""


def described(name: str, x: Any, level: str) -> Iterator[str]:
    """Yield the lines on a class or a function."""
    yield f"{level} `{name}{signature(x)}`"
    yield text(inspect.getdoc(x) or "")
    if isinstance(x, type):
        for n, f, s in sorted(members(x, inherited=level == "##")):
            yield f"{level}# `{name.rpartition('.')[2]}.{n}{s}`"
            yield text(inspect.getdoc(f) or "")


def declared(op: ops.Op) -> str:
    """Return the row of an op."""
    marks = {"acc": "+", "state": "+"}
    args = ", ".join(
        f"{a.name}{marks.get(a.kind, '')}{'?' if a.optional else ''} ({', '.join(map(str, a.shape))})"
        for a in op.args
        if a.kind != "scalar"
    )
    numbers = ", ".join(a.name for a in op.args if a.kind == "scalar")
    return f"| `{op.name}` | {args}{f'; {numbers}' if numbers else ''} | {op.flops} | {op.source} |".replace("*", "·")


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    modules = [n for n in cpuopt.__all__ if isinstance(getattr(cpuopt, n), ModuleType)]
    for name in cpuopt.__all__:
        if name not in modules:
            parts += described(f"cpuopt.{name}", getattr(cpuopt, name), "##")
    for name in modules:
        module = getattr(cpuopt, name)
        parts += [f"## `cpuopt.{name}`", text(inspect.getdoc(module) or "")]
        if module is ops:
            rows = [declared(op) for op in ops.ALL.values()]
            parts += [
                UNITS,
                "\n".join(["| op | arrays; numbers | FLOPs | source |", "| --- | --- | --- | --- |", *rows]),
            ]
        for n, x in public(module).items():
            if getattr(cpuopt, n, None) is x:
                parts += [f"### `{n}`", f"As `cpuopt.{n}`."]
            else:
                parts += described(n, x, "###")
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.name}: {PAGE.write_text(page(), encoding='utf-8')} characters\n")
