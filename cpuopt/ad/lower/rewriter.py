"""A walk over statements and expressions that may write statements before the one where an expression stands."""

from __future__ import annotations

import ast
import copy
from typing import Any

from ..trees import index
from .scope import Scope
from .text import is_atom, set_name


class Rewriter:
    """A pass that rewrites every expression of a kernel.

    Attributes
    ----------
    made : the statements of the current block so far.
    depth : how many branches and loops are around it.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.made: list[ast.stmt] = []
        self.depth = 0

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a block."""
        outer, self.made = self.made, []
        for s in body:
            self.statement(s)
        self.made, made = outer, self.made
        return made

    def inner(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a block that may run never or more than once."""
        self.depth += 1
        made = self.block(body)
        self.depth -= 1
        return made

    def put(self, at: ast.AST, target: ast.expr | str, value: ast.expr) -> None:
        """Write an assignment."""
        self.made.append(set_name(at, target, value))

    def named(self, at: ast.AST, word: str, value: ast.expr) -> ast.expr:
        """Name a value."""
        name = self.scope.fresh(word)
        self.put(at, name, value)
        return ast.copy_location(ast.Name(name, ast.Load()), at)

    def statement(self, s: ast.stmt) -> None:
        """Rewrite one statement."""
        match s:
            case ast.AnnAssign(target=target, value=value) if value:
                self.assign(s, target, value)
            case ast.Assign(targets=[target], value=value):
                self.assign(s, target, value)
            case ast.Assign(targets=targets, value=value):
                value = self.expr(value)
                if not is_atom(value):
                    value = self.named(s, "value", value)
                for target in targets:
                    self.assign(s, target, value)
            case ast.AugAssign(target=target, op=op, value=value):
                target = self.target(target)
                value = self.expr(value)
                if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div):
                    new = ast.AugAssign(target, op, value)  # type: ignore[arg-type]
                    self.made.append(ast.copy_location(new, s))
                else:
                    read = copy.copy(target)
                    read.ctx = ast.Load()  # type: ignore[attr-defined]
                    self.put(s, target, ast.copy_location(ast.BinOp(read, op, value), s))
            case ast.If():
                self.branch(s)
            case ast.For():
                self.loop(s)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                self.made.append(s)

    def assign(self, s: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Rewrite an assignment."""
        value = self.expr(value)
        self.put(s, self.target(target), value)

    def branch(self, s: ast.If) -> None:
        """Rewrite a branch."""
        test = self.expr(s.test)
        yes, no = self.inner(s.body), self.inner(s.orelse)
        if yes or no:
            self.made.append(ast.copy_location(ast.If(test, yes, no), s))

    def loop(self, s: ast.For) -> None:
        """Rewrite a loop."""
        s = copy.copy(s)
        if isinstance(s.iter, ast.Call):
            s.iter = ast.copy_location(ast.Call(s.iter.func, [self.expr(a) for a in s.iter.args], s.iter.keywords), s)
        s.body = self.loop_body(s)
        if s.body:
            self.made.append(s)

    def loop_body(self, s: ast.For) -> list[ast.stmt]:
        """Rewrite the body of a loop."""
        return self.inner(s.body)

    def target(self, t: ast.expr) -> ast.expr:
        """Rewrite a target."""
        if isinstance(t, ast.Subscript):
            found = self.element(t)
            return ast.copy_location(ast.Subscript(found.value, found.slice, ast.Store()), t)
        if isinstance(t, ast.Tuple | ast.List):
            return ast.copy_location(ast.Tuple([self.target(x) for x in t.elts], ast.Store()), t)
        return t

    def element(self, e: ast.Subscript) -> ast.Subscript:
        """Rewrite an element."""
        at = [self.index(i) for i in index(e)]
        place = at[0] if len(at) == 1 else ast.Tuple(at, ast.Load())
        value = self.element(e.value) if isinstance(e.value, ast.Subscript) else e.value
        return ast.copy_location(ast.Subscript(value, place, e.ctx), e)

    def index(self, i: ast.expr) -> ast.expr:
        """Rewrite an index, or the ends of a slice."""
        if isinstance(i, ast.Slice):
            lower, upper = (x and self.expr(x) for x in (i.lower, i.upper))
            return ast.copy_location(ast.Slice(lower, upper, i.step), i)
        return self.expr(i)  # type: ignore[no-any-return]

    def expr(self, e: ast.expr) -> Any:
        """Rewrite an expression; what has to come before it is written at once."""
        match e:
            case ast.Subscript():
                return self.element(e)
            case ast.IfExp():
                return self.either(e)
            case ast.BoolOp(op=op, values=[first, *rest]):
                new = [self.expr(first)]
                for v in rest:
                    before, value = self.apart(v)
                    if before:
                        why = "a function is called on one side of 'and' or 'or'"
                        self.scope.refuse(e, why, "assign its result first")
                    new.append(value)
                return ast.copy_location(ast.BoolOp(op, new), e)
            case ast.Call(func=func, args=args, keywords=keywords):
                return ast.copy_location(ast.Call(func, [self.expr(a) for a in args], keywords), e)
            case ast.BinOp(left=x, op=op, right=y):
                return ast.copy_location(ast.BinOp(self.expr(x), op, self.expr(y)), e)
            case ast.UnaryOp(op=op, operand=x):
                return ast.copy_location(ast.UnaryOp(op, self.expr(x)), e)
            case ast.Compare(left=x, ops=ops, comparators=ys):
                return ast.copy_location(ast.Compare(self.expr(x), ops, [self.expr(y) for y in ys]), e)
            case ast.Tuple(elts=elts, ctx=ctx):
                return ast.copy_location(ast.Tuple([self.expr(x) for x in elts], ctx), e)
        return e

    def either(self, e: ast.IfExp) -> ast.expr:
        """Rewrite a conditional expression: a branch, if something has to come before one of its sides."""
        test = self.expr(e.test)
        (yes, a), (no, b) = self.apart(e.body), self.apart(e.orelse)
        if not yes and not no:
            return ast.copy_location(ast.IfExp(test, a, b), e)
        name = self.scope.fresh("either")
        for block, value in ((yes, a), (no, b)):
            block.append(set_name(e, name, value))
        self.scope.count[name] = 2
        self.made.append(ast.copy_location(ast.If(test, yes, no), e))
        return ast.copy_location(ast.Name(name, ast.Load()), e)

    def apart(self, e: ast.expr) -> tuple[list[ast.stmt], ast.expr]:
        """Rewrite an expression that may not be evaluated; return what has to come before it, and it."""
        outer, self.made = self.made, []
        self.depth += 1
        found = self.expr(e)
        self.depth -= 1
        self.made, made = outer, self.made
        return made, found
