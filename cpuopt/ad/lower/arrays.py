"""Local arrays: where a kernel makes one, of which size, and which names stand for its memory."""

from __future__ import annotations

import ast

import numpy as np

from ..kernel import Local
from ..naming import reserved
from ..trees import last_name, names, quote, swap, text
from .helpers import Helpers
from .parts import ArrayPart, Parts
from .scope import Scope, own
from .text import assignments, elements_stored, mentions, stores, swapped

FILLS = {"zeros": "0.0", "ones": "1.0", "empty": "", "full": "", "zeros_like": "0.0", "ones_like": "1.0"}
FILLS |= {"empty_like": "", "full_like": ""}
"""The functions that make a local array, with what they fill it with."""


class LocalArrays(Parts):
    """The local arrays of a kernel.

    Attributes
    ----------
    numbers : the names that are assigned once, with a value that is known at the top of the kernel.
    """

    def __init__(self, scope: Scope, helpers: Helpers) -> None:
        super().__init__(scope, helpers)
        self.numbers: dict[str, ast.expr] = {}

    # Sizes -----------------------------------------------------------------------------------------------------------

    def note(self, target: ast.expr, value: ast.expr) -> None:
        """Note an assignment."""
        if isinstance(target, ast.Name) and self.scope.count.get(target.id, 1) == 1:
            if self.depth == 0 or not self.unknown(self.resolve(value)):
                self.numbers[target.id] = value  # a shape is the same in every iteration

    def unknown(self, e: ast.expr) -> list[str]:
        """The names in a size that are not known at the top of the kernel."""
        return sorted(names(e) & (self.scope.count.keys() | self.scope.arrays))

    def resolve(self, e: ast.expr) -> ast.expr:
        """Write a number in terms of parameters and shapes."""
        for _ in range(20):
            new = swap(e, lambda x: self.numbers.get(x.id) if isinstance(x, ast.Name) else None)
            if text(new) == text(e):
                break
            e = new
        return e

    def known_size(self, s: ast.AST, e: ast.expr) -> ast.expr:
        """A size in what is known at the top of the kernel."""
        found = self.resolve(e)
        for n in self.unknown(found):
            why = f"the size of a local array depends on '{n}', which is not known at the top of the kernel"
            self.scope.refuse(s, why, "give it the largest size that it can have")
        return found

    # Where one is made -----------------------------------------------------------------------------------------------

    def copied(self, call: ast.Call) -> ast.expr | None:
        """The array or row that a call copies."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "copy" and self.row(call.func.value):
            return call.func.value
        return call.args[0] if self.scope.found(call.func) is np.copy and call.args else None

    def made_with(self, value: ast.expr) -> str:
        """The function in `FILLS` that an expression makes an array with; "" if it makes none."""
        if not isinstance(value, ast.Call):
            return ""
        if self.copied(value):
            return "empty_like"
        found = self.scope.found(value.func)
        return next((k for k in FILLS if found is getattr(np, k)), "") if value.args else ""

    def allocation(self, s: ast.stmt, name: str, call: ast.Call) -> tuple[ArrayPart, ast.expr | ArrayPart | None]:
        """Note the local array that a call makes; return what the name stands for, and what fills it."""
        kind, copied = self.made_with(call), self.copied(call)
        args = [copied] if copied else list(call.args)
        of = args.pop(0)
        fill = self.expr(args.pop(0)) if kind.startswith("full") and args else quote(FILLS[kind] or "0.0")
        dtype = next((k.value for k in call.keywords if k.arg == "dtype"), args[0] if args else None)
        if kind.endswith("_like"):
            if (like := self.row(of)) is None:
                self.scope.refuse(s, f"'{text(of)}' is no array", "give the shape of the local array")
            shape = self.extents(like)
            dtype = dtype or quote("x.dtype", x=ast.Name(like.array))
        else:
            shape = self.shape(of)
        source = self.row(copied) if copied else None  # before the name means another array
        dtype = self.dtype(dtype)
        known = [self.known_size(s, e) for e in shape]
        loop = self.parallel_loop(s)
        if loop:
            known = [self.known_size(s, loop.iter.args[0]), *known]  # type: ignore[attr-defined]
        owner = loop.target.id if loop else ""  # type: ignore[attr-defined]
        memory = self.memory(name, known)
        self.scope.local[memory] = Local(known, dtype, owner)
        self.scope.ranks[memory] = len(known)
        self.scope.arrays |= {name, memory}
        made = ArrayPart(memory, [*([ast.Name(owner)] if owner else []), *[None] * len(shape)])
        return made, source if copied else None if kind.startswith("empty") else fill

    def shape(self, of: ast.expr) -> list[ast.expr]:
        """The sizes that an expression gives."""
        if isinstance(of, ast.Attribute) and of.attr == "shape" and (row := self.row(of.value)):
            return self.extents(row)
        return [self.expr(e) for e in (of.elts if isinstance(of, ast.Tuple | ast.List) else [of])]

    def dtype(self, dtype: ast.expr | None) -> ast.expr | None:
        """The type of the elements, in names that the backward knows."""
        if dtype is not None and isinstance(found := self.scope.found(dtype), type):
            return ast.Attribute(ast.Name("np"), np.dtype(found).name)
        if isinstance(dtype, ast.Attribute) and dtype.attr == "dtype" and (row := self.row(dtype.value)):
            old = self.scope.local.get(row.array)
            return old.dtype if old else quote("x.dtype", x=ast.Name(row.array))
        return dtype

    def parallel_loop(self, s: ast.stmt) -> ast.For | None:
        """The outermost ``prange``, each iteration of which has an array of its own."""
        for loop in self.loops:
            if isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "prange":
                if len(loop.iter.args) != 1:
                    why = "a local array in a prange that does not start at 0"
                    self.scope.refuse(s, why, "write prange(n), or a range")
                return loop
        return None

    def memory(self, name: str, shape: list[ast.expr]) -> str:
        """The name of an array's memory: its own, unless that stands for something else."""
        scope = self.scope
        if old := scope.local.get(name):  # the same memory again, unless something else still stands for it
            same = [*map(text, old.shape)] == [*map(text, shape)]
            free = same and not any(r.array == name and n != name for n, r in self.rows.items())
        else:
            free = not (reserved(name) or f"d{name}" in scope.params or name in scope.params)
        return name if free else scope.fresh(name)

    # Which names stand for one ---------------------------------------------------------------------------------------

    def local(self, name: str) -> ArrayPart | None:
        """The local array that a name stands for wherever it is assigned."""
        made = self.scope.local.get(name)
        if made is None or not self.steady(name):
            return None
        lead = [ast.Name(made.owner)] if made.owner else []
        return ArrayPart(name, [*lead, *[None] * (len(made.shape) - len(lead))])

    def steady(self, name: str) -> bool:
        """Return whether a name stands for the memory of one local array wherever it is assigned."""
        found = [(v, s) for t, v, s in assignments(self.scope.written) if t == name]
        kept = [v for v, s in found if not self.hands_on(s) and not swapped(s)]
        return len({text(v) for v in kept}) == 1 and all(self.made_with(v) for v in kept)

    def hands_on(self, s: ast.stmt) -> bool:
        """Return whether ``h = new`` may be a copy: the loop around it makes `new`, and changes neither after it."""
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=new)):
                pass
            case _:
                return False
        written = self.scope.written
        body = next((x.body for x in ast.walk(written) if isinstance(x, ast.For) and s in x.body), None)
        if body is None:
            return False
        made = [x for t, v, x in assignments(written) if t == new and self.made_with(v)]
        first = next(x for x in body if new in mentions([x]))
        rest = body[body.index(s) + 1 :]
        calls = [n for x in rest for n in ast.walk(x) if isinstance(n, ast.Call) and own(self.scope.found(n.func))]
        return (
            made == [first]
            and stores([written]).count(new) == 1
            and mentions([written]).count(new) == mentions(body).count(new)
            and not {name, new} & {*elements_stored(rest), *stores(rest), *mentions(calls)}
        )

    def both(self, s: ast.stmt, a: str, b: str) -> bool:
        """Return whether two names stand for local arrays; refuse those of two shapes, or with other names."""
        local = self.scope.local
        if a not in local or b not in local:
            return False
        one, two = local[a], local[b]
        same = [text(x) for x in one.shape] == [text(x) for x in two.shape]
        if not same or any(r.array in (a, b) and n not in (a, b) for n, r in self.rows.items()):
            self.scope.refuse(s, f"'{a}' stands for another array from here on", "copy its elements in a loop")
        types = [x.dtype and text(x.dtype) for x in (one, two)]
        self.scope.rewritten |= types[0] != types[1]  # numba gives a name one type
        return True
