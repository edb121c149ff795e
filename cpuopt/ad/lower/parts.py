"""Parts of arrays: what ``row = x[i]`` stands for, its axes, their sizes, and its elements."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from .. import whole
from ..rules import negated
from ..trees import index, quote, text, words
from .helpers import Helpers
from .jumps import EACH
from .rewriter import Rewriter
from .scope import Scope
from .text import axis_number


@dataclass
class ArrayPart:
    """A part of an array under a name: its indices, None if an axis is whole, or the ends of a slice."""

    array: str
    at: list[ast.expr | tuple[ast.expr, ast.expr] | None]


class Parts(Rewriter):
    """The rewrite of expressions: every row is read by element.

    Attributes
    ----------
    helpers : writes the loop in place of NumPy's function of a whole row.
    rows : the parts that names stand for now.
    loops : the loops around the statement.
    """

    def __init__(self, scope: Scope, helpers: Helpers) -> None:
        super().__init__(scope)
        self.helpers = helpers
        self.rows: dict[str, ArrayPart] = {}
        self.loops: list[ast.For] = []

    # Parts -----------------------------------------------------------------------------------------------------------

    def row(self, e: ast.expr) -> ArrayPart | None:
        """The part of an array that an expression names; None if it is none."""
        match e:
            case ast.Name(id=name) if name in self.rows:
                return self.rows[name]
            case ast.Name(id=name) if name in self.scope.params and name in self.scope.arrays:
                return ArrayPart(name, [])
            case ast.Name(id=name):
                return self.local(name)
            case ast.Subscript(value=value) if (of := self.row(value)) is not None:
                return self.part(e, of, index(e))
        return None

    def local(self, name: str) -> ArrayPart | None:
        """The local array that a name stands for."""
        raise NotImplementedError

    def part(self, e: ast.AST, of: ArrayPart, at: list[ast.expr]) -> ArrayPart:
        """A part of a part."""
        new: list[Any] = []
        rest = list(at)
        for a in of.at:
            if isinstance(a, ast.expr) or not rest:
                new.append(a)
            else:
                new.append(self.shifted(e, a, rest.pop(0)))
        new += [self.shifted(e, None, i) for i in rest]
        return ArrayPart(of.array, new)

    def shifted(self, e: ast.AST, whole: Any, i: ast.expr) -> Any:
        """An index along an axis that is whole, or starts later."""
        refuse = self.scope.refuse
        if isinstance(i, ast.Slice):
            if i.step is not None:
                refuse(e, "a slice with a step is not in the subset", "loop over the indices")
            if i.lower is None and i.upper is None:
                return whole
            if i.upper is None or whole is not None or any(negated(x) for x in (i.lower, i.upper) if x):
                refuse(e, "a slice is not in the subset", "loop over the indices")
            return (self.expr(i.lower) if i.lower else quote("0"), self.expr(i.upper))
        i = self.expr(i)
        if whole is None:
            return i
        if negated(i):
            refuse(e, "an index from the end of a slice", "count from its start")
        return i if text(whole[0]) == "0" else quote("lo + i", lo=whole[0], i=i)

    def frozen(self, s: ast.AST, row: ArrayPart) -> ArrayPart:
        """A row whose indices stay what they are now."""
        scope = self.scope

        def stays(e: ast.expr) -> bool:
            loops = {o.target.id for o in self.loops if isinstance(o.target, ast.Name)}
            return all(n in loops or (scope.count.get(n, 0) <= 1 and n not in scope.stored) for n in words(e))

        def keep(e: Any) -> Any:
            if e is None:
                return None
            if isinstance(e, tuple):
                return tuple(map(keep, e))
            if stays(e):
                return e
            new = self.named(s, "at", e)
            scope.indices |= words(new)
            return new

        return ArrayPart(row.array, [keep(a) for a in row.at])

    def free(self, row: ArrayPart) -> int:
        """The number of axes of a row."""
        rank = max(self.scope.ranks.get(row.array, 0), len(row.at))
        return sum(not isinstance(a, ast.expr) for a in row.at) + rank - len(row.at)

    def extent(self, row: ArrayPart, k: int) -> ast.expr:
        """The size of a row along one of its axes."""
        axes = [j for j, a in enumerate(row.at) if not isinstance(a, ast.expr)]
        axis = axes[k] if k < len(axes) else len(row.at) + k - len(axes)
        part = row.at[axis] if axis < len(row.at) else None
        if isinstance(part, tuple):
            lo, hi = part
            return hi if text(lo) == "0" else quote("hi - lo", hi=hi, lo=lo)
        if row.array in self.scope.local:
            return self.scope.local[row.array].shape[axis]
        return quote("x.shape[k]", x=ast.Name(row.array), k=ast.Constant(axis))  # type: ignore[no-any-return]

    def extents(self, row: ArrayPart) -> list[ast.expr]:
        """The sizes of a row."""
        return [self.extent(row, k) for k in range(self.free(row))]

    def of(self, e: ast.AST, row: ArrayPart, at: list[ast.expr]) -> ast.Subscript:
        """An element of a row."""
        found = self.part(e, row, at)
        parts: list[ast.expr] = []
        for a in found.at:
            if not isinstance(a, ast.expr):
                why = f"'{found.array}' is read with a slice, or with fewer indices than axes"
                self.scope.refuse(e, why, "loop over the indices")
            parts.append(a)
        place = parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load())
        return ast.copy_location(ast.Subscript(ast.Name(found.array), place, ast.Load()), e)

    # Expressions -----------------------------------------------------------------------------------------------------

    def element(self, e: ast.Subscript) -> ast.Subscript:
        """Rewrite an element."""
        row = self.row(e.value)
        if row is not None:
            return self.of(e, row, index(e))
        if isinstance(e.value, ast.Name) and e.value.id in self.scope.arrays:
            why = f"'{e.value.id}' may stand for another array or row here"
            self.scope.refuse(e, why, "name it in the same block, before it is read")
        at = [self.expr(i) for i in index(e)]
        place = at[0] if len(at) == 1 else ast.Tuple(at, ast.Load())
        return ast.copy_location(ast.Subscript(e.value, place, e.ctx), e)

    def expr(self, e: ast.expr) -> Any:
        """Rewrite an expression."""
        match e:
            case ast.Name(id=name) if name in self.rows:
                self.scope.refuse(e, f"the array '{name}' is used whole", "loop over its elements")
            case ast.Subscript(value=ast.Attribute(value=x, attr="shape"), slice=at) if axis_number(at) is not None:
                if (row := self.row(x)) is None:
                    return e
                k = axis_number(at) or 0
                return ast.copy_location(self.extent(row, k if k >= 0 else k + self.free(row)), e)
            case ast.Call(func=ast.Name(id=name), args=[x]) if name == EACH:
                if (row := self.row(x)) is None:
                    why = "only 'for name in range(...)' and prange are differentiated"
                    self.scope.refuse(e, why, "loop over indices")
                return self.extent(row, 0)
            case ast.Call(func=ast.Name() as f, args=[x]) if self.scope.found(f) is len and (row := self.row(x)):
                return ast.copy_location(self.extent(row, 0), e)
            case ast.Attribute(value=x, attr="size") if (row := self.row(x)) is not None:
                found, *sizes = self.extents(row) or [self.extent(row, 0)]
                for n in sizes:
                    found = ast.BinOp(found, ast.Mult(), n)
                return ast.copy_location(found, e)
            case ast.Call() if loop := self.loop_of(e):
                before, result = self.helpers.written(*loop)
                for s in before:
                    self.statement(s)
                return self.expr(result)
        return super().expr(e)

    def loop_of(self, call: ast.Call) -> tuple[ast.Call, Any] | None:
        """The loop in place of NumPy's function of whole rows, behind its call; None if these are no rows."""
        loop, args = whole.LOOPS.get(id(self.scope.found(call.func))), call.args
        if loop is None and isinstance(call.func, ast.Attribute) and self.row(call.func.value):
            loop, args = whole.METHODS.get(call.func.attr), [call.func.value, *args]
        rows = [self.row(x) for x in args]
        # no slices: one of NumPy ends where its array does
        fit = all(row and self.free(row) <= 1 and not any(isinstance(a, tuple) for a in row.at) for row in rows)
        if loop is None or call.keywords or not fit or len(args) != loop.__code__.co_argcount:
            return None
        return ast.copy_location(ast.Call(call.func, args, []), call), loop
