"""From a kernel as people write it to the plain subset: own functions are inlined, jumps become branches.

Also: simultaneous assignments get temporaries, rows such as ``row = x[i]`` become elements of their array, and local
arrays are noted with their shapes. A name that is made here is one that the kernel does not use.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from . import whole
from .kernel import Local
from .naming import reserved
from .trees import last_name, names, quote, swap, text, words

FILLS = {"zeros": "0.0", "ones": "1.0", "empty": "", "full": "", "zeros_like": "0.0", "ones_like": "1.0"}
FILLS |= {"empty_like": "", "full_like": ""}
"""The functions that make a local array, with what they fill it with."""


@dataclass
class _Row:
    """A part of an array under a name: its indices, None where an axis is whole, or the number that starts a slice."""

    array: str
    at: list[ast.expr | tuple[ast.expr, ast.expr] | None]


PYTHON = SimpleNamespace(
    abs=abs, bool=bool, enumerate=enumerate, float=float, int=int, len=len, max=max, min=min, pow=pow, range=range,
    reversed=reversed, round=round, zip=zip,
)  # fmt: skip
"""The functions of Python that a kernel may call."""


def outside(function: Any) -> dict[str, Any]:
    """Return the objects that names stand for in a function if it does not assign them."""
    code, cells = function.__code__, function.__closure__ or ()
    closure = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True) if _filled(c)}
    found = {**vars(PYTHON), **function.__globals__, **closure}
    return {n: v for n, v in found.items() if n not in code.co_varnames}


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def source_of(function: Any) -> tuple[FunctionType, dict[int, str], ast.FunctionDef | None]:
    """Return a function without its compiler, its lines by number, and its tree; None where it is none."""
    plain = inspect.unwrap(getattr(function, "py_func", function))
    plain = getattr(plain, "written_as", plain)
    lines, first = inspect.getsourcelines(plain)
    first = max(first, 1)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    node = tree.body[0]
    found = {first + i: line.rstrip("\n") for i, line in enumerate(lines)}
    return plain, found, node if isinstance(node, ast.FunctionDef) else None


def own(found: Any) -> bool:
    """Return whether an object is a function that a user wrote in Python."""
    plain = getattr(found, "py_func", found)
    home = (getattr(plain, "__module__", "") or "").split(".")[0]
    return isinstance(plain, FunctionType) and home not in ("numpy", "math", "numba", "builtins")


def stores(block: Iterable[ast.AST]) -> list[str]:
    """The names that statements assign, once for each place."""
    return [
        n.id
        for s in block
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and isinstance(getattr(n, "ctx", None), ast.Store)
    ]


def jumps(s: ast.AST, kinds: tuple[type, ...]) -> Iterator[ast.AST]:
    """The jumps inside a statement; ``break`` and ``continue`` of inner loops are their own."""
    if isinstance(s, kinds):
        yield s
    inner = kinds if not isinstance(s, ast.For | ast.While) else tuple(k for k in kinds if k is ast.Return)
    for child in ast.iter_child_nodes(s):
        if isinstance(child, ast.stmt) and inner:
            yield from jumps(child, inner)


class Lower:
    """The rewrite of one kernel.

    Attributes
    ----------
    refuse : raises, with the line of a node.
    found : the object outside the kernel that a name stands for.
    outside : those objects by name; names of inlined functions are added.
    source : lines by number; those of inlined functions in the same file are added.
    kernel : the function itself.
    axes : the number of axes of parameters, where it is known.
    local : the local arrays.
    rewritten : whether a form was found that numba does not compile.
    """

    def __init__(
        self, node: ast.FunctionDef, file: str, refuse: Callable[..., NoReturn], found: Callable[[ast.expr], Any],
        outside: dict[str, Any], source: dict[int, str], kernel: FunctionType, axes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.kernel, self.rewritten = kernel, False
        self.sources: dict[Any, Any] = {}
        self.file, self.refuse, self.found, self.outside, self.source = file, refuse, found, outside, source
        self.params = [a.arg for a in node.args.args]
        self.taken = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | set(self.params)
        self.count: dict[str, int] = {}
        self.written = _elements_stored(node.body)
        self.note(node)
        self.single: dict[str, ast.expr] = {}
        self.rows: dict[str, _Row] = {}
        self.local: dict[str, Local] = {}
        self.loops: list[ast.For] = []
        self.depth = 0
        self.inlining: list[Any] = []
        self.made: list[ast.stmt] = []
        self.indices: set[str] = set()
        self.arrays: set[str] = set()
        self.whole = ast.Module(list(node.body), [])
        self.array_names = {p for p in self.params if axes.get(p) or self.is_array(node, p)}
        self.ranks: dict[str, int] = {n: k for n, k in axes.items() if n in self.params}
        self.find_ranks(node)

    # Names -----------------------------------------------------------------------------------------------------------

    def note(self, node: ast.AST) -> None:
        """Count the assignments of each name."""
        for name in stores([node]):
            self.count[name] = self.count.get(name, 0) + 1

    def fresh(self, name: str) -> str:
        """A name that is not taken: this one, if it is free."""
        new, k = name, 1
        while new in self.taken or reserved(new) or f"d{new}" in self.params:
            k += 1
            new = f"{name}_{k}"
        self.taken.add(new)
        return new

    def source_of(self, function: Any) -> tuple[FunctionType, dict[int, str], ast.FunctionDef | None]:
        """Return what `source_of` does, once found."""
        if function not in self.sources:
            self.sources[function] = source_of(function)
        return self.sources[function]  # type: ignore[no-any-return]

    def is_array(self, node: ast.AST, name: str) -> bool:
        """Return whether a function uses a name as an array, or hands it on to one that does."""
        for n in ast.walk(node):
            match n:
                case ast.Subscript(value=ast.Name(id=x)) | ast.Attribute(value=ast.Name(id=x)) if x == name:
                    return True
                case ast.Call(func=f, args=args):
                    for k, a in enumerate(args):
                        if not isinstance(a, ast.Name) or a.id != name:
                            continue
                        if isinstance(f, ast.Name) and f.id in ("len", "enumerate", "zip"):
                            return True
                        if (
                            own(found := self.found(f))
                            and found not in self.inlining
                            and getattr(found, "__name__", "") != "<lambda>"
                        ):
                            inner = self.source_of(found)[2]
                            if inner and k < len(inner.args.args):
                                self.inlining.append(found)
                                if self.is_array(inner, inner.args.args[k].arg):
                                    self.inlining.pop()
                                    return True
                                self.inlining.pop()
                case ast.For(iter=ast.Name(id=x)) if x == name:
                    return True
        return False

    def find_ranks(self, node: ast.AST) -> None:
        """Find the number of axes of arrays, as far as their uses tell."""
        for n in ast.walk(node):
            match n:
                case ast.Subscript(value=ast.Name(id=x), slice=at):
                    self.ranks[x] = max(self.ranks.get(x, 0), len(at.elts) if isinstance(at, ast.Tuple) else 1)
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=x), attr="shape"), slice=ast.Constant(value=k)
                ):
                    self.ranks[x] = max(self.ranks.get(x, 0), int(k) + 1)  # type: ignore[arg-type]
                case ast.Assign(targets=[ast.Tuple(elts=ts)], value=ast.Attribute(value=ast.Name(id=x), attr="shape")):
                    self.ranks[x] = len(ts)

    # Statements ------------------------------------------------------------------------------------------------------

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Rewrite the kernel."""
        made = copy.copy(node)
        if any(True for s in node.body for j in jumps(s, (ast.Return,)) if j.value):  # type: ignore[attr-defined]
            for s in node.body:
                for j in jumps(s, (ast.Return,)):
                    self.refuse(j, "Return is not in the differentiable subset", "write to an array parameter")
        made.body = self.block(self.settle(node.body, (ast.Return,), lambda j: []))
        return made

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
        target = ast.Name(target, ast.Store()) if isinstance(target, str) else target
        new = ast.copy_location(ast.Assign([target], value), at)
        self.made.append(new)
        if isinstance(target, ast.Name) and self.count.get(target.id, 1) == 1:
            if self.depth == 0 or not names(self.resolve(value)) & (self.count.keys() | self.array_names):
                self.single[target.id] = value  # a shape is the same in every iteration

    def settle(
        self, body: list[ast.stmt], kinds: tuple[type, ...], on: Callable[[Any], list[ast.stmt]]
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
                self.refuse(next(jumps(s, kinds)), "a return inside a loop", "assign the result and break")
            rest = body[k + 1 :]
            new = copy.copy(s)
            new.body = self.settle([*s.body, *copy.deepcopy(rest)], kinds, on) or [ast.copy_location(ast.Pass(), s)]
            new.orelse = self.settle([*s.orelse, *rest], kinds, on)
            return [*made, new]
        return made

    def statement(self, s: ast.stmt) -> None:
        """Rewrite one statement."""
        match s:
            case ast.AnnAssign(target=target, value=value) if value:
                self.assign(s, target, value)
            case ast.Assign(targets=[target], value=value):
                self.assign(s, target, value)
            case ast.Assign(targets=targets, value=value):
                value = self.expr(value)
                if not self.atom(value):
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
                    self.put(s, target, ast.copy_location(ast.BinOp(_load(target), op, value), s))
            case ast.If(test=test, body=body, orelse=orelse):
                test = self.expr(test)
                before = dict(self.rows)
                yes = self.inner(body)
                self.rows = dict(before)
                no = self.inner(orelse)
                self.forget([s], before)
                if yes or no:
                    self.made.append(ast.copy_location(ast.If(test, yes, no), s))
            case ast.For():
                self.loop(s)
            case ast.Expr(value=ast.Call(func=func) as call) if own(self.found(func)):
                self.inline(call, alone=True)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                self.made.append(s)

    def forget(self, body: list[ast.stmt], before: dict[str, _Row]) -> None:
        """Forget the rows that a block has named: after it, and before they are named anew in a loop."""
        gone = set(stores(body))
        self.rows = {n: r for n, r in before.items() if n not in gone}

    def loop(self, s: ast.For) -> None:
        """Rewrite a loop: over an array, reversed, and with jumps."""
        s = copy.copy(s)
        match s.iter:
            case ast.Call(func=ast.Name(id="reversed"), args=[ast.Call(func=ast.Name(id="range"), args=args)]):
                if len(args) == 3:
                    self.refuse(s, "reversed(range(...)) has a step", "write the range downwards")
                lo, hi = (quote("0"), args[0]) if len(args) == 1 else args
                call = [quote("hi - 1", hi=hi), quote("lo - 1", lo=lo), quote("-1")]
                s.iter = ast.copy_location(ast.Call(ast.Name("range"), call, []), s.iter)
                self.rewritten = True
            case ast.Call(func=ast.Name(id="enumerate"), args=[x]) if isinstance(s.target, ast.Tuple):
                s = self.over(s, s.target.elts[0], [(s.target.elts[1], x)])
            case ast.Call(func=ast.Name(id="zip"), args=xs) if isinstance(s.target, ast.Tuple):
                s = self.over(s, ast.Name(self.fresh("k")), list(zip(s.target.elts, xs, strict=True)))
            case ast.Name() | ast.Subscript() as x:
                s = self.over(s, ast.Name(self.fresh("k")), [(s.target, x)])
        body = s.body
        if isinstance(s.target, ast.Name) and any(
            isinstance(o.target, ast.Name) and o.target.id == s.target.id == "_" for o in self.loops
        ):
            s.target = ast.Name(self.fresh("again"), ast.Store())
        if isinstance(s.iter, ast.Call):
            s.iter = ast.copy_location(ast.Call(s.iter.func, [self.expr(a) for a in s.iter.args], s.iter.keywords), s)
        kinds = (ast.Break, ast.Continue)
        breaks = [j for b in body for j in jumps(b, kinds) if isinstance(j, ast.Break)]
        go = ""
        if breaks:
            if isinstance(s.iter, ast.Call) and last_name(s.iter.func) == "prange":
                self.refuse(breaks[0], "numba has no break in a prange", "loop over a range")
            go = self.fresh("go")
            self.indices.add(go)
            self.count[go] = 2
            self.put(s, go, quote("1"))

        def on(j: ast.stmt) -> list[ast.stmt]:
            ends = isinstance(j, ast.Break)
            return [ast.copy_location(ast.Assign([ast.Name(go, ast.Store())], quote("0")), j)] if ends else []

        body = self.settle(body, kinds, on)
        if go:
            body = [ast.copy_location(ast.If(quote("go > 0", go=ast.Name(go)), body, []), breaks[0])]
        before = dict(self.rows)
        self.forget(s.body, before)
        before = dict(self.rows)
        self.loops.append(s)
        inside = self.inner(body)
        self.loops.pop()
        self.rows = before
        if inside:
            s.body = inside
            self.made.append(s)

    def over(self, s: ast.For, var: ast.expr, parts: list[tuple[ast.expr, ast.expr]]) -> ast.For:
        """A loop over the elements, or rows, of arrays as a loop over their index."""
        if not isinstance(var, ast.Name):
            self.refuse(s, "the loop variable is not a name", "write for i in range(...)")
        first = self.row(parts[0][1])
        if first is None:
            self.refuse(s, "only 'for name in range(...)' and prange are differentiated", "loop over indices")
        s.iter = ast.copy_location(quote("range(n)", n=self.extent(s, first, 0)), s)
        s.target = ast.Name(var.id, ast.Store())
        taken: list[ast.stmt] = []
        for target, x in parts:
            value = ast.Subscript(x, ast.Name(var.id), ast.Load())
            taken.append(ast.copy_location(ast.Assign([target], ast.copy_location(value, s)), s))
        s.body = [*taken, *s.body]
        return s

    # Assignments -----------------------------------------------------------------------------------------------------

    def atom(self, e: ast.expr) -> bool:
        """Return whether an expression is a name or a number."""
        return isinstance(e, ast.Constant | ast.Name) or (isinstance(e, ast.UnaryOp) and self.atom(e.operand))

    def named(self, at: ast.AST, word: str, value: ast.expr) -> ast.expr:
        """Name a value."""
        name = self.fresh(word)
        self.put(at, name, value)
        return ast.copy_location(ast.Name(name, ast.Load()), at)

    def target(self, t: ast.expr) -> ast.expr:
        """Rewrite a target."""
        if isinstance(t, ast.Subscript):
            found = self.element(t)
            return ast.copy_location(ast.Subscript(found.value, found.slice, ast.Store()), t)
        return t

    def assign(self, s: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        """Rewrite an assignment."""
        if isinstance(target, ast.Tuple | ast.List):
            return self.unpack(s, target.elts, value)
        if isinstance(target, ast.Subscript):
            part = self.row(target)
            if any(isinstance(i, ast.Slice) for i in _indices(target)) or (part and self.free(part) > 0):
                return self.fill(s, target, value)
        if isinstance(target, ast.Name):
            if target.id in self.params:
                self.refuse(s, f"the parameter '{target.id}' is assigned", "use a local of another name")
            if self.allocation(s, target.id, value):
                return None
            row = self.row(value)
            if self.hands_on(s) and isinstance(value, ast.Name) and self.own_memory(s, target.id, value.id):
                mine = self.row(target)
                assert mine
                assert row
                return self.nest(s, mine, self.free(mine), row)
            if row is not None and (isinstance(value, ast.Name) or self.used_as_array(target.id)):
                self.rows[target.id] = self.frozen(s, row)
                self.array_names.add(target.id)
                return None
            if target.id in self.rows:
                self.refuse(s, f"'{target.id}' is a row, and is assigned a number", "give one of them another name")
        found = self.inline(value, alone=True) if isinstance(value, ast.Call) and own(self.found(value.func)) else None
        if found is not None and len(found) != 1:
            self.refuse(s, "a function that returns several values is assigned to one name", "unpack them")
        value = found[0] if found else self.expr(value)
        self.put(s, self.target(target), value)
        return None

    def own_memory(self, s: ast.stmt, a: str, b: str) -> bool:
        """Return whether two names stand for local arrays; refuse those of two shapes, or with other names."""
        if a not in self.local or b not in self.local:
            return False
        one, two = self.local[a], self.local[b]
        same = [text(x) for x in one.shape] == [text(x) for x in two.shape]
        if not same or any(r.array in (a, b) and n not in (a, b) for n, r in self.rows.items()):
            self.refuse(s, f"'{a}' stands for another array from here on", "copy its elements in a loop")
        types = [x.dtype and text(x.dtype) for x in (one, two)]
        self.rewritten |= types[0] != types[1]  # numba gives a name one type
        return True

    def used_as_array(self, name: str) -> bool:
        """Return whether a name stands for an array somewhere."""
        return self.is_array(self.whole, name)

    def unpack(self, s: ast.stmt, targets: list[ast.expr], value: ast.expr) -> None:
        """Rewrite a simultaneous assignment: a value that an earlier target would change is kept in a temporary."""
        row = self.row(value)
        if pair := _swapped(s):
            if self.own_memory(s, *pair):
                return self.exchange(s, *pair)
        if isinstance(value, ast.Attribute) and value.attr == "shape" and (of := self.row(value.value)):
            values = [self.extent(s, of, k) for k in range(len(targets))]
        elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(targets):
            pairs = zip(targets, value.elts, strict=True)
            if any(
                isinstance(t, ast.Name)
                and (self.allocates(v) or (self.row(v) is not None and self.used_as_array(t.id)))
                for t, v in pairs
            ):
                for t, v in zip(targets, value.elts, strict=True):
                    if isinstance(t, ast.Name) and names(v) & {x.id for x in targets if isinstance(x, ast.Name)}:
                        self.refuse(s, "rows are exchanged", "copy their elements in a loop")
                    self.assign(s, t, v)
                return
            values = [self.expr(v) for v in value.elts]
        elif isinstance(value, ast.Call) and own(self.found(value.func)):
            values = self.inline(value, alone=True) or []
        elif row is not None and isinstance(value, ast.Subscript | ast.Name):
            values = [self.of(s, row, [ast.Constant(k)]) for k in range(len(targets))]
        else:
            values = []
        if len(values) != len(targets):
            self.refuse(s, "only tuples of one length, rows and .shape are unpacked", "write one line each")
        changed: set[str] = set()
        now: list[ast.expr] = []
        places = [self.target(t) for t in targets]
        for k, v in enumerate(values):
            later = {_base(t) for t in places[:k]}
            own_index = set().union(*(words(i) for t in places[k:] if isinstance(t, ast.Subscript) for i in [t.slice]))
            if own_index & later:
                self.refuse(s, "a later target is found by what an earlier one changes", "write one line each")
            now.append(self.named(s, _base(places[k]), v) if words(v) & later else v)
            changed |= later
        # temporaries stand before the first assignment
        for t, v in zip(places, now, strict=True):
            self.put(s, t, v)

    def fill(self, s: ast.stmt, target: ast.Subscript, value: ast.expr) -> None:
        """Write ``y[i, :] = value`` as loops; the value is a number, or the same part of another array."""
        row, other = self.row(target), self.row(value)
        if row is None or (other and (other.array == row.array or self.free(other) not in (0, self.free(row)))):
            self.refuse(s, "a slice is not in the subset", "loop over the indices")
        if other and self.free(other):
            return self.nest(s, row, self.free(row), other)
        value = self.expr(value)
        return self.nest(s, row, self.free(row), value if self.atom(value) else self.named(s, "value", value))

    def nest(self, s: ast.AST, row: _Row, axes: int, value: ast.expr | _Row) -> None:
        """Assign a number, or the elements of another array, to all elements of a part of an array."""
        at = [ast.Name(self.fresh("k")) for _ in range(axes)]
        element = self.of(s, row, list(at))
        if isinstance(value, _Row):
            value = self.of(s, value, list(at))
        new: ast.stmt = ast.copy_location(ast.Assign([element], value), s)
        for k in reversed(range(axes)):
            call = quote("range(n)", n=self.extent(s, row, k))
            var = ast.Name(at[k].id, ast.Store())
            new = ast.copy_location(ast.For(var, ast.copy_location(call, s), [new], [], None), s)
        self.made.append(new)

    def exchange(self, s: ast.stmt, a: str, b: str) -> None:
        """Write ``a, b = b, a`` of two local arrays as an exchange of their elements."""
        one, two = self.row(ast.Name(a)), self.row(ast.Name(b))
        if one is None or two is None:
            self.refuse(s, f"'{a}' or '{b}' may stand for another array here", "copy their elements in a loop")
        at: list[ast.expr] = [ast.Name(self.fresh("k")) for _ in range(self.free(one))]
        x, y, held = self.of(s, one, at), self.of(s, two, at), ast.Name(self.fresh(a))
        body: list[ast.stmt] = [ast.copy_location(ast.Assign([t], v), s) for t, v in ((held, x), (x, y), (y, held))]
        for k in reversed(range(len(at))):
            call = ast.copy_location(quote("range(n)", n=self.extent(s, one, k)), s)
            body = [ast.copy_location(ast.For(at[k], call, body, [], None), s)]
        self.made += body

    # Local arrays ----------------------------------------------------------------------------------------------------

    def copied(self, call: ast.Call) -> ast.expr | None:
        """The array or row that a call copies."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "copy" and self.row(call.func.value):
            return call.func.value
        return call.args[0] if self.found(call.func) is np.copy and call.args else None

    def allocates(self, value: ast.expr) -> str:
        """The function in `FILLS` that an expression makes an array with; "" where it makes none."""
        if not isinstance(value, ast.Call):
            return ""
        if self.copied(value):
            return "empty_like"
        found = self.found(value.func)
        return next((k for k in FILLS if found is getattr(np, k)), "") if value.args else ""

    def allocation(self, s: ast.stmt, name: str, value: ast.expr) -> bool:
        """Note a local array, and fill it where it is made; return whether there is one."""
        kind = self.allocates(value)
        if not kind:
            return False
        assert isinstance(value, ast.Call)
        copied = self.copied(value)
        given = {k.arg: k.value for k in value.keywords}
        args = [copied] if copied else list(value.args)
        shape_of = args.pop(0)
        fill = self.expr(args.pop(0)) if kind.startswith("full") and args else quote(FILLS[kind] or "0.0")
        dtype = given.get("dtype", args[0] if args else None)
        if kind.endswith("_like"):
            row = self.row(shape_of)
            if row is None:
                self.refuse(s, f"'{text(shape_of)}' is no array", "give the shape of the local array")
            shape = [self.extent(s, row, k) for k in range(self.free(row))]
            dtype = dtype or quote("x.dtype", x=ast.Name(row.array))
        elif isinstance(shape_of, ast.Attribute) and shape_of.attr == "shape" and (of := self.row(shape_of.value)):
            shape = [self.extent(s, of, k) for k in range(self.free(of))]
        else:
            shape = list(shape_of.elts) if isinstance(shape_of, ast.Tuple | ast.List) else [shape_of]
            shape = [self.expr(e) for e in shape]
        if dtype is not None and isinstance(kind_of := self.found(dtype), type):
            dtype = ast.Attribute(ast.Name("np"), np.dtype(kind_of).name)
        elif dtype is not None and isinstance(dtype, ast.Attribute) and dtype.attr == "dtype":
            inner = self.row(dtype.value)
            if inner:
                old = self.local.get(inner.array)
                dtype = old.dtype if old else quote("x.dtype", x=ast.Name(inner.array))
        source = self.row(copied) if copied else None  # before the name means another array
        known = [self.known_size(s, e) for e in shape]
        lead: list[ast.expr] = []
        around = [o for o in self.loops if isinstance(o.iter, ast.Call) and last_name(o.iter.func) == "prange"]
        if parallel := next(iter(around), None):
            assert isinstance(parallel.iter, ast.Call)
            assert isinstance(parallel.target, ast.Name)
            if len(parallel.iter.args) != 1:
                self.refuse(s, "a local array in a prange that does not start at 0", "write prange(n), or a range")
            known = [self.known_size(s, parallel.iter.args[0]), *known]
            lead = [ast.Name(parallel.target.id)]
        name_of = name
        if old := self.local.get(name):  # the same memory again, unless something else still stands for it
            same = [*map(text, old.shape)] == [*map(text, known)]
            if not same or any(r.array == name and n != name for n, r in self.rows.items()):
                name_of = self.fresh(name)
        elif reserved(name) or f"d{name}" in self.params or name in self.params:
            name_of = self.fresh(name)
        self.local[name_of] = Local(known, dtype, parallel.target.id if parallel else "")  # type: ignore[attr-defined]
        self.ranks[name_of] = len(known)
        self.array_names |= {name, name_of}
        self.rows[name] = row = _Row(name_of, [*lead, *[None] * len(shape)])
        if copied and (origin := source or self.row(copied)):
            self.nest(s, row, len(shape), origin)
        elif not kind.startswith("empty"):
            self.nest(s, row, len(shape), fill)
        return True

    def known_size(self, s: ast.AST, e: ast.expr) -> ast.expr:
        """A size in what is known at the top of the kernel."""
        found = self.resolve(e)
        for n in sorted(names(found)):
            if n in self.count or n in self.array_names:
                why = f"the size of a local array depends on '{n}', which is not known at the top of the kernel"
                self.refuse(s, why, "give it the largest size that it can have")
        return found

    def resolve(self, e: ast.expr) -> ast.expr:
        """Write a number in terms of parameters and shapes."""
        for _ in range(20):
            new = swap(e, lambda x: self.single.get(x.id) if isinstance(x, ast.Name) else None)
            if text(new) == text(e):
                break
            e = new
        return e

    # Rows ------------------------------------------------------------------------------------------------------------

    def row(self, e: ast.expr) -> _Row | None:
        """The part of an array that an expression names; None where it is none."""
        match e:
            case ast.Name(id=name) if name in self.rows:
                return self.rows[name]
            case ast.Name(id=name) if name in self.params and name in self.array_names:
                return _Row(name, [])
            case ast.Name(id=name) if (made := self.local.get(name)) and self.steady(name):
                lead = [ast.Name(made.owner)] if made.owner else []
                return _Row(name, [*lead, *[None] * (len(made.shape) - len(lead))])
            case ast.Subscript(value=value) if (of := self.row(value)) is not None:
                return self.part(e, of, _indices(e))
        return None

    def steady(self, name: str) -> bool:
        """Return whether a name stands for the memory of one local array wherever it is assigned."""
        found = [(v, s) for t, v, s in _assignments(self.whole) if t == name]
        kept = [v for v, s in found if not self.hands_on(s) and not _swapped(s)]
        return len({text(v) for v in kept}) == 1 and all(self.allocates(v) for v in kept)

    def hands_on(self, s: ast.stmt) -> bool:
        """Return whether ``h = new`` may be a copy: the loop around it makes `new`, and changes neither after it."""
        if not isinstance(s, ast.Assign) or not isinstance(s.value, ast.Name) or len(s.targets) != 1:
            return False
        if not isinstance(s.targets[0], ast.Name):
            return False
        name, new = s.targets[0].id, s.value.id
        body = next((x.body for x in ast.walk(self.whole) if isinstance(x, ast.For) and s in x.body), None)
        if body is None:
            return False
        made = [x for t, v, x in _assignments(self.whole) if t == new and self.allocates(v)]
        first = next(x for x in body if new in _mentions([x]))
        rest = body[body.index(s) + 1 :]
        calls = [n for x in rest for n in ast.walk(x) if isinstance(n, ast.Call) and own(self.found(n.func))]
        return (
            made == [first]
            and stores([self.whole]).count(new) == 1
            and _mentions([self.whole]).count(new) == _mentions(body).count(new)
            and not {name, new} & {*_elements_stored(rest), *stores(rest), *_mentions(calls)}
        )

    def part(self, e: ast.AST, of: _Row, at: list[ast.expr]) -> _Row:
        """A part of a part."""
        new: list[Any] = []
        rest = list(at)
        for a in of.at:
            if isinstance(a, ast.expr) or not rest:
                new.append(a)
            else:
                new.append(self.shifted(e, a, rest.pop(0)))
        new += [self.shifted(e, None, i) for i in rest]
        return _Row(of.array, new)

    def shifted(self, e: ast.AST, whole: Any, i: ast.expr) -> Any:
        """An index along an axis that is whole, or starts later."""
        if isinstance(i, ast.Slice):
            if i.step is not None:
                self.refuse(e, "a slice with a step is not in the subset", "loop over the indices")
            if i.lower is None and i.upper is None:
                return whole
            if i.upper is None or whole is not None or any(_negative(x) for x in (i.lower, i.upper) if x):
                self.refuse(e, "a slice is not in the subset", "loop over the indices")
            return (self.expr(i.lower) if i.lower else quote("0"), self.expr(i.upper))
        i = self.expr(i)
        if whole is None:
            return i
        if _negative(i):
            self.refuse(e, "an index from the end of a slice", "count from its start")
        return i if text(whole[0]) == "0" else quote("lo + i", lo=whole[0], i=i)

    def frozen(self, s: ast.AST, row: _Row) -> _Row:
        """A row whose indices stay what they are now."""

        def stays(e: ast.expr) -> bool:
            loops = {o.target.id for o in self.loops if isinstance(o.target, ast.Name)}
            return all(n in loops or (self.count.get(n, 0) <= 1 and n not in self.written) for n in words(e))

        def keep(e: Any) -> Any:
            if e is None:
                return None
            if isinstance(e, tuple):
                return tuple(map(keep, e))
            if stays(e):
                return e
            new = self.named(s, "at", e)
            self.indices |= words(new)
            return new

        return _Row(row.array, [keep(a) for a in row.at])

    def free(self, row: _Row) -> int:
        """The number of axes of a row."""
        rank = max(self.ranks.get(row.array, 0), len(row.at))
        return sum(not isinstance(a, ast.expr) for a in row.at) + rank - len(row.at)

    def extent(self, s: ast.AST, row: _Row, k: int) -> ast.expr:
        """The size of a row along one of its axes."""
        axes = [j for j, a in enumerate(row.at) if not isinstance(a, ast.expr)]
        axis = axes[k] if k < len(axes) else len(row.at) + k - len(axes)
        part = row.at[axis] if axis < len(row.at) else None
        if isinstance(part, tuple):
            lo, hi = part
            return hi if text(lo) == "0" else quote("hi - lo", hi=hi, lo=lo)
        if row.array in self.local:
            return self.local[row.array].shape[axis]
        return quote("x.shape[k]", x=ast.Name(row.array), k=ast.Constant(axis))  # type: ignore[no-any-return]

    def of(self, e: ast.AST, row: _Row, at: list[ast.expr]) -> ast.Subscript:
        """An element of a row."""
        found = self.part(e, row, at)
        parts: list[ast.expr] = []
        for a in found.at:
            if not isinstance(a, ast.expr):
                why = f"'{found.array}' is read with a slice, or with fewer indices than axes"
                self.refuse(e, why, "loop over the indices")
            parts.append(a)
        index = parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load())
        made = ast.copy_location(ast.Subscript(ast.Name(found.array), index, ast.Load()), e)
        made.is_whole = True  # type: ignore[attr-defined]
        return made

    def element(self, e: ast.Subscript) -> ast.Subscript:
        """Rewrite an element, unless it is one already: an argument of a function is rewritten before its body is."""
        if getattr(e, "is_whole", False):
            return e
        row = self.row(e.value)
        if row is None:
            if isinstance(e.value, ast.Name) and e.value.id in self.array_names:
                why = f"'{e.value.id}' may stand for another array or row here"
                self.refuse(e, why, "name it in the same block, before it is read")
            at = [self.expr(i) for i in _indices(e)]
            return ast.copy_location(
                ast.Subscript(e.value, at[0] if len(at) == 1 else ast.Tuple(at, ast.Load()), e.ctx), e
            )
        return self.of(e, row, _indices(e))

    # Expressions -----------------------------------------------------------------------------------------------------

    def expr(self, e: ast.expr) -> Any:
        """Rewrite an expression; what has to come before it is written at once."""
        match e:
            case ast.Name(id=name) if name in self.rows:
                self.refuse(e, f"the array '{name}' is used whole", "loop over its elements")
            case ast.Subscript(value=ast.Attribute(value=x, attr="shape"), slice=at) if (k := _axis(at)) is not None:
                row = self.row(x)
                if row is not None:
                    k = k if k >= 0 else k + self.free(row)
                    return ast.copy_location(self.extent(e, row, k), e)
                return e
            case ast.Call(func=ast.Name(id="len") as f, args=[x]) if self.found(f) is len and (row := self.row(x)):
                return ast.copy_location(self.extent(e, row, 0), e)
            case ast.Attribute(value=x, attr="size") if (row := self.row(x)) is not None:
                sizes = [self.extent(e, row, k) for k in range(max(1, self.free(row)))]
                found = sizes[0]
                for n in sizes[1:]:
                    found = ast.BinOp(found, ast.Mult(), n)
                return ast.copy_location(found, e)
            case ast.Subscript():
                return self.element(e)
            case ast.IfExp(test=test, body=x, orelse=y):
                test = self.expr(test)
                outer, (yes, a), (no, b) = self.made, self.apart(x), self.apart(y)
                self.made = outer
                if not yes and not no:
                    return ast.copy_location(ast.IfExp(test, a, b), e)
                name = self.fresh("either")
                for block, value in ((yes, a), (no, b)):
                    block.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), e))
                self.count[name] = 2
                self.made.append(ast.copy_location(ast.If(test, yes, no), e))
                return ast.copy_location(ast.Name(name, ast.Load()), e)
            case ast.BoolOp(op=op, values=values):
                first, *rest = values
                new = [self.expr(first)]
                for v in rest:
                    before, value = self.apart(v)
                    if before:
                        self.refuse(e, "a function is called on one side of 'and' or 'or'", "assign its result first")
                    new.append(value)
                return ast.copy_location(ast.BoolOp(op, new), e)
            case ast.Call(func=func) if own(self.found(func)) or self.loop_of(e):
                results = self.inline(e) or []
                if len(results) != 1:
                    self.refuse(e, f"{text(func)} does not return one number", "unpack what it returns")
                return results[0]
            case ast.Call(func=func, args=args, keywords=keywords):
                return ast.copy_location(ast.Call(func, [self.expr(a) for a in args], keywords), e)
            case ast.BinOp(left=x, op=op, right=y):
                return ast.copy_location(ast.BinOp(self.expr(x), op, self.expr(y)), e)
            case ast.UnaryOp(op=op, operand=x):
                return ast.copy_location(ast.UnaryOp(op, self.expr(x)), e)
            case ast.Compare(left=x, ops=ops, comparators=ys):
                return ast.copy_location(ast.Compare(self.expr(x), ops, [self.expr(y) for y in ys]), e)
        return e

    def apart(self, e: ast.expr) -> tuple[list[ast.stmt], ast.expr]:
        """Rewrite an expression that may not be evaluated; return what has to come before it, and it."""
        outer, self.made = self.made, []
        self.depth += 1
        found = self.expr(e)
        self.depth -= 1
        self.made, made = outer, self.made
        return made, found

    # Functions of one's own ------------------------------------------------------------------------------------------

    def inline(self, call: ast.Call, alone: bool = False) -> list[ast.expr] | None:
        """Write the body of a function in place of its call; return its results, None where there are none."""
        name = text(call.func)
        found, call = self.loop_of(call) or (self.found(call.func), call)
        self.rewritten |= found is whole.METHODS["dot"] or not (
            hasattr(found, "py_func") or found in whole.METHODS.values()
        )
        if found in self.inlining or getattr(found, "py_func", found) is self.kernel:
            self.refuse(call, f"{name} calls itself", "write it as a loop")
        try:
            plain, source, node = self.source_of(found)
        except (OSError, SyntaxError):  # a lambda in the middle of a line
            node = None
        if node is None:
            self.refuse(call, f"{name} is not a function written with def", "write it so")
        args = self.bound(call, node)
        arrays = {p for p in args if self.is_array(node, p)}
        body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if not alone and _elements_stored(body) & args.keys():
            self.refuse(call, f"{name} writes to an array inside an expression", "give its call a line of its own")
        new = self.moved(plain, node, call, source)
        body = [_renamed(s, new) for s in body]
        if plain.__code__.co_filename != self.file:
            for s in body:
                for n in ast.walk(s):
                    if hasattr(n, "lineno"):
                        n.lineno = call.lineno
        for s in body:
            self.note(s)
        outer, self.whole = self.whole, ast.Module([*self.whole.body, *body], [])
        stored = _elements_stored(body)
        self.written |= stored
        assigned = set(stores(node.body))
        for p, value in args.items():
            if p in arrays:
                if (row := self.row(value)) is None:
                    self.refuse(call, f"{name} is given '{text(value)}' for an array", "give it an array or a row")
                self.rows[new[p]] = self.frozen(call, row)
                self.array_names.add(new[p])
                continue
            value = self.expr(value)
            once = not stored and _uses(body, new[p]) <= 1
            if p not in assigned and (self.atom(value) or once):
                body = [_renamed(s, {}, {new[p]: value}) for s in body]
            else:
                self.count[new[p]] = self.count.get(new[p], 0) + 1
                self.put(call, new[p], value)
        self.inlining.append(found)
        results = self.results(body, call, name)
        self.inlining.pop()
        self.whole = outer
        return results

    def loop_of(self, call: ast.Call) -> tuple[Any, ast.Call] | None:
        """The loop in place of NumPy's function of whole rows, and its call; None where these are no rows."""
        loop, args = whole.LOOPS.get(id(self.found(call.func))), call.args
        if loop is None and isinstance(call.func, ast.Attribute) and self.row(call.func.value):
            loop, args = whole.METHODS.get(call.func.attr), [call.func.value, *args]
        rows = [self.row(x) for x in args]
        # no slices: one of NumPy ends where its array does
        fit = all(row and self.free(row) <= 1 and not any(isinstance(a, tuple) for a in row.at) for row in rows)
        if loop is None or call.keywords or not fit or len(args) != loop.__code__.co_argcount:
            return None
        return loop, ast.copy_location(ast.Call(call.func, args, []), call)

    def bound(self, call: ast.Call, node: ast.FunctionDef) -> dict[str, ast.expr]:
        """The arguments of a call by their names."""
        a = node.args
        if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or any(isinstance(x, ast.Starred) for x in call.args):
            self.refuse(call, f"{text(call.func)} has other than plain parameters", "name each one")
        params = [p.arg for p in a.args]
        found = dict(zip(params[len(params) - len(a.defaults) :], a.defaults, strict=True))
        found |= dict(zip(params, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        if len(call.args) > len(params) or found.keys() != set(params):
            self.refuse(call, f"{text(call.func)} takes {', '.join(params)}", "give it these")
        return {p: found[p] for p in params}

    def moved(
        self, plain: FunctionType, node: ast.FunctionDef, call: ast.Call, source: dict[int, str]
    ) -> dict[str, str]:
        """Names in the kernel for those of a function that is inlined."""
        local = {*(a.arg for a in node.args.args), *stores(node.body)}
        new = {n: self.fresh(n) for n in sorted(local)}
        theirs = outside(plain)
        for n in sorted({x.id for s in node.body for x in ast.walk(s) if isinstance(x, ast.Name)} - local):
            value = theirs.get(n)
            mine = self.outside.get(n)
            same = value is mine or (type(value) is type(mine) and isinstance(value, int | float) and value == mine)
            if same and n not in self.count and n not in self.params:
                continue
            if n not in self.taken and n not in self.outside:
                self.outside[n] = value
                self.taken.add(n)
                continue
            new[n] = next((k for k, v in self.outside.items() if v is value and k not in self.count
                           and k not in self.params), "") or self.fresh(n)  # fmt: skip
            self.outside[new[n]] = value
        if plain.__code__.co_filename == self.file:
            self.source.update(source)
        return new

    def results(self, body: list[ast.stmt], call: ast.Call, name: str) -> list[ast.expr] | None:
        """Write an inlined body; return its results."""
        *first, last = body
        ends = [j for s in body for j in jumps(s, (ast.Return,)) if isinstance(j, ast.Return) and j.value is not None]
        if not ends:
            for s in self.settle(body, (ast.Return,), lambda j: []):
                self.statement(s)
            return None
        if isinstance(last, ast.Return) and len(ends) == 1:
            assert last.value
            for s in first:
                self.statement(s)
            parts = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
            return [self.expr(p) for p in parts]
        value = ends[0].value
        count = len(value.elts) if isinstance(value, ast.Tuple) else 1
        word = name.split(".")[-1]
        made = [self.fresh(f"{word}_{k}" if count > 1 else f"{word}_is") for k in range(count)]
        for n in made:
            self.count[n] = 2

        def on(j: ast.Return) -> list[ast.stmt]:
            parts = j.value.elts if isinstance(j.value, ast.Tuple) else [j.value] if j.value else []
            if len(parts) != count:
                self.refuse(call, f"{name} returns different numbers of values", "return the same number always")
            return [ast.copy_location(ast.Assign([ast.Name(n, ast.Store())], p), j)
                    for n, p in zip(made, parts, strict=True)]  # fmt: skip

        for s in self.settle(body, (ast.Return,), on):
            self.statement(s)
        return [ast.copy_location(ast.Name(n, ast.Load()), call) for n in made]


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.stmt]]:
    """Every name that is assigned, with value and statement; where a value is unpacked, with all of it."""
    for s in ast.walk(node):
        if not isinstance(s, ast.Assign):
            continue
        for t in s.targets:
            several = isinstance(t, ast.Tuple | ast.List)
            pairs = [(t, s.value)] if not several else [(x, s.value) for x in t.elts]  # type: ignore[attr-defined]
            if several and isinstance(s.value, ast.Tuple | ast.List):
                pairs = list(zip(t.elts, s.value.elts, strict=False))  # type: ignore[attr-defined]
            yield from ((x.id, v, s) for x, v in pairs if isinstance(x, ast.Name))


def _swapped(s: ast.stmt) -> tuple[str, str] | None:
    """The names in ``a, b = b, a``."""
    match s:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=a), ast.Name(id=b)])],
            value=ast.Tuple(elts=[ast.Name(id=c), ast.Name(id=d)]),
        ) if (a, b) == (d, c):
            return a, b
    return None


