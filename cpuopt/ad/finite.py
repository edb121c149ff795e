"""The guards of slopes that may not be finite: an adjoint of 0 stays 0 there, though 0 times infinity is NaN.

A branch may leave out a result whose slope is infinite, as ``rho if rho > 0 else 0`` does for ``rho = sqrt(0)``; and
``1 / (1 + exp(-x))`` is 0 if exp overflows. Two kinds of terms are guarded: functions with an infinite slope, and
divisors that may be 0, always; what multiplies an adjoint that may be 0, if it may be infinite.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .flows import RESULT, flows, reached
from .kernel import NUMBER, Assign, If, PlainKernel, Stmt, flat
from .rules import CASTS, GROWING, SINGULAR, negated, spared
from .trees import Names, function_name, names, text

ROOTS = {"log", "log2", "log10", "sqrt", "rsqrt"}
"""The functions whose slope is finite above 0."""
NEVER_BELOW_ZERO = {"exp", "exp2", "abs", "fabs", "sqrt", "cosh"}


class Finite:
    """The guards of one kernel.

    Attributes
    ----------
    unbounded : names that may hold infinity, or no number, though all inputs are finite.
    cut : names whose adjoint may be 0 while they do: read in a branch, as a divisor or by a function.
    """

    def __init__(self, kernel: PlainKernel) -> None:
        self.kernel = kernel
        every = [s for s in flat(kernel.body) if isinstance(s, Assign)]
        self.values: dict[str, list[ast.expr]] = {}
        for s in every:
            self.values.setdefault(s.name, []).append(s.value)
        self.moving = reached(kernel, kernel.arrays, forward=True)
        start = {kernel.written(s) for s in every if any(map(self.may_overflow, ast.walk(s.value)))}
        self.unbounded = reached(kernel, start, forward=True)
        read = {n for e in self.read_under(kernel.body) for n in flows(e)}
        self.cut = reached(kernel, kernel.roots(read), forward=False)

    def read_under(self, block: Iterable[Stmt], branch: bool = False) -> Iterable[ast.AST]:
        """Find what is read in a branch, as a divisor or as a function's argument."""
        for s in block:
            for e in [s.value] if isinstance(s, Assign) else []:
                yield from [e] if branch else []
                for x in ast.walk(e):
                    if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Div):
                        yield x.right
                    elif isinstance(x, ast.Call) and function_name(x) not in CASTS:
                        yield from x.args
            for inner in s.blocks:
                yield from self.read_under(inner, branch or isinstance(s, If))

    def may_overflow(self, e: ast.AST) -> bool:
        """Return whether an operation on finite numbers may give infinity, or no number."""
        match e:
            case ast.BinOp(op=ast.Div() | ast.Mod(), right=y):
                return self.may_be_zero(y)
            case ast.BinOp(op=ast.Pow(), right=n):
                return not (isinstance(n, ast.Constant) and isinstance(n.value, int))
            case ast.Call(args=[x, *_]):
                known = not any(self.kernel.root(n) in self.moving for n in names(e))
                return not known and (self.singular(function_name(e), x) or self.grows(function_name(e), x))
        return False

    def singular(self, name: str, x: ast.expr) -> bool:
        """Return whether the slope of a function of x may be infinite where x is finite."""
        safe = (name in ROOTS and self.positive(x)) or (name == "log1p" and self.not_negative(x))
        return name in SINGULAR and not safe

    def grows(self, name: str, x: ast.expr) -> bool:
        """Return whether a function may overflow."""
        minus = negated(x)
        return name in GROWING and not (name.startswith("exp") and minus and self.not_negative(minus))

    def may_be_zero(self, e: ast.expr) -> bool:
        """Return whether a divisor may be 0: it depends on arrays, and nothing shows that it is positive."""
        return any(self.kernel.root(n) in self.moving for n in names(e)) and not self.positive(e)

    def positive(self, e: ast.expr, seen: Names = frozenset()) -> bool:  # type: ignore[assignment]
        """Return whether a number is certainly above 0."""
        match e:
            case ast.Constant(value=int() | float() as value):
                return value > 0
            case ast.Name(id=name) if isinstance(number := self.kernel.names.get(name), NUMBER):
                return bool(number > 0)
            case ast.Name(id=name) if name in self.values:
                return name not in seen and all(self.positive(x, seen | {name}) for x in self.values[name])
            case ast.BinOp(left=x, op=ast.Add(), right=y):
                return any(self.positive(a, seen) and self.not_negative(b, seen) for a, b in ((x, y), (y, x)))
            case ast.Call(args=[x]) if function_name(e) in CASTS | {"sqrt"}:
                return self.positive(x, seen)
        return isinstance(e, ast.Call) and function_name(e) == "cosh"

    def not_negative(self, e: ast.expr, seen: Names = frozenset()) -> bool:  # type: ignore[assignment]
        """Return whether a number is certainly not below 0; a sum may be of what it already holds."""
        match e:
            case ast.Constant(value=int() | float() as value):
                return value >= 0
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return True
            case ast.Name(id=name) if name in self.values:
                return name in seen or all(self.not_negative(x, seen | {name}) for x in self.values[name])
            case ast.BinOp(left=x, op=ast.Mult(), right=y) if text(x) == text(y):
                return True
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=2)):
                return True
            case ast.BinOp(left=x, op=ast.Add() | ast.Mult() | ast.Div(), right=y):
                return self.not_negative(x, seen) and self.not_negative(y, seen)
            case ast.Call(args=[x]):
                name = function_name(e)
                return name in NEVER_BELOW_ZERO or (name in CASTS and self.not_negative(x, seen))
        return self.positive(e, seen)

    def slope(self, s: Assign, e: ast.expr, seed: ast.expr, always: bool = False, divided: bool = False) -> ast.expr:
        """Return a slope, or what multiplies an adjoint, with its guard if it needs one.

        Parameters
        ----------
        seed : the adjoint that it multiplies.
        always : whether it may be infinite.
        divided : whether the adjoint was divided in the same statement, so it may be 0.
        """
        read = self.kernel.roots({s.name if n == RESULT.id else n for n in names(e)})
        open_ended = read & self.unbounded or any(map(self.may_overflow, ast.walk(e)))
        needed = always or ((divided or self.kernel.written(s) in self.cut) and open_ended)
        return spared(e, negated(seed) or seed) if needed else e

    def divisor(self, e: ast.expr, seed: ast.expr) -> ast.expr:
        """Return what divides an adjoint, with its guard if it needs one."""
        one = ast.BinOp(ast.Name("ONE"), ast.Div(), e)
        return spared(one, negated(seed) or seed).right if self.may_be_zero(e) else e
