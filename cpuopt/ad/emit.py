"""From lines to a module of text, kept in a file that is named by its content and imported from there.

A file, because then numba's cache, tracebacks, debuggers and ``inspect`` all see the generated source.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..files import cache_folder, not_private, read_entry, warn_once, write_entry
from .kernel import NUMBER, Kernel
from .lines import CHUNKS, Line
from .rules import CONSTANTS

WIDTH = 88
"""The column at which the forward's lines are quoted."""


def number(value: Any) -> str:
    """A number as Python text of the same type and value."""
    plain = value.item() if isinstance(value, np.generic) else value
    kind = next(t for t in (bool, int, float) if isinstance(plain, t))  # an IntEnum is an int
    said = re.sub("inf|nan", r"np.\g<0>", repr(kind(plain)))
    return f"np.{type(value).__name__}({said})" if isinstance(value, np.generic) else said


def render(lines: Iterable[Line], source: dict[int, str], indent: int = 1) -> list[str]:
    """Write lines with the forward line that each stands for as a comment."""
    out = []
    for line in lines:
        code = "    " * indent + line.text
        if line.source and line.role != "frame":
            quoted = source.get(line.source, "").split("#")[0].strip()
            code = f"{code:<{WIDTH}}  # {line.source}: {quoted}"
        out.append(code)
        if line.body is not None:
            out += render(line.body, source, indent + 1)
    return out


def module(kernel: Kernel, name: str, params: list[str], lines: list[Line], doc: str, scratch: dict[str, Any]) -> str:
    """Write the module of one backward."""
    body = render(lines, kernel.source)
    code = "\n".join(body)
    words = set(re.findall(r"\w+", code))
    head = [f'"""{doc}"""', ""]
    math = [n for n, v in kernel.names.items() if getattr(v, "__module__", "") == "math" and n in words]
    if math:
        head.append(f"from math import {', '.join(sorted(math))}")
    if "math" in kernel.names:
        head.append("import math")
    head += ["import numpy as np"] + ["from numba import prange"] * ("prange" in words)
    values: dict[str, Any] = {n: np.float32(v) for n, v in CONSTANTS.items()} | {"CHUNKS": CHUNKS}
    values |= {n: v for n, v in kernel.names.items() if isinstance(v, NUMBER)}
    head += ["", *[f"{n} = {number(v)}" for n, v in values.items() if n in words]]
    head += [f"SCRATCH = {scratch!r}", "", ""]
    return "\n".join([*head, f"def {name}({', '.join([*params, *scratch])}):", *(body or ["    pass"])]) + "\n"


class Loader(importlib.abc.SourceLoader):
    """Gives a module's text, whether or not a file has it; no bytecode is kept, which nobody would check."""

    def __init__(self, path: Path, text: bytes) -> None:
        self.path, self.text = path, text

    def get_filename(self, name: str) -> str:
        """Say where the text is, if it could be written."""
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        """Give the text."""
        return self.text


def load(name: str, key: str, make: Callable[[], str]) -> ModuleType:
    """Import a generated module from the cache, after writing it there if it is new or damaged.

    Parameters
    ----------
    key : a digest of all that the text depends on.
    make : gives the text.
    """
    full = f"cpuopt_generated.{name}_{key}"
    if full in sys.modules:
        return sys.modules[full]
    folder = cache_folder("generated")
    path = folder / f"{name}_{key}.py"
    problem = not_private(folder)
    if problem:
        warn_once(folder, f"generated backwards are made anew in each process: {problem}")
    text = None if problem else read_entry(path)
    if text is None:
        text = make().encode()
        if not problem:
            write_entry(path, text)
    loader = Loader(path, text)
    spec = importlib.util.spec_from_loader(full, loader)
    assert spec
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[full] = loaded
    loader.exec_module(loaded)
    return loaded
