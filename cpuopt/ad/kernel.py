"""A kernel, and its backward, as data: statements that hold expression trees, with their reads and writes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import numpy as np

from ..errors import UserError
from .trees import Names, base, element, elements, index, names, quote, swap, text, words

CHUNKS = 32
"""Parts of a parallel loop that sum by themselves: fixed, so that the number of threads changes no bit."""
NUMBER = bool | int | float | np.bool | np.integer | np.floating
"""The types that a global may have."""


class UnsupportedError(UserError):
    """Source outside the subset: file, line, code, reason, and what to write instead."""


class WrittenTwiceError(UnsupportedError):
    """An output that the backward is given may hold another value than the one that was read: `array`."""

    def __init__(self, message: str, array: str) -> None:
        super().__init__(message)
        self.array = array


# Statements ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stmt:
    """A statement; this one does nothing.

    Attributes
    ----------
    line : of the forward: where it stands there, or which it repeats or inverts in the backward; 0 for none.
    role : in the backward: ``primal`` (the forward again), ``adjoint`` or ``record``.
    """

    line: int
    role: str = field(default="adjoint", kw_only=True)

    @property
    def blocks(self) -> list[list[Stmt]]:
        """The blocks inside it."""
        return [self.body, self.orelse] if isinstance(self, If) else [self.body] if isinstance(self, For) else []

    @property
    def trees(self) -> list[ast.expr]:
        """The expressions that it holds, a target with its indices."""
        match self:
            case LogSumExp():
                return [self.value, self.target, self.term, self.weight]
            case Assign():
                return [self.value, self.target]
            case For():
                return list(self.bounds[:2])
            case If():
                return [self.test]
        return self.shape if isinstance(self, Reshape) else []

    @property
    def held(self) -> list[ast.expr]:
        """The expressions that it evaluates, those in the indices of a target too."""
        return [self.value, *index(self.target)] if isinstance(self, Assign) else self.trees

    @property
    def reads(self) -> list[ast.expr]:
        """The expressions whose values it reads."""
        return [*self.held, self.target] if isinstance(self, Accum) else self.held

    def swap(self, new: Callable[[ast.expr], ast.expr | None]) -> None:
        """Put other expressions in place of some, in this statement alone."""
        for f in fields(self):
            if f.name not in ("body", "orelse"):
                setattr(self, f.name, swap(getattr(self, f.name), new))


@dataclass(eq=False)
class Assign(Stmt):
    """``target = value``."""

    target: ast.expr
    value: ast.expr

    @property
    def name(self) -> str:
        """The name that it writes."""
        return base(self.target)


@dataclass(eq=False)
class Accum(Assign):
    """``target += value``: linear in the target, so it is never recorded."""


@dataclass(eq=False)
class LogSumExp(Assign):
    """``target = log(total) + top``, where total sums ``exp(term - top)`` over a loop: the shift by top cancels.

    `weight` is exp(term - target), as an expression or as the array element that holds it.
    """

    loop: For
    term: ast.expr
    weight: ast.expr


@dataclass(eq=False)
class Reshape(Stmt):
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
    full : whether its range is written with all three arguments.
    """

    var: str
    bounds: tuple[ast.expr, ast.expr, int]
    body: list[Stmt]
    parallel: bool = False
    reduced: Names = field(default_factory=set)
    full: bool = False


@dataclass(eq=False)
class If(Stmt):
    """A branch; one without a body is written with ``not``."""

    test: ast.expr
    body: list[Stmt]
    orelse: list[Stmt] = field(default_factory=list)


