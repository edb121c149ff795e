"""From lines to a module of text, kept in a file that is named by its content and imported from there.

A file, because then numba's cache, tracebacks, debuggers and ``inspect`` all see the generated source.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

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


def folder() -> Path:
    """The directory of generated modules: ``$CPUOPT_CACHE_DIR/ad``, else ``~/.cache/cpuopt/ad``."""
    if root := os.environ.get("CPUOPT_CACHE_DIR"):
        return Path(root).absolute() / "ad"
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache"), "cpuopt", "ad")


def load(name: str, key: str, make: Callable[[], str]) -> ModuleType:
    """Import a generated module from the cache, after writing it there if it is new.

    Parameters
    ----------
    key : a digest of all that the text depends on.
    make : gives the text.
    """
    full = f"cpuopt_generated.{name}_{key}"
    if full in sys.modules:
        return sys.modules[full]
    path = _folder() / f"{name}_{key}.py"
    if not path.is_file():
        text = make()
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[full] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@cache
def _folder() -> Path:
    """The cache, or a directory of this process where the cache cannot be written or is not the user's alone."""
    where = folder()
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = where.stat()
        mine = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        if mine and not status.st_mode & 0o022 and os.access(where, os.W_OK | os.X_OK):
            return where
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="cpuopt-ad-"))
