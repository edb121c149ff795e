"""A kernel as data: statements over `ast` expressions, what they read and write, and what to differentiate."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ..errors import UserError

Names = set[str]
MODULES = {"np", "math"}
"""The modules whose functions are called, under the names that `cpuopt.ad.subset` gives them."""
NUMBER = bool | int | float | np.bool | np.integer | np.floating
"""What a global may be."""


class UnsupportedError(UserError):
    """Source outside the subset: file, line, code, why, and what to write instead."""


class WrittenTwiceError(UnsupportedError):
    """An output that the backward is given may hold another value than the one that was read: `array`."""

    def __init__(self, message: str, array: str) -> None:
        super().__init__(message)
        self.array = array


@dataclass(eq=False)
class Stmt:
    """A statement, and the line that it came from."""

    line: int


@dataclass(eq=False)
class Assign(Stmt):
    """``target = value``."""

    target: ast.expr
    value: ast.expr


@dataclass(eq=False)
class Accum(Assign):
    """``target += value``: linear in the target, so nothing of it is ever recorded."""


@dataclass(eq=False)
class LogSumExp(Assign):
    """``target = log(total) + top``, where total sums ``exp(term - top)`` over a loop: the shift by top cancels.

    `weight` is exp(term - target), as an expression or as the array element that holds it.
    """

    loop: For
    term: ast.expr
    weight: ast.expr


@dataclass(eq=False)
class View(Stmt):
    """``name = base.reshape(shape)``."""

    name: str
    base: str
    shape: list[ast.expr]


@dataclass(eq=False)
class For(Stmt):
    """A loop over a range.

    Attributes
    ----------
    reduced : scalars that a parallel loop only sums, multiplies or takes the largest of, as numba's prange may.
    """

    var: str
    bounds: tuple[ast.expr, ast.expr, int]
    body: list[Stmt]
    parallel: bool = False
    reduced: Names = field(default_factory=set)


@dataclass(eq=False)
class If(Stmt):
    """A branch."""

    test: ast.expr
    body: list[Stmt]
    orelse: list[Stmt]


@dataclass
class Kernel:
    """A kernel in the subset.

    Attributes
    ----------
    arrays : the parameters that are arrays, with the number of their axes.
    ints : locals and arrays that hold integers, as far as indices and ranges tell.
    source : its lines by number.
    names : the numbers, functions and modules outside it that it uses.
    """

    name: str
    file: str
    params: list[str]
    body: list[Stmt]
    arrays: dict[str, int]
    ints: set[str]
    source: dict[int, str]
    names: dict[str, Any]
    views: dict[str, View] = field(default_factory=dict)

    def root(self, name: str) -> str:
        """The array that a view looks at, or the name itself."""
        return self.views[name].base if name in self.views else name

    def copy(self) -> Kernel:
        """One that may be rewritten in place."""
        arrays, known = dict(self.arrays), dict(self.names)
        return replace(self, body=copy.deepcopy(self.body), arrays=arrays, names=known)

    def rename(self, new: dict[str, str]) -> None:
        """Give locals, views and globals other names, in place."""
        for s in flat(self.body):
            for e in [*expressions(s), *([s.target] if isinstance(s, Assign) else [])]:
                for n in ast.walk(e):
                    if isinstance(n, ast.Name):
                        n.id = new.get(n.id, n.id)
            if isinstance(s, For):
                s.var = new.get(s.var, s.var)
                s.reduced = {new.get(n, n) for n in s.reduced}
            elif isinstance(s, View):
                s.name = new.get(s.name, s.name)
        self.views = {s.name: s for s in flat(self.body) if isinstance(s, View)}
        self.ints = {new.get(n, n) for n in self.ints}
        self.names = {new.get(n, n): value for n, value in self.names.items()}

    def roots(self, found: Names) -> Names:
        """The roots of names."""
        return {self.root(n) for n in found}

    def refuse(self, line: int, why: str, instead: str) -> NoReturn:
        """Raise, with file, line and code."""
        code = self.source.get(line, "").strip()
        raise UnsupportedError(f"{self.file}:{line}: '{code}': {why}; {instead}")

    def refuse_parameter(self, why: str, instead: str = "give it another name") -> NoReturn:
        """Raise, with the line of the ``def``."""
        self.refuse(next(k for k, code in self.source.items() if code.lstrip().startswith("def ")), why, instead)

    def first_write(self, array: str) -> int:
        """The line that first writes to an array or to a view of it; 0 for none."""
        writes = (s.line for s in flat(self.body) if isinstance(s, Assign) and self.root(base(s.target)) == array)
        return next(writes, 0)


@dataclass
class Task:
    """What to differentiate.

    Attributes
    ----------
    wrt, outs : arrays whose adjoints are wanted, and given.
    saved : outputs that the backward is given as the forward left them.
    hidden : parameters that the backward is not given.
    fresh : outputs whose content before the call means nothing, so that nothing reads an element before it is assigned.
    record_all : record whatever is overwritten, fuse nothing, compute nothing again: slow, and simple to trust.
    """

    kernel: Kernel
    wrt: list[str]
    outs: list[str]
    saved: Names = field(default_factory=set)
    hidden: Names = field(default_factory=set)
    fresh: Names = field(default_factory=set)
    record_all: bool = False


# Expressions --------------------------------------------------------------------------------------------------------


def text(e: ast.AST) -> str:
    """An expression as source; that of one that is not changed any more is kept."""
    found = getattr(e, "known_text", None)
    if found is None:
        found = ast.unparse(e)
        if hasattr(e, "known_names"):
            e.known_text = found  # type: ignore[attr-defined]
    return str(found)


def parse(code: str) -> Any:
    """Read one expression."""
    return ast.parse(code, mode="eval").body


def load(target: ast.expr) -> Any:
    """Give a target as something that is read."""
    return parse(text(target))


def function_name(call: ast.Call) -> str:
    """The plain name of what is called: ``exp`` for ``np.exp``."""
    f = call.func
    if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id in MODULES:
        return f.attr
    return f.id if isinstance(f, ast.Name) else text(f)


def names(e: ast.AST) -> set[str]:
    """The names whose values an expression reads; that of x is not read by ``x.shape``."""
    if (known := getattr(e, "known_names", None)) is not None:
        return known  # type: ignore[no-any-return]
    if isinstance(e, ast.Attribute):
        return set()
    if isinstance(e, ast.Call):
        return set().union(*map(names, e.args)) if e.args else set()
    if isinstance(e, ast.Name):
        return {e.id}
    return set().union(*map(names, ast.iter_child_nodes(e)), set())


def base(target: ast.expr) -> str:
    """The name that a target writes."""
    node = target.value if isinstance(target, ast.Subscript) else target
    assert isinstance(node, ast.Name)
    return node.id


def index(e: ast.Subscript) -> list[ast.expr]:
    """The indices of an element, one an axis."""
    return list(e.slice.elts) if isinstance(e.slice, ast.Tuple) else [e.slice]


def elements(e: ast.AST) -> Iterator[ast.Subscript]:
    """The array elements that an expression reads, those in indices too."""
    for node in ast.walk(e):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            yield node


def rename(e: ast.expr, old: str, new: str) -> ast.expr:
    """Give a name in an expression another name."""
    e = parse(text(e))
    for n in ast.walk(e):
        if isinstance(n, ast.Name) and n.id == old:
            n.id = new
    return e


# Statements ---------------------------------------------------------------------------------------------------------


def flat(block: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement of a block, outer ones first."""
    for s in block:
        yield s
        if isinstance(s, For):
            yield from flat(s.body)
        elif isinstance(s, If):
            yield from flat(s.body)
            yield from flat(s.orelse)


