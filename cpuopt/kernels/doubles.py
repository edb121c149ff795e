"""Where a kernel computes in float64, as with ``1 + np.exp(x)``: for numba, a float32 and an integer make a float64.

Types are followed from the declared arguments through the text. What is not understood has no type, and is not told.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ad.lower.scope import outside, source_of
from ..ad.trees import last_name
from ..errors import UserError
from ..ops.storage import WIDE
from .registry import Kernel

INT, SINGLE, DOUBLE = "integer", WIDE, "float64"
CASTS = {WIDE: SINGLE, "float64": DOUBLE, "float": DOUBLE}
CASTS |= dict.fromkeys(("int", "int32", "int64", "uint64", "len", "floor", "ceil", "trunc", "bool"), INT)
ALIKE = {"abs", "fabs", "max", "min", "maximum", "minimum", "sign", "clip"}
"""Functions whose result is of the widest type of their arguments; that of any other is a float."""
MOST = 50
"""The calls of functions that are followed, each with other types: a text may come from a stranger."""


def note(kernel: Kernel) -> str:
    """Return a sentence that names the line of a user's kernel from which it computes in float64; "" if none does."""
    plain = getattr(kernel.function, "py_func", kernel.function)
    if (getattr(plain, "written_as", plain).__module__ or "").startswith(("cpuopt.", "cpuopt_generated.")):
        return ""
    try:
        plain, source, node = source_of(plain)
    except UserError:
        return ""
    known = {a.name: INT if a.dtype.startswith("int") else a.dtype for a in [*kernel.op.args, *kernel.scratch]}
    known |= {f"{a.name}_add": INT for a in kernel.op.args}
    found = Doubles(known, outside(plain), node).first if node else 0
    said = f"{kernel.name} computes in float64 from line {found} on: '{source.get(found, '').strip()}'"
    return f"{said}; if {WIDE} is enough, write np.{WIDE}(...) around its numbers" if found else ""


