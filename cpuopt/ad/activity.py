"""Activity: the values that have an adjoint, and the values that the adjoint of a statement reads.

A value is *varied* if it depends on an input to differentiate with respect to, *useful* if an output depends on it, and
active if it is both. Only active values have adjoints.
"""

from __future__ import annotations

import ast

from .finite import Finite
from .flows import RESULT, SEED, flows, reached
from .kernel import Assign, For, LogSumExp, Stmt, Task, flat
from .rules import CASTS, negative, power, rule, times
from .trees import Names, elements, function_name, index, names, quote, text

Leaf = tuple[ast.expr, ast.expr]


class Activity:
    """The active values of one task.

    Attributes
    ----------
    active : names that have an adjoint.
    derivatives : for each assignment that has an adjoint, its leaves, each with the derivative times `SEED`.
    needs : for each assignment, the names whose value before it its adjoint reads.
    result : for each assignment, the names whose value after it its adjoint reads.
    """

    def __init__(self, task: Task) -> None:
        self.kernel, self.finite = task.kernel, Finite(task.kernel)
        self.active = reached(self.kernel, task.wrt, forward=True) & reached(self.kernel, task.outs, forward=False)
        self.derivatives: dict[Stmt, list[Leaf]] = {}
        self.needs: dict[Stmt, Names] = {}
        self.result: dict[Stmt, Names] = {}
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
            if isinstance(s, For) and any(self.is_active(e) for e in s.bounds[:2]):
                self.kernel.refuse(s.line, "the range depends on what is differentiated", "use int(...) in ranges")
            if isinstance(s, Assign):
                self.differentiate(s)

    def check_index(self, s: Stmt, element: ast.Subscript) -> None:
        """Refuse an active index."""
        for i in index(element):
            if self.is_active(i):
                why = f"the index '{text(i)}' depends on what is differentiated"
                self.kernel.refuse(s.line, why, "use int(...)")

    def is_active(self, e: ast.AST) -> bool:
        """Return whether a derivative runs through an expression."""
        return any(self.kernel.root(n) in self.active for n in flows(e))

    def leaves(self, s: Assign, e: ast.expr, seed: ast.expr, divided: bool = False) -> list[Leaf]:
        """The active names and elements that an expression reads, each with the derivative times `seed`.

        The derivative may read `RESULT`, the value of the whole statement. `divided` is that of `Finite.slope`.
        """
        if not self.is_active(e):
            return []
        if one := rule(self.kernel, e, self.is_active):
            name, args, derivatives = one
            parts = {"x": args[0], "z": args[-1], "y": RESULT}
            steep = self.finite.singular(name, args[0])
            slopes = [self.finite.slope(s, quote(d, **parts), seed, steep, divided) for d in derivatives]
            found = [self.leaves(s, x, times(seed, d), divided) if self.is_active(x) else []
                     for x, d in zip(args, slopes, strict=True)]  # fmt: skip
            return [leaf for leaves in found for leaf in leaves]
        match e:
            case ast.Name() | ast.Subscript():
                return [(e, seed)]
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return self.leaves(s, x, negative(seed), divided)
            case ast.UnaryOp(op=ast.UAdd(), operand=x):
                return self.leaves(s, x, seed, divided)
            case ast.BinOp(left=x, op=ast.Add(), right=y):
                return self.leaves(s, x, seed, divided) + self.leaves(s, y, seed, divided)
            case ast.BinOp(left=x, op=ast.Sub(), right=y):
                return self.leaves(s, x, seed, divided) + self.leaves(s, y, negative(seed), divided)
            case ast.BinOp(left=x, op=ast.Mult(), right=y):
                a, b = (self.finite.slope(s, z, seed, divided=divided) for z in (x, y))
                return self.leaves(s, x, times(seed, b), divided) + self.leaves(s, y, times(seed, a), divided)
            case ast.BinOp(left=x, op=ast.Div(), right=y):
                by = self.finite.divisor(y, seed)
                over = ast.BinOp(seed, ast.Div(), by)
                down = negative(ast.BinOp(times(over, self.finite.slope(s, x, over, divided=divided)), ast.Div(), by))
                return self.leaves(s, x, over, True) + self.leaves(s, y, down, True)
            case ast.BinOp(left=x, op=ast.Mod(), right=y):
                whole = self.finite.slope(s, quote("x // y", x=x, y=y), seed, self.finite.may_be_zero(y), divided)
                return self.leaves(s, x, seed, divided) + self.leaves(s, y, negative(times(seed, whole)), divided)
            case ast.BinOp(left=x, op=ast.Pow(), right=n):
                self.needs[s] |= names(x)  # for the exponents 0 and 1 too
                slope = self.finite.slope(s, power(x, n), seed, self.finite.may_overflow(e), divided)
                return self.leaves(s, x, times(seed, slope), divided)
            case ast.Call(args=[x]) if function_name(e) in CASTS:
                return self.leaves(s, x, seed, divided)
        self.kernel.refuse(s.line, f"'{text(e)}' has no derivative", "use only + - * / and the functions of docs/ad.md")

    def has_adjoint(self, s: Stmt) -> bool:
        """Return whether the reverse of a statement does anything."""
        if isinstance(s, Assign):
            return self.kernel.written(s) in self.active
        return any(self.has_adjoint(x) for x in [*getattr(s, "body", []), *getattr(s, "orelse", [])])

    def differentiate(self, s: Assign) -> None:
        """Find the derivatives of an assignment, and the values that its adjoint reads: before it, and after it."""
        self.needs[s], self.result[s] = set(), set()
        if not self.has_adjoint(s):
            return
        self.needs[s] |= names(s.target.slice) if isinstance(s.target, ast.Subscript) else set()
        if isinstance(s, LogSumExp):
            found = self.derivatives[s] = self.leaves(s, s.term, times(SEED, s.weight))
            self.needs[s] = self.needs[s].union(*map(names, s.loop.bounds[:2]))
            self.result[s] = {s.name} & names(s.weight)
        else:
            found = self.derivatives[s] = self.leaves(s, s.value, SEED)
        for e, d in found:
            self.needs[s] |= names(d) | {n for i in index(e) for n in names(i)}
        if RESULT.id in self.needs[s]:
            self.result[s] = {s.name}
        self.needs[s] -= {RESULT.id, SEED.id} | ({s.loop.var, s.name} if isinstance(s, LogSumExp) else set())