def flat(block: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement of a block, outer ones first."""
    for s in block:
        yield s
        for inner in s.blocks:
            yield from flat(inner)


def blocks(block: list[Stmt]) -> Iterator[list[Stmt]]:
    """A block and every block inside it."""
    yield block
    for s in block:
        for inner in s.blocks:
            yield from blocks(inner)


def assigned(block: Iterable[Stmt]) -> Names:
    """The names that a block writes, loop variables included."""
    return {s.var if isinstance(s, For) else s.name for s in flat(block) if isinstance(s, Assign | For)}


def mentioned(block: Iterable[Stmt]) -> Names:
    """Every name in a block, wherever it stands."""
    found: Names = set()
    for s in flat(block):
        found = found.union(*map(words, s.trees))
        found |= {s.name, s.base} if isinstance(s, Reshape) else {s.var} if isinstance(s, For) else set()
    return found


def every_element(s: Stmt) -> list[ast.Subscript]:
    """The array elements that a statement itself reads or writes."""
    return [x for e in (s.trees if type(s) in (Assign, Accum) else s.held) for x in elements(e)]


def _without_first(arrays: Collection[str]) -> Callable[[ast.expr], ast.expr | None]:
    """Return the function that takes the first index from an element of some arrays."""

    def shorter(e: ast.expr) -> ast.expr | None:
        mine = isinstance(e, ast.Subscript) and isinstance(e.value, ast.Name) and e.value.id in arrays
        return element(base(e), [swap(i, shorter) for i in index(e)[1:]]) if mine else None

    return shorter


# Kernels ------------------------------------------------------------------------------------------------------------


@dataclass
class Local:
    """A local array.

    Attributes
    ----------
    shape : in what is known at the top of the kernel.
    dtype : its type; None for float64.
    owner : the variable of the parallel loop of which each iteration has its own: its first index; "" for none.
    """

    shape: list[ast.expr]
    dtype: ast.expr | None
    owner: str = ""

    def made(self, name: str, axis: int = 0) -> Assign:
        """Return the statement that makes it, without its first axes."""
        shape = self.shape[axis:]
        of = shape[0] if len(shape) == 1 else ast.Tuple(shape)
        value = quote("np.empty(shape, dtype)", shape=of, dtype=self.dtype or quote("np.float64"))
        return Assign(0, ast.Name(name), value)


@dataclass
class PlainKernel:
    """A kernel in the subset.

    Attributes
    ----------
    arrays : the parameters and locals that are arrays, with the number of their axes.
    ints : locals and arrays that hold integers, as far as indices and ranges tell.
    source : its lines by number.
    names : the numbers, functions and modules outside it that it uses.
    words : the names in each line of the source.
    local : the local arrays.
    before : for an array that it updates in place, the parameter that holds it as it was.
    rewritten : whether only its statements compile, and not its source.
    """

    name: str
    file: str
    params: list[str]
    body: list[Stmt]
    arrays: dict[str, int]
    ints: Names
    source: dict[int, str]
    names: dict[str, Any]
    views: dict[str, Reshape] = field(default_factory=dict)
    words: dict[int, Names] = field(default_factory=dict)
    local: dict[str, Local] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    rewritten: bool = False

    @property
    def taken(self) -> Names:
        """All names with a meaning in it."""
        return {*self.params, *self.local, *self.views, *assigned(self.body), *self.names}

    def root(self, name: str) -> str:
        """Return the array of a view, or the name itself."""
        return self.views[name].base if name in self.views else name

    def written(self, s: Assign) -> str:
        """The array or the local that an assignment writes."""
        return self.root(s.name)

    def read(self, trees: Iterable[ast.AST]) -> Names:
        """The arrays and locals that expressions read."""
        return {self.root(n) for e in trees for n in names(e)}

    def roots(self, found: Names) -> Names:
        """The roots of names."""
        return {self.root(n) for n in found}

    def forward(self) -> list[Stmt]:
        """Return the statements, with the local arrays; in a parallel loop, each iteration makes its own."""
        body = copy.deepcopy(self.body)
        for loop in [s for s in flat(body) if isinstance(s, For) and s.parallel]:
            mine = {n: x for n, x in self.local.items() if x.owner == loop.var and n in mentioned(loop.body)}
            for s in flat(loop.body):
                s.swap(_without_first(mine.keys()))
            loop.body[:0] = [x.made(n, axis=1) for n, x in mine.items()]
        return [*(x.made(n) for n, x in self.local.items() if not x.owner), *body]

    def rename(self, new: dict[str, str]) -> None:
        """Rename locals, views and globals, in place."""
        for s in flat(self.body):
            s.swap(lambda e: ast.Name(new[e.id]) if isinstance(e, ast.Name) and e.id in new else None)
            if isinstance(s, For):
                s.var = new.get(s.var, s.var)
                s.reduced = {new.get(n, n) for n in s.reduced}
            elif isinstance(s, Reshape):
                s.name = new.get(s.name, s.name)
        self.views = {s.name: s for s in flat(self.body) if isinstance(s, Reshape)}
        self.ints = {new.get(n, n) for n in self.ints}
        self.names = {new.get(n, n): value for n, value in self.names.items()}
        self.arrays = {new.get(n, n): axes for n, axes in self.arrays.items()}
        named = {n: ast.Name(other) for n, other in new.items()}
        self.local = {
            new.get(n, n): replace(x, shape=[quote(text(e), **named) for e in x.shape], owner=new.get(x.owner, x.owner))
            for n, x in self.local.items()
        }

    def at(self, line: int, why: str, instead: str) -> str:
        """Return an error with file, line and code."""
        return f"{self.file}:{line}: '{self.source.get(line, '').strip()}': {why}; {instead}"

    def refuse(self, line: int, why: str, instead: str) -> NoReturn:
        """Raise, with file, line and code."""
        raise UnsupportedError(self.at(line, why, instead))

    def refuse_parameter(self, why: str, instead: str = "give it another name") -> NoReturn:
        """Raise, with the line of the ``def``."""
        self.refuse(next(k for k, code in self.source.items() if code.lstrip().startswith("def ")), why, instead)

    def first_write(self, array: str) -> int:
        """The line that first writes to an array or to a view of it; 0 for none."""
        return next((s.line for s in flat(self.body) if isinstance(s, Assign) and self.written(s) == array), 0)


@dataclass
class Interface:
    """The arguments of the backward.

    Attributes
    ----------
    params : in call order; the flag of a gradient is its name and ``_add``.
    sizes : for arrays, the size of each axis as text that two arrays share if they must agree.
    optional : gradients that may be absent, of length zero.
    own_memory : whether the backward allocates its working memory; else it is passed, and named in `scratch`.
    scratch : name, factor and array: working memory of so many times the array's size.
    """

    params: list[str]
    sizes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    optional: Names = field(default_factory=set)
    own_memory: bool = True
    scratch: dict[str, tuple[int, str]] = field(default_factory=dict)

    def flag(self, name: str) -> str | None:
        """The flag that tells whether a gradient is added to."""
        return f"{name}_add" if f"{name}_add" in self.params else None


@dataclass
class Task:
    """The differentiation of one kernel.

    Attributes
    ----------
    wrt, outs : arrays whose adjoints are wanted, and given.
    saved : outputs that the backward is given as the forward left them.
    hidden : parameters that the backward is not given.
    fresh : outputs whose content before the call is not read.
    record_all : whether every overwritten value is recorded, without fusing or recomputing: slow and simple.
    """

    kernel: PlainKernel
    wrt: list[str]
    outs: list[str]
    saved: Names = field(default_factory=set)
    hidden: Names = field(default_factory=set)
    fresh: Names = field(default_factory=set)
    record_all: bool = False
