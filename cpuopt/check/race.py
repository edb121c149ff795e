"""What the iterations of a ``prange`` may write at one time, by a kernel's text: a hint once two equal calls differ."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def shared(function: Callable[..., Any]) -> str:
    """Return the first line on which iterations of a ``prange`` write to one place, and to what; or ""."""
    try:
        lines, first = inspect.getsourcelines(getattr(function, "py_func", function))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and _called(loop.iter).endswith("prange"):
            for node, said in (*_stores(loop), *_left(loop, tree)):
                return f"line {first + node.lineno - 1}: {said}"
    return ""


def _stores(loop: ast.For) -> Iterator[tuple[ast.expr, str]]:
    """Find elements of outer arrays whose place does not depend on the iteration."""
    own = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    varying = _varying(loop)
    for target in _subscripts(loop):
        base: ast.expr = target
        while isinstance(base, ast.Subscript | ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id not in own and not _names(target) & varying:
            yield target, f"`{base.id}` is made outside the prange and written in every iteration"


def _left(loop: ast.For, tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Find names that each iteration sets, and that are read once the loop has ended."""
    behind = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.lineno > (loop.end_lineno or 0)]
    first = {n.id: n for n in sorted(behind, key=lambda n: (-n.lineno, isinstance(n.ctx, ast.Load)))}
    after = {name for name, n in first.items() if isinstance(n.ctx, ast.Load)}
    for statement in ast.walk(loop):
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            if isinstance(target, ast.Name) and target.id in after:
                yield target, f"`{target.id}` is set in every iteration and read behind the prange"


def _varying(loop: ast.For) -> set[str]:
    """Return the names whose values depend on the iteration, or on the thread."""
    varying, known = _names(loop.target), set[str]()
    while varying != known:
        known = set(varying)
        for s in ast.walk(loop):
            of = s.value if isinstance(s, ast.Assign | ast.AugAssign) else s.iter if isinstance(s, ast.For) else None
            if of is not None and (_names(of) & varying or "thread" in ast.dump(of)):
                targets = s.targets if isinstance(s, ast.Assign) else [s.target]  # type: ignore[attr-defined]
                varying |= {t.id for target in targets for t in ast.walk(target)
                            if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}  # fmt: skip
    return varying


def _subscripts(loop: ast.For) -> Iterator[ast.Subscript]:
    for n in ast.walk(loop):
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store):
            yield n


def _called(of: ast.expr) -> str:
    return ast.unparse(of.func) if isinstance(of, ast.Call) else ""


def _names(of: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(of) if isinstance(n, ast.Name)}
