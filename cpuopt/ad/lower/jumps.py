"""The passes that leave loops over ranges without jumps: what a jump skips goes into branches."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from ..trees import last_name, quote
from .scope import Scope
from .text import set_name

EACH = "<each>"
"""The call that stands for the number of elements or rows that a loop runs over; `cpuopt.ad.lower.parts` reads it."""


def jumps(s: ast.AST, kinds: tuple[type, ...]) -> Iterator[ast.AST]:
    """The jumps inside a statement; ``break`` and ``continue`` of inner loops are their own."""
    if isinstance(s, kinds):
        yield s
    inner = kinds if not isinstance(s, ast.For | ast.While) else tuple(k for k in kinds if k is ast.Return)
    for child in ast.iter_child_nodes(s):
        if isinstance(child, ast.stmt) and inner:
            yield from jumps(child, inner)


def settle(
    body: list[ast.stmt], kinds: tuple[type, ...], on: Callable[[Any], list[ast.stmt]], scope: Scope
) -> list[ast.stmt]:
    """Write jumps as branches: what follows an ``if`` that may jump goes into those of its branches that do not."""
    made: list[ast.stmt] = []
    for k, s in enumerate(body):
        if isinstance(s, kinds):
            return [*made, *on(s)]
        if not any(True for _ in jumps(s, kinds)):
            made.append(s)
            continue
        if not isinstance(s, ast.If):
            scope.refuse(next(jumps(s, kinds)), "a return inside a loop", "assign the result and break")
        rest = body[k + 1 :]
        new = copy.copy(s)
        new.body = settle([*s.body, *copy.deepcopy(rest)], kinds, on, scope) or [ast.copy_location(ast.Pass(), s)]
        new.orelse = settle([*s.orelse, *rest], kinds, on, scope)
        return [*made, new]
    return made


def without_returns(body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
    """A kernel's statements without ``return``."""
    found = [j for s in body for j in jumps(s, (ast.Return,))]
    if any(j.value for j in found):  # type: ignore[attr-defined]
        scope.refuse(found[0], "Return is not in the differentiable subset", "write to an array parameter")
    return settle(body, (ast.Return,), lambda j: [], scope)


class Loops:
    """The pass over loops: each runs over a range, forwards, to its end."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.around: list[ast.For] = []

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite the loops of a block."""
        return [new for s in body for new in self.statement(s)]

    def statement(self, s: ast.stmt) -> list[ast.stmt]:
        """Rewrite the loops of a statement."""
        if isinstance(s, ast.For):
            return self.loop(s)
        if isinstance(s, ast.If):
            return [ast.copy_location(ast.If(s.test, self.block(s.body), self.block(s.orelse)), s)]
        return [s]

    def loop(self, s: ast.For) -> list[ast.stmt]:
        """Rewrite a loop."""
        s = self.over_range(copy.copy(s))
        if isinstance(s.target, ast.Name) and any(
            isinstance(o.target, ast.Name) and o.target.id == s.target.id == "_" for o in self.around
        ):
            s.target = ast.Name(self.scope.fresh("again"), ast.Store())
        kinds = (ast.Break, ast.Continue)
        breaks = [j for b in s.body for j in jumps(b, kinds) if isinstance(j, ast.Break)]
        before: list[ast.stmt] = []
        go = ""
        if breaks:
            if isinstance(s.iter, ast.Call) and last_name(s.iter.func) == "prange":
                self.scope.refuse(breaks[0], "numba has no break in a prange", "loop over a range")
            go = self.scope.fresh("go")
            self.scope.indices.add(go)
            self.scope.count[go] = 2
            before = [set_name(s, go, quote("1"))]

        def on(j: ast.stmt) -> list[ast.stmt]:
            return [set_name(j, go, quote("0"))] if isinstance(j, ast.Break) else []

        s.body = settle(s.body, kinds, on, self.scope)
        if go:
            s.body = [ast.copy_location(ast.If(quote("go > 0", go=ast.Name(go)), s.body, []), breaks[0])]
        self.around.append(s)
        s.body = self.block(s.body)
        self.around.pop()
        return [*before, s]

    def over_range(self, s: ast.For) -> ast.For:
        """A loop over a range in place of one over an array, or over a range reversed."""
        match s.iter:
            case ast.Call(func=ast.Name(id="reversed"), args=[ast.Call(func=ast.Name(id="range"), args=args)]):
                if len(args) == 3:
                    self.scope.refuse(s, "reversed(range(...)) has a step", "write the range downwards")
                lo, hi = (quote("0"), args[0]) if len(args) == 1 else args
                call = [quote("hi - 1", hi=hi), quote("lo - 1", lo=lo), quote("-1")]
                s.iter = ast.copy_location(ast.Call(ast.Name("range"), call, []), s.iter)
                self.scope.rewritten = True
            case ast.Call(func=ast.Name(id="enumerate"), args=[x]) if isinstance(s.target, ast.Tuple):
                return self.over(s, s.target.elts[0], [(s.target.elts[1], x)])
            case ast.Call(func=ast.Name(id="zip"), args=xs) if isinstance(s.target, ast.Tuple):
                return self.over(s, ast.Name(self.scope.fresh("k")), list(zip(s.target.elts, xs, strict=True)))
            case ast.Name() | ast.Subscript() as x:
                return self.over(s, ast.Name(self.scope.fresh("k")), [(s.target, x)])
        return s

    def over(self, s: ast.For, var: ast.expr, parts: list[tuple[ast.expr, ast.expr]]) -> ast.For:
        """A loop over the elements, or rows, of arrays as a loop over their index."""
        if not isinstance(var, ast.Name):
            self.scope.refuse(s, "the loop variable is not a name", "write for i in range(...)")
        each = ast.copy_location(ast.Call(ast.Name(EACH), [parts[0][1]], []), s)
        s.iter = ast.copy_location(quote("range(n)", n=each), s)
        s.target = ast.Name(var.id, ast.Store())
        taken: list[ast.stmt] = []
        for target, x in parts:
            value = ast.copy_location(ast.Subscript(x, ast.Name(var.id), ast.Load()), s)
            taken.append(ast.copy_location(ast.Assign([target], value), s))
        s.body = [*taken, *s.body]
        return s
