"""Activity: which values have an adjoint, and what the adjoint of a statement reads.

A value is *varied* if it depends on an input to differentiate with respect to, *useful* if an output depends on it, and
active if it is both. Only active values have adjoints.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .kernel import (
    Assign,
    For,
    Kernel,
    LogSumExp,
    Names,
    Stmt,
    Task,
    elements,
    flat,
    function_name,
    index,
    kept,
    names,
    quote,
    text,
)
from .rules import CASTS, DERIVATIVE, rule


@kept
def flows(e: ast.AST) -> Names:
    """The names that a derivative of an expression may run through: not those of indices, tests and comparisons."""
    match e:
        case ast.Name(id=name):
            return {name}
        case ast.Subscript(value=ast.Name(id=name)):
            return {name}
        case ast.Compare() | ast.BoolOp() | ast.Attribute() | ast.Subscript():
            return set()
        case ast.IfExp(body=x, orelse=y):
            return flows(x) | flows(y)
        case ast.Call(args=args):
            return set().union(*map(flows, args))
    return set().union(*map(flows, ast.iter_child_nodes(e)), set())


def sources(kernel: Kernel, s: Assign) -> Names:
    """What a statement's adjoint may go to."""
    e = s.term if isinstance(s, LogSumExp) else s.value
    return {kernel.root(n) for n in flows(e)}


def varied(kernel: Kernel, wrt: Iterable[str]) -> Names:
    """The names that depend on `wrt`, to a fixpoint."""
    found, size = set(wrt), -1
    while size != len(found):
        size = len(found)
        for s in flat(kernel.body):
            if isinstance(s, Assign) and sources(kernel, s) & found:
                found.add(kernel.written(s))
    return found


def useful(kernel: Kernel, outs: Iterable[str]) -> Names:
    """The names that `outs` depend on, to a fixpoint."""
    found, size = set(outs), -1
    while size != len(found):
        size = len(found)
        for s in flat(kernel.body):
            if isinstance(s, Assign) and kernel.written(s) in found:
                found |= sources(kernel, s)
    return found


class Activity:
    """What is active in one task.

    Attributes
    ----------
    active : names that have an adjoint.
    """

    def __init__(self, task: Task) -> None:
        self.kernel = task.kernel
        self.active = varied(self.kernel, task.wrt) & useful(self.kernel, task.outs)
        self.known_needs: dict[Stmt, Names] = {}
        self.check_active()

    def check_active(self) -> None:
        """Refuse indices, bounds and integer arithmetic on active values."""
        k = self.kernel
        for s in flat(k.body):
            for e in [*s.held, *([s.term] if isinstance(s, LogSumExp) else [])]:
                for element in elements(e) if not isinstance(s, For) else ():
                    self.check_index(s, element)
            if isinstance(s, Assign) and isinstance(s.target, ast.Subscript):
                self.check_index(s, s.target)
            if isinstance(s, For) and any(self.names_active(e) for e in s.bounds[:2]):
                self.kernel.refuse(s.line, "the range depends on what is differentiated", "use integers in ranges")
            if isinstance(s, Assign) and not isinstance(s, LogSumExp) and k.written(s) in self.active:
                self.check_expression(s, s.value)

    def check_index(self, s: Stmt, element: ast.Subscript) -> None:
        """Refuse an active index."""
        for i in index(element):
            if self.names_active(i):
                why = f"the index '{text(i)}' depends on what is differentiated"
                self.kernel.refuse(s.line, why, "use ints")

    def is_active(self, e: ast.AST) -> bool:
        """Whether a derivative runs through an expression."""
        return any(self.kernel.root(n) in self.active for n in flows(e))

    def names_active(self, e: ast.AST) -> bool:
        """Whether an expression reads an active value at all, in an index or a test too."""
        return any(self.kernel.root(n) in self.active for n in names(e))

    def check_expression(self, s: Assign, e: ast.expr) -> None:
        """Refuse what has no derivative."""
        if not self.is_active(e):
            return
        match e:
            case ast.Name() | ast.Subscript():
                return
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=x):
                return self.check_expression(s, x)
            case ast.BinOp(left=x, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=y):
                self.check_expression(s, x)
                return self.check_expression(s, y)
            case ast.BinOp(left=x, op=ast.Pow(), right=y) if not self.names_active(y):
                return self.check_expression(s, x)
            case ast.BinOp(op=ast.Pow()):
                why = "the exponent depends on what is differentiated"
                self.kernel.refuse(s.line, why, "write it with exp and log")
        if found := rule(self.kernel, e):
            return self.check_expression(s, found[1])
        if isinstance(e, ast.Call) and function_name(e) in CASTS:
            return self.check_expression(s, e.args[0])
        self.kernel.refuse(s.line, f"'{text(e)}' has no derivative", "use only + - * / and the functions of docs/ad.md")

    def has_adjoint(self, s: Stmt) -> bool:
        """Whether the reverse of a statement does anything."""
        if isinstance(s, Assign):
            return self.kernel.written(s) in self.active
        return any(self.has_adjoint(x) for x in [*getattr(s, "body", []), *getattr(s, "orelse", [])])

    def needs(self, s: Assign) -> Names:
        """The values before the statement that its adjoint reads."""
        if s not in self.known_needs:
            self.known_needs[s] = self.find_needs(s)
        return self.known_needs[s]

    def find_needs(self, s: Assign) -> Names:
        """Work `needs` out."""
        if not self.has_adjoint(s):
            return set()
        found: Names = set()
        if isinstance(s.target, ast.Subscript):
            found |= names(s.target.slice)
        if isinstance(s, LogSumExp):
            for e in s.loop.bounds[:2]:
                found |= names(e)
            found |= names(s.weight) - {s.name}
            self.pull(s.term, found)
            return found - {s.loop.var}
        self.pull(s.value, found, whole=type(s) is Assign)
        return found

    def result(self, s: Assign) -> Names:
        """The names whose value after the statement its adjoint reads."""
        if not self.has_adjoint(s):
            return set()
        if isinstance(s, LogSumExp):
            return {s.name} & names(s.weight)
        found = rule(self.kernel, s.value)
        if found and type(s) is Assign and self.is_active(s.value):
            if "y" in names(quote(DERIVATIVE[found[0]])):
                return {s.name}
        return set()

    def pull(self, e: ast.expr, found: Names, whole: bool = False) -> None:
        """Collect what the partial derivatives of an expression read."""
        if not self.is_active(e):
            return
        match e:
            case ast.Name():
                return
            case ast.Subscript():
                found |= names(e.slice)
                return
            case ast.UnaryOp(operand=x):
                return self.pull(x, found)
        if one := rule(self.kernel, e):
            if "x" in names(quote(DERIVATIVE[one[0]])):
                found |= names(one[1])
            return self.pull(one[1], found)
        if isinstance(e, ast.BinOp):
            if isinstance(e.op, ast.Mult | ast.Div | ast.Pow):
                if self.is_active(e.left):
                    found |= names(e.right)
                if isinstance(e.op, ast.Pow) or self.is_active(e.right):
                    found |= names(e.left)
                if isinstance(e.op, ast.Div):
                    found |= names(e.right)
            self.pull(e.left, found)
            self.pull(e.right, found)
        elif isinstance(e, ast.Call):
            self.pull(e.args[0], found)
