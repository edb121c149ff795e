"""The pass over rows and local arrays: after it, every array is read and written by element."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ..trees import index, names, quote, text
from .arrays import LocalArrays
from .helpers import Bind
from .parts import ArrayPart
from .text import is_atom, set_name, stores, swapped


class Rows(LocalArrays):
    """The rewrite of statements: names of rows go, and assignments of whole rows are loops."""

    def put(self, at: ast.AST, target: ast.expr | str, value: ast.expr) -> None:
        """Write an assignment."""
        super().put(at, target, value)
        self.note(ast.Name(target) if isinstance(target, str) else target, value)

    def statement(self, s: ast.stmt) -> None:
        """Rewrite one statement."""
        if not isinstance(s, Bind):
            super().statement(s)
        elif (row := self.row(s.value)) is None:
            why = f"{text(s.call.func)} is given '{text(s.value)}' for an array"
            self.scope.refuse(s.call, why, "give it an array or a row")
        else:
            self.name(s, s.name, row)

    def name(self, s: ast.stmt, name: str, row: ArrayPart) -> None:
        """Let a name stand for a row."""
        self.rows[name] = self.frozen(s, row)
        self.scope.arrays.add(name)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def branch(self, s: ast.If) -> None:
        """Rewrite a branch."""
        test = self.expr(s.test)
        before = dict(self.rows)
        yes = self.inner(s.body)
        self.rows = dict(before)
        no = self.inner(s.orelse)
        self.rows = _without(before, [s])
        if yes or no:
            self.made.append(ast.copy_location(ast.If(test, yes, no), s))

    def loop_body(self, s: ast.For) -> list[ast.stmt]:
        """Rewrite the body of a loop; it does not read the rows that it names before it names them again."""
        before = _without(self.rows, s.body)
        self.rows = dict(before)
        self.loops.append(s)
        made = self.inner(s.body)
        self.loops.pop()
        self.rows = before
        return made

    # Assignments -----------------------------------------------------------------------------------------------------

    def assign(self, s: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Rewrite an assignment."""
        match target:
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                self.unpack(s, targets, value)
            case ast.Subscript() if self.is_whole(target):
                self.fill(s, target, value)
            case ast.Name(id=name) if self.names_row(s, name, value):
                pass
            case _:
                super().assign(s, target, value)

    def is_whole(self, target: ast.Subscript) -> bool:
        """Return whether a target is a row or a slice."""
        part = self.row(target)
        return any(isinstance(i, ast.Slice) for i in index(target)) or bool(part and self.free(part))

    def names_row(self, s: ast.stmt, name: str, value: ast.expr) -> bool:
        """Let a name stand for a row or a new array, or copy one array to another; return whether it did."""
        if name in self.scope.params:
            self.scope.refuse(s, f"the parameter '{name}' is assigned", "use a local of another name")
        if isinstance(value, ast.Call) and self.made_with(value):
            self.rows[name], fill = self.allocation(s, name, value)
            if fill is not None:
                self.nest(s, self.rows[name], fill)
            return True
        row = self.row(value)
        if isinstance(value, ast.Name) and self.hands_on(s) and self.both(s, name, value.id):
            mine = self.row(ast.Name(name))
            assert mine
            assert row
            self.nest(s, mine, row)
            return True
        if row is not None and (isinstance(value, ast.Name) or self.used_as_array(name)):
            self.name(s, name, row)
            return True
        if name in self.rows:
            self.scope.refuse(s, f"'{name}' is a row, and is assigned a number", "give one of them another name")
        return False

    def used_as_array(self, name: str) -> bool:
        """Return whether a name stands for an array somewhere."""
        return self.scope.is_array(self.scope.written, name)

    def unpack(self, s: ast.stmt, targets: list[ast.expr], value: ast.expr) -> None:
        """Rewrite a simultaneous assignment; one of numbers and elements stays one."""
        row = self.row(value)
        if (pair := swapped(s)) and self.both(s, *pair):
            self.exchange(s, *pair)
            return
        if isinstance(value, ast.Attribute) and value.attr == "shape" and (of := self.row(value.value)):
            values = [self.extent(of, k) for k in range(len(targets))]
        elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(targets):
            pairs = list(zip(targets, value.elts, strict=True))
            if any(self.is_array(t, v) for t, v in pairs):
                self.name_each(s, pairs)
                return
            values = [self.expr(v) for v in value.elts]
        elif row is not None and isinstance(value, ast.Subscript | ast.Name):
            values = [self.of(s, row, [ast.Constant(k)]) for k in range(len(targets))]
        else:
            values = []
        if len(values) != len(targets):
            why = "only tuples of one length, rows and .shape are unpacked"
            self.scope.refuse(s, why, "write one line each")
        places = ast.Tuple([self.target(t) for t in targets], ast.Store())
        self.made.append(set_name(s, places, ast.Tuple(values, ast.Load())))
        for t, v in zip(places.elts, values, strict=True):
            self.note(t, v)

    def is_array(self, target: ast.expr, value: ast.expr) -> bool:
        """Return whether an assignment makes an array or names a row."""
        if not isinstance(target, ast.Name):
            return False
        made = self.made_with(value)
        return bool(made) or (self.row(value) is not None and self.used_as_array(target.id))

    def name_each(self, s: ast.stmt, pairs: list[tuple[ast.expr, ast.expr]]) -> None:
        """Assign arrays and rows one after the other."""
        targets = {t.id for t, _ in pairs if isinstance(t, ast.Name)}
        for t, v in pairs:
            if isinstance(t, ast.Name) and names(v) & targets:
                self.scope.refuse(s, "rows are exchanged", "copy their elements in a loop")
            self.assign(s, t, v)

    # Whole rows ------------------------------------------------------------------------------------------------------

    def fill(self, s: ast.stmt, target: ast.Subscript, value: ast.expr) -> None:
        """Write ``y[i, :] = value`` as loops; the value is a number, or the same part of another array."""
        row, other = self.row(target), self.row(value)
        if row is None or (other and (other.array == row.array or self.free(other) not in (0, self.free(row)))):
            self.scope.refuse(s, "a slice is not in the subset", "loop over the indices")
        if other and self.free(other):
            self.nest(s, row, other)
            return
        value = self.expr(value)
        self.nest(s, row, value if is_atom(value) else self.named(s, "value", value))

    def nest(self, s: ast.stmt, row: ArrayPart, value: ast.expr | ArrayPart) -> None:
        """Assign a number, or the elements of another part, to all elements of a part of an array."""
        at = self.counters(row)
        element = self.of(s, row, at)
        if isinstance(value, ArrayPart):
            value = self.of(s, value, at)
        self.over(s, row, at, [ast.copy_location(ast.Assign([element], value), s)])

    def exchange(self, s: ast.stmt, a: str, b: str) -> None:
        """Write ``a, b = b, a`` of two local arrays as an exchange of their elements."""
        one, two = self.row(ast.Name(a)), self.row(ast.Name(b))
        if one is None or two is None:
            why = f"'{a}' or '{b}' may stand for another array here"
            self.scope.refuse(s, why, "copy their elements in a loop")
        at = self.counters(one)
        x, y, held = self.of(s, one, at), self.of(s, two, at), ast.Name(self.scope.fresh(a))
        self.over(s, one, at, [set_name(s, t, v) for t, v in ((held, x), (x, y), (y, held))])

    def counters(self, row: ArrayPart) -> list[ast.expr]:
        """New loop variables, one for each axis of a row."""
        return [ast.Name(self.scope.fresh("k")) for _ in range(self.free(row))]

    def over(self, s: ast.stmt, row: ArrayPart, at: list[ast.expr], body: list[ast.stmt]) -> None:
        """Write loops over a row."""
        for k in reversed(range(len(at))):
            size = ast.copy_location(quote("range(n)", n=self.extent(row, k)), s)
            body = [ast.copy_location(ast.For(at[k], size, body, [], None), s)]
        self.made += body


def _without(rows: dict[str, ArrayPart], body: Iterable[ast.AST]) -> dict[str, ArrayPart]:
    """The rows that a block does not name."""
    gone = set(stores(body))
    return {n: r for n, r in rows.items() if n not in gone}
