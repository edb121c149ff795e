"""From statements to a module of text, which is kept in a file named by its content and imported from there.

With a file, numba's cache, tracebacks, debuggers and ``inspect`` all see the generated source.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..files import cache_folder, read_entry, write_entry
from .kernel import CHUNKS, NUMBER, Accum, Assign, For, If, PlainKernel, Reshape, Stmt, flat, mentioned
from .rules import CONSTANTS, negated
from .trees import text


def number(value: Any) -> str:
    """A number, or a table of numbers, as Python text of the same type and value."""
    if isinstance(value, np.ndarray):
        said = repr(value.tolist()).replace("inf", "np.inf").replace("nan", "np.nan")
        return f"np.array({said}, np.{value.dtype})"
    plain = value.item() if isinstance(value, np.generic) else value
    kind = next(t for t in (bool, int, float) if isinstance(plain, t))  # an IntEnum is an int
    said = repr(kind(plain)).replace("inf", "np.inf").replace("nan", "np.nan")
    return f"np.{type(value).__name__}({said})" if isinstance(value, np.generic) else said


def bare(e: ast.expr) -> str:
    """Return an expression as the text of a statement: a tuple has no brackets."""
    return ", ".join(map(text, e.elts)) if isinstance(e, ast.Tuple) else text(e)


def written(block: Iterable[Stmt], depth: int = 0) -> Iterator[tuple[Stmt, str]]:
    """The lines of a block as text, each with the statement that it belongs to."""
    for s in block:
        head, second = "pass", ""
        match s:
            case Accum(target=target, value=value):
                inner = negated(value)
                head = f"{text(target)} -= {text(inner)}" if inner else f"{text(target)} += {text(value)}"
            case Assign(target=target, value=value):
                head = f"{bare(target)} = {bare(value)}"
            case Reshape(name=name, base=base, shape=shape):
                head = f"{name} = {base}.reshape({', '.join(map(text, shape))})"
            case For(var=var, bounds=(lo, hi, step)):
                parts = [text(lo), text(hi), str(step)]
                short = parts[parts[0] == "0" : 2] if step == 1 and not s.full else parts
                head = f"for {var} in {'prange' if s.parallel else 'range'}({', '.join(short)}):"
            case If(test=test, body=body, orelse=orelse):
                head = f"if {text(test)}:" if body else f"if not ({text(test)}):"
                second = "else:" if body and orelse else ""
        yield s, "    " * depth + head
        for k, inside in enumerate(filter(None, s.blocks)):
            if k:
                yield s, "    " * depth + second
            yield from written(inside, depth + 1)


def quoted(kernel: PlainKernel, line: int) -> str:
    """A line of the forward without its comment."""
    return kernel.source.get(line, "").split("#")[0].strip()


def module(
    kernel: PlainKernel, name: str, params: list[str], body: list[Stmt], doc: str, scratch: dict[str, Any]
) -> str:
    """Write the module of one backward; a comment above each group of lines has the forward line that they are from."""
    lines, last = list[str](), 0
    for s, code in written(body, 1):
        if s.line and s.line != last:
            last = s.line
            lines.append(f"{code[: len(code) - len(code.lstrip())]}# {last}: {quoted(kernel, last)}")
        lines.append(code)
    used = mentioned(body).union(*(kernel.words.get(s.line, ()) for s in flat(body)))
    head = [f'"""{doc}"""', ""]
    if math := [n for n, v in kernel.names.items() if getattr(v, "__module__", "") == "math" and n in used]:
        head.append(f"from math import {', '.join(sorted(math))}")
    if "math" in kernel.names:
        head.append("import math")
    parallel = "prange" in used or any(isinstance(s, For) and s.parallel for s in flat(body))
    head += ["import numpy as np"] + ["from numba import prange"] * parallel
    head += ["", "from cpuopt.kernels.toolkit.tape import push"] * ("push" in used and "push" not in kernel.names)
    values: dict[str, Any] = {n: np.float32(v) for n, v in CONSTANTS.items()} | {"CHUNKS": CHUNKS}
    values |= {n: v for n, v in kernel.names.items() if isinstance(v, NUMBER | np.ndarray)}
    head += ["", *[f"{n} = {number(v)}" for n, v in values.items() if n in used]]
    head += [f"SCRATCH = {scratch!r}", "", ""]
    return "\n".join([*head, f"def {name}({', '.join([*params, *scratch])}):", *(lines or ["    pass"])]) + "\n"


class Loader(importlib.abc.SourceLoader):
    """Loader of a module from its text, with or without a file. It keeps no bytecode, which would not be checked."""

    def __init__(self, path: Path, text: bytes) -> None:
        self.path, self.text = path, text

    def get_filename(self, name: str) -> str:
        """Return the path of the text, if it could be written."""
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        """Return the text."""
        return self.text


def load(name: str, key: str, make: Callable[[], str]) -> ModuleType:
    """Import a generated module from the cache, after writing it there if it is new or damaged.

    Parameters
    ----------
    key : a digest of all that the text depends on.
    make : function that returns the text.
    """
    full = f"cpuopt_generated.{name}_{key}"
    if full in sys.modules:
        return sys.modules[full]
    path = cache_folder("generated") / f"{name}_{key}.py"
    text = read_entry(path)
    if text is None:
        text = make().encode()
        write_entry(path, text)
    loader = Loader(Path(os.fsencode(path).decode(errors="replace")), text)  # numba takes no other name than UTF-8
    spec = importlib.util.spec_from_loader(full, loader)
    assert spec
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[full] = loaded
    loader.exec_module(loaded)
    return loaded
