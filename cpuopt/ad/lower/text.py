"""What the text of statements says: which names they assign, mention and read."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from typing import Any


def stores(block: Iterable[ast.AST]) -> list[str]:
    """The names that statements assign, once for each place."""
    return [
        n.id
        for s in block
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and isinstance(getattr(n, "ctx", None), ast.Store)
    ]


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.stmt]]:
    """Every name that is assigned, with value and statement; if a value is unpacked, with all of it."""
    for s in ast.walk(node):
        if not isinstance(s, ast.Assign):
            continue
        for t in s.targets:
            several = isinstance(t, ast.Tuple | ast.List)
            pairs = [(t, s.value)] if not several else [(x, s.value) for x in t.elts]  # type: ignore[attr-defined]
            if several and isinstance(s.value, ast.Tuple | ast.List):
                pairs = list(zip(t.elts, s.value.elts, strict=False))  # type: ignore[attr-defined]
            yield from ((x.id, v, s) for x, v in pairs if isinstance(x, ast.Name))


def swapped(s: ast.stmt) -> tuple[str, str] | None:
    """The names in ``a, b = b, a``."""
    match s:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=a), ast.Name(id=b)])],
            value=ast.Tuple(elts=[ast.Name(id=c), ast.Name(id=d)]),
        ) if (a, b) == (d, c):
            return a, b
    return None


def mentions(nodes: Iterable[ast.AST]) -> list[str]:
    """Every name, once for each place."""
    return [n.id for s in nodes for n in ast.walk(s) if isinstance(n, ast.Name)]


def elements_stored(block: Iterable[ast.AST]) -> set[str]:
    """The arrays of which statements assign elements."""
    return {base(n) for s in block for n in ast.walk(s) if isinstance(n, ast.Subscript)
            and isinstance(getattr(n, "ctx", None), ast.Store)}  # fmt: skip


def uses(block: Iterable[ast.AST], name: str) -> int:
    """How often statements read a name; more than once in a loop."""
    found = 0
    for s in block:
        for n in ast.walk(s):
            found += isinstance(n, ast.Name) and n.id == name and isinstance(getattr(n, "ctx", None), ast.Load)
            found += 2 * isinstance(n, ast.For) and any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(n))
    return found


def is_atom(e: ast.expr) -> bool:
    """Return whether an expression is a name or a number."""
    return isinstance(e, ast.Constant | ast.Name) or (isinstance(e, ast.UnaryOp) and is_atom(e.operand))


def axis_number(e: ast.expr) -> int | None:
    """The number of an axis, which may count from the end; None for other expressions."""
    number = e.operand if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub) else e
    if not isinstance(number, ast.Constant) or type(number.value) is not int:
        return None
    return number.value if number is e else -number.value


def base(t: ast.expr) -> str:
    """The name that a target writes."""
    while isinstance(t, ast.Subscript):
        t = t.value
    return t.id if isinstance(t, ast.Name) else ""


def set_name(at: ast.AST, target: ast.expr | str, value: ast.expr) -> ast.Assign:
    """An assignment with the place of another statement."""
    target = ast.Name(target, ast.Store()) if isinstance(target, str) else target
    return ast.copy_location(ast.Assign([target], value), at)


def renamed(node: Any, new: dict[str, str], values: dict[str, ast.expr] | None = None) -> Any:
    """A copy of a statement with other names."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, n: ast.Name) -> ast.expr:
            if values and n.id in values and isinstance(getattr(n, "ctx", None), ast.Load):
                return ast.copy_location(copy.copy(values[n.id]), n)
            return ast.copy_location(ast.Name(new.get(n.id, n.id), getattr(n, "ctx", ast.Load())), n)

    return Rename().visit(copy.deepcopy(node))
