"""What the passes over one kernel share: its names, what they stand for outside, and its text as it was written."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

from ..kernel import Local, UnsupportedError
from ..naming import reserved
from .text import elements_stored, stores

PYTHON = SimpleNamespace(
    abs=abs, bool=bool, enumerate=enumerate, float=float, int=int, len=len, max=max, min=min, pow=pow, range=range,
    reversed=reversed, round=round, zip=zip,
)  # fmt: skip
"""The functions of Python that a kernel may call."""


def outside(function: Any) -> dict[str, Any]:
    """Return the objects that names stand for in a function if it does not assign them."""
    code, cells = function.__code__, function.__closure__ or ()
    closure = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True) if _filled(c)}
    found = {**vars(PYTHON), **function.__globals__, **closure}
    return {n: v for n, v in found.items() if n not in code.co_varnames}


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def source_of(function: Any) -> tuple[FunctionType, dict[int, str], ast.FunctionDef | None]:
    """Return a function without its compiler, its lines by number, and its tree; None if it is none."""
    plain = inspect.unwrap(getattr(function, "py_func", function))
    plain = getattr(plain, "written_as", plain)
    try:
        lines, first = inspect.getsourcelines(plain)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        name = getattr(plain, "__name__", repr(plain))
        raise UnsupportedError(
            f"{name} has no source to read: it was made by exec, at a prompt or by lambda; "
            "write it to a file with def, and import it"
        ) from None
    first = max(first, 1)
    ast.increment_lineno(tree, first - 1)
    node = tree.body[0]
    found = {first + i: line.rstrip("\n") for i, line in enumerate(lines)}
    return plain, found, node if isinstance(node, ast.FunctionDef) else None


def own(found: Any) -> bool:
    """Return whether an object is a function that a user wrote in Python."""
    plain = getattr(found, "py_func", found)
    home = (getattr(plain, "__module__", "") or "").split(".")[0]
    return isinstance(plain, FunctionType) and home not in ("numpy", "math", "numba", "builtins")


class Scope:
    """The names of one kernel.

    Attributes
    ----------
    refuse : raises, with the line of a node.
    found : the object outside the kernel that a name stands for.
    outside : those objects by name; names of inlined functions are added.
    source : lines by number; those of inlined functions in the same file are added.
    kernel : the function itself.
    written : the statements as they were written, those of inlined functions too.
    count : how often they assign each name.
    stored : the arrays of which they assign elements.
    arrays : the names that stand for arrays or rows.
    ranks : the number of axes of arrays, as far as declarations and uses tell.
    local : the local arrays.
    indices : the names that the passes made for indices.
    rewritten : whether a form was found that numba does not compile.
    """

    def __init__(
        self, node: ast.FunctionDef, file: str, refuse: Callable[..., NoReturn], found: Callable[[ast.expr], Any],
        outside: dict[str, Any], source: dict[int, str], kernel: FunctionType, axes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.file, self.refuse, self.found, self.outside, self.source = file, refuse, found, outside, source
        self.kernel, self.rewritten = kernel, False
        self.params = [a.arg for a in node.args.args]
        self.taken = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | set(self.params)
        self.written = ast.Module([], [])
        self.count: dict[str, int] = {}
        self.stored: set[str] = set()
        self.add(node.body)
        self.sources: dict[Any, Any] = {}
        self.inlining: list[Any] = []
        self.local: dict[str, Local] = {}
        self.indices: set[str] = set()
        self.arrays = {p for p in self.params if axes.get(p) or self.is_array(node, p)}
        self.ranks: dict[str, int] = {n: k for n, k in axes.items() if n in self.params}
        self.find_ranks(node)

    def add(self, body: list[ast.stmt]) -> None:
        """Note statements as they were written."""
        self.written.body += body
        self.stored |= elements_stored(body)
        for name in stores(body):
            self.count[name] = self.count.get(name, 0) + 1

    def fresh(self, name: str) -> str:
        """A name that is not taken: this one, if it is free."""
        new, k = name, 1
        while new in self.taken or reserved(new) or f"d{new}" in self.params:
            k += 1
            new = f"{name}_{k}"
        self.taken.add(new)
        return new

    def source_of(self, function: Any) -> tuple[FunctionType, dict[int, str], ast.FunctionDef | None]:
        """Return what `source_of` does, once found."""
        if function not in self.sources:
            self.sources[function] = source_of(function)
        return self.sources[function]  # type: ignore[no-any-return]

    def is_array(self, node: ast.AST, name: str) -> bool:
        """Return whether a function uses a name as an array, or hands it on to one that does."""
        for n in ast.walk(node):
            match n:
                case ast.Subscript(value=ast.Name(id=x)) | ast.Attribute(value=ast.Name(id=x)) if x == name:
                    return True
                case ast.For(iter=ast.Name(id=x)) if x == name:
                    return True
                case ast.Call(func=f, args=args):
                    at = [k for k, a in enumerate(args) if isinstance(a, ast.Name) and a.id == name]
                    if at and isinstance(f, ast.Name) and f.id in ("len", "enumerate", "zip"):
                        return True
                    if any(self.takes_array(f, k) for k in at):
                        return True
        return False

    def takes_array(self, f: ast.expr, k: int) -> bool:
        """Return whether argument `k` of a function of one's own is an array."""
        found = self.found(f)
        if not own(found) or found in self.inlining or getattr(found, "__name__", "") == "<lambda>":
            return False
        inner = self.source_of(found)[2]
        if not inner or k >= len(inner.args.args):
            return False
        self.inlining.append(found)
        yes = self.is_array(inner, inner.args.args[k].arg)
        self.inlining.pop()
        return yes

    def find_ranks(self, node: ast.AST) -> None:
        """Find the number of axes of arrays, as far as their uses tell."""
        for n in ast.walk(node):
            match n:
                case ast.Subscript(value=ast.Name(id=x), slice=at):
                    self.ranks[x] = max(self.ranks.get(x, 0), len(at.elts) if isinstance(at, ast.Tuple) else 1)
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=x), attr="shape"), slice=ast.Constant(value=k)
                ):
                    self.ranks[x] = max(self.ranks.get(x, 0), int(k) + 1)  # type: ignore[arg-type]
                case ast.Assign(targets=[ast.Tuple(elts=ts)], value=ast.Attribute(value=ast.Name(id=x), attr="shape")):
                    self.ranks[x] = len(ts)
