"""Expressions as `ast` trees: quoted, compared as text, put together, searched; no tree is ever changed in place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

Names = set[str]
T = TypeVar("T")
MODULES = {"np", "math"}
"""The modules whose functions are called, under the names that `cpuopt.ad.subset` gives them."""


def kept(function: Callable[[ast.AST], T]) -> Callable[[ast.AST], T]:
    """Cache a function's result for a tree with the tree, which is never changed."""
    key = f"kept_{function.__name__}"

    def found(e: ast.AST) -> T:
        if key not in vars(e):
            setattr(e, key, function(e))
        return vars(e)[key]  # type: ignore[no-any-return]

    return found


@kept
def text(e: ast.AST) -> str:
    """An expression as source."""
    return ast.unparse(swap(e, lambda _: None))  # a copy: a part that stands in two places has its own brackets in each


@cache
def _parsed(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body


def quote(code: str, **parts: ast.expr) -> Any:
    """The tree of an expression, with other trees in place of some of its names."""
    return swap(_parsed(code), lambda e: parts.get(e.id) if isinstance(e, ast.Name) else None)


def swap(e: Any, new: Callable[[ast.expr], ast.expr | None]) -> Any:
    """A copy of a tree, with `new` of each part of it that has one."""
    if isinstance(e, list | tuple):
        return type(e)(swap(x, new) for x in e)
    if not isinstance(e, ast.expr):
        return e
    if (found := new(e)) is not None:
        return found
    return type(e)(**{name: swap(part, new) for name, part in ast.iter_fields(e)})


def renamed(e: ast.expr, new: dict[str, str]) -> Any:
    """A copy of an expression with other names for some of its own."""
    return swap(e, lambda x: ast.Name(new.get(x.id, x.id)) if isinstance(x, ast.Name) else None)


def element(array: str, at: Sequence[ast.expr]) -> ast.Subscript:
    """An element of an array."""
    return ast.Subscript(ast.Name(array), at[0] if len(at) == 1 else ast.Tuple(list(at)))


def last_name(e: ast.expr) -> str:
    """The last part of a dotted name."""
    return e.attr if isinstance(e, ast.Attribute) else text(e)


def function_name(call: ast.Call) -> str:
    """Return the plain name of a called function: ``exp`` for ``np.exp``."""
    f = call.func
    if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id in MODULES:
        return f.attr
    return f.id if isinstance(f, ast.Name) else text(f)


@kept
def words(e: ast.AST) -> Names:
    """Every name in an expression."""
    return {n.id for n in ast.walk(e) if isinstance(n, ast.Name)}


@kept
def names(e: ast.AST) -> Names:
    """The names whose values an expression reads; that of x is not read by ``x.shape``."""
    match e:
        case ast.Attribute():
            return set()
        case ast.Call(args=args):
            return set().union(*map(names, args))
        case ast.Name(id=name):
            return {name}
    return set().union(*map(names, ast.iter_child_nodes(e)))


def base(target: ast.expr) -> str:
    """The name that a target writes."""
    node = target.value if isinstance(target, ast.Subscript) else target
    assert isinstance(node, ast.Name)
    return node.id


def index(e: ast.expr) -> list[ast.expr]:
    """The indices of an element, one an axis; none of a name."""
    if not isinstance(e, ast.Subscript):
        return []
    return list(e.slice.elts) if isinstance(e.slice, ast.Tuple) else [e.slice]


@kept
def elements(e: ast.AST) -> list[ast.Subscript]:
    """The array elements that an expression reads, those in indices too."""
    return [n for n in ast.walk(e) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)]