def blocks(block: list[Stmt]) -> Iterator[list[Stmt]]:
    """A block and every block inside it."""
    yield block
    for s in block:
        if isinstance(s, For | If):
            yield from blocks(s.body)
        if isinstance(s, If):
            yield from blocks(s.orelse)


def assigned(block: Iterable[Stmt]) -> set[str]:
    """The names that a block writes, loop variables included."""
    found = set()
    for s in flat(block):
        if isinstance(s, Assign):
            found.add(base(s.target))
        elif isinstance(s, For):
            found.add(s.var)
    return found


def expressions(s: Stmt) -> list[ast.expr]:
    """The expressions that a statement itself holds."""
    match s:
        case Assign(target=target, value=value):
            return [value, *(index(target) if isinstance(target, ast.Subscript) else [])]
        case For(bounds=(lo, hi, _)):
            return [lo, hi]
        case If(test=test):
            return [test]
        case View(shape=shape):
            return shape
    return []


def reads(s: Stmt) -> list[ast.expr]:
    """The expressions that a statement reads."""
    return [*expressions(s), s.target] if isinstance(s, Accum) else expressions(s)


def every_element(s: Stmt) -> list[ast.Subscript]:
    """The array elements that a statement itself reads or writes."""
    found = [e for x in expressions(s) for e in elements(x)]
    return [*found, *elements(s.target)] if isinstance(s, Assign) else found