def _mentions(nodes: Iterable[ast.AST]) -> list[str]:
    """Every name, once for each place."""
    return [n.id for s in nodes for n in ast.walk(s) if isinstance(n, ast.Name)]


def _indices(e: ast.Subscript) -> list[ast.expr]:
    return list(e.slice.elts) if isinstance(e.slice, ast.Tuple) else [e.slice]


def _elements_stored(block: Iterable[ast.AST]) -> set[str]:
    """The arrays of which statements assign elements."""
    return {_base(n) for s in block for n in ast.walk(s) if isinstance(n, ast.Subscript)
            and isinstance(getattr(n, "ctx", None), ast.Store)}  # fmt: skip


def _uses(block: Iterable[ast.AST], name: str) -> int:
    """How often statements read a name; more than once in a loop."""
    found = 0
    for s in block:
        for n in ast.walk(s):
            found += isinstance(n, ast.Name) and n.id == name and isinstance(getattr(n, "ctx", None), ast.Load)
            found += 2 * isinstance(n, ast.For) and any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(n))
    return found


def _axis(e: ast.expr) -> int | None:
    """The number of an axis, which may count from the end; None for other expressions."""
    number = e.operand if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub) else e
    if not isinstance(number, ast.Constant) or type(number.value) is not int:
        return None
    return number.value if number is e else -number.value


def _negative(e: ast.expr) -> bool:
    return isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub)


def _base(t: ast.expr) -> str:
    while isinstance(t, ast.Subscript):
        t = t.value
    return t.id if isinstance(t, ast.Name) else ""


def _load(t: ast.expr) -> ast.expr:
    new = copy.copy(t)
    new.ctx = ast.Load()  # type: ignore[attr-defined]
    return new


def _renamed(node: Any, new: dict[str, str], values: dict[str, ast.expr] | None = None) -> Any:
    """A copy of a statement with other names."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, n: ast.Name) -> ast.expr:
            if values and n.id in values and isinstance(getattr(n, "ctx", None), ast.Load):
                return ast.copy_location(copy.copy(values[n.id]), n)
            return ast.copy_location(ast.Name(new.get(n.id, n.id), getattr(n, "ctx", ast.Load())), n)

    return Rename().visit(copy.deepcopy(node))