class Doubles(ast.NodeVisitor):
    """The types in a function.

    Parameters
    ----------
    functions : those that it may call, by name, which are followed, too.
    known : the types of their results, and the lines found in them, by name and types.

    Attributes
    ----------
    made : the lines that make a float64 of a float32.
    first : the first of them; 0 if there is none.
    """

    def __init__(
        self,
        types: Mapping[str, str | None],
        names: Mapping[str, Any],
        node: ast.FunctionDef,
        functions: Mapping[str, ast.FunctionDef] | None = None,
        known: dict[Any, tuple[str | None, list[int]]] | None = None,
    ) -> None:
        self.names, self.functions, self.known = names, functions or {}, {} if known is None else known
        self.types: dict[str, str | None] = {n: _type(x) for n, x in names.items()} | dict(types)
        self.made: list[int] = []
        for _ in range(2):  # what a loop's end assigns is read at its start
            self.returned: list[str | None] = []
            self.visit(node)
        self.first = min(self.made, default=0)

    def visit_Expr(self, s: ast.Expr) -> None:
        """Follow a call whose result is not used."""
        self.type(s.value)

    def visit_Return(self, s: ast.Return) -> None:
        """Note the type of a result."""
        self.returned.append(self.type(s.value) if s.value else None)

    def visit_Assign(self, s: ast.Assign) -> None:
        """Note the type of its value for its targets."""
        found = self.type(s.value)
        for target in s.targets:
            self.put(target, found)

    def visit_AugAssign(self, s: ast.AugAssign) -> None:
        """Treat it as an assignment."""
        self.put(s.target, self.mixed(s, self.type(s.target), self.type(s.value), isinstance(s.op, ast.Div)))

    def visit_For(self, s: ast.For) -> None:
        """Take a loop's variable for an integer, unless it runs over an array."""
        called = isinstance(s.iter, ast.Call) and last_name(s.iter.func) in ("range", "prange", "reversed")
        self.put(s.target, INT if called else None)
        self.generic_visit(s)

    def put(self, target: ast.expr, found: str | None) -> None:
        """Note the type of a local, which numba makes the widest of all that it holds; an array keeps its own."""
        before = self.type(target)
        if {before, found} == {SINGLE, DOUBLE}:
            self.made += [target.lineno] * (before == DOUBLE and isinstance(target, ast.Subscript))
            found = DOUBLE
        if isinstance(target, ast.Name):
            self.types[target.id] = found
        for part in target.elts if isinstance(target, ast.Tuple) else ():
            self.put(part, INT if found == INT else None)

    def mixed(self, at: Any, x: str | None, y: str | None, quotient: bool = False) -> str | None:
        """Return the type of an operation's result."""
        if x is None or y is None:
            return DOUBLE if DOUBLE in (x, y) else None
        if x == y != INT:
            return x
        if {x, y} == {INT}:
            return DOUBLE if quotient else INT
        if SINGLE in (x, y):
            self.made.append(at.lineno)
        return DOUBLE

    def type(self, e: ast.expr) -> str | None:
        """Return the type of an expression."""
        match e:
            case ast.Constant():
                return _type(e.value)
            case ast.Name(id=name):
                return self.types.get(name)
            case ast.Attribute(attr="pi" | "e" | "inf" | "nan" | "tau"):
                return DOUBLE
            case ast.Attribute(attr="shape" | "size"):
                return INT
            case ast.Subscript(value=x):
                return self.type(x)
            case ast.UnaryOp(operand=x):
                return self.type(x)
            case ast.BinOp(left=x, op=ast.Pow(), right=ast.Constant(value=int())):
                return self.type(x)
            case ast.BinOp(left=x, op=op, right=y):
                return self.mixed(e, self.type(x), self.type(y), isinstance(op, ast.Div))
            case ast.Compare() | ast.BoolOp():
                return INT
            case ast.IfExp(body=x, orelse=y):
                return _common([self.type(x), self.type(y)])
            case ast.Call(func=ast.Attribute(value=x)) if known := self.type(x):  # a.reshape(...), a.sum()
                return known
            case ast.Call(func=f, args=args):
                return self.called(e, last_name(f), [self.type(a) for a in args])
        return None

    def called(self, e: ast.Call, name: str, args: list[str | None]) -> str | None:
        """Return the type of a call."""
        if callee := self.functions.get(name):
            given = dict(zip([a.arg for a in callee.args.args], args, strict=False))
            given |= {k.arg: self.type(k.value) for k in e.keywords if k.arg}
            key = name, *given.items()
            if key not in self.known and len(self.known) < MOST:
                self.known[key] = None, []  # where it calls itself
                inner = Doubles(given, self.names, callee, self.functions, self.known)
                self.known[key] = _common(inner.returned), inner.made
            found, made = self.known.get(key, (None, []))
            self.made += [line for line in made if line not in self.made]
            return found
        if name in CASTS:
            return CASTS[name]
        ours = isinstance(e.func, ast.Name) and not isinstance(getattr(np, name, None), np.ufunc) and name not in ALIKE
        if name in ("zeros", "ones", "empty", "full") and not ours:
            kinds = [last_name(x) for x in [*e.args[1:], *(k.value for k in e.keywords)]]
            return next((CASTS[k] for k in kinds if k in CASTS), DOUBLE)
        if (ours or not hasattr(np, name)) and name not in ("erf", "erfc", "acos", "asin", "atan", "atan2", "pow"):
            return None  # a function of one's own, or of the toolkit, as `load` of vectors
        mixed = args[0] if args else None
        for other in args[1:]:
            mixed = self.mixed(e, mixed, other)
        return DOUBLE if mixed == INT and name not in ALIKE else mixed


def _type(x: Any) -> str | None:
    """Return the type of a number, or of an array's elements."""
    if isinstance(x, np.ndarray | np.generic):
        return INT if x.dtype.kind in "iub" else str(x.dtype)
    return INT if isinstance(x, int) else DOUBLE if isinstance(x, float) else None


def _common(types: Sequence[str | None]) -> str | None:
    """Return the type of a value that has one of some types."""
    kinds = {*types}
    return kinds.pop() if len(kinds) == 1 else None if not kinds or None in kinds else DOUBLE
