"""The parser of a kernel's source to the statements that can be differentiated; others are refused with their line.

A kernel may use array and number parameters, scalar locals; ``name = e``, ``a[i, j] = e`` and ``+= -= *= /=`` on
both; ``for i in range(...)`` and ``prange``; ``if``/``else``; ``+ - * /``, constant powers, ``exp log sqrt tanh sin cos
abs max min`` and casts to float; ``x.shape[k]``; conditional expressions; integer indices, looked-up ones too; and
``view = a.reshape(...)`` outside loops.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

import numpy as np

from .kernel import NUMBER, Accum, Assign, For, If, Local, PlainKernel, Reshape, Stmt, UnsupportedError, assigned, flat
from .lower import lower
from .lower.scope import PYTHON, Scope, outside, source_of
from .rules import ALIASES, BINARY, CASTS, CHOICES, DERIVATIVE, INTEGER
from .trees import element, function_name, index, last_name, names, quote, text

KNOWN = {*DERIVATIVE, *BINARY, *CASTS, *CHOICES, *INTEGER, *ALIASES} - {"rsqrt"}
"""The builtins that a kernel may call."""
SORTS = {"sort", "sorted", "argsort", "partition", "median", "percentile", "quantile"}
SORTED = "pass the order as an index input, made outside by np.argsort"
"""What to write instead of these."""


class _Reader:
    """Parser of one function.

    Attributes
    ----------
    outside : its globals and builtins.
    rewritten : whether a call was found that numba does not compile.
    functions : those that are called, with the modules named in calls, by their names in generated text.
    """

    def __init__(self, file: str, source: dict[int, str], outside: dict[str, Any]) -> None:
        self.file, self.source, self.outside = file, source, outside
        self.index_names: set[str] = set()
        self.axes: dict[str, int] = {}
        self.views: dict[str, Reshape] = {}
        self.functions: dict[str, Any] = {}
        self.loops: list[str] = []
        self.rewritten = False

    def refuse(self, node: ast.AST, why: str, instead: str) -> NoReturn:
        """Raise, with file, line and code."""
        line = getattr(node, "lineno", 0)
        code = self.source.get(line, text(node)).strip()
        raise UnsupportedError(f"{self.file}:{line}: '{code}': {why}; {instead}")

    def found(self, e: ast.expr) -> Any:
        """Return the object of a name, or of a name in a module, outside the function; None for other expressions."""
        match e:
            case ast.Name(id=name):
                return self.outside.get(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                home = self.outside.get(module)
                return getattr(home, name, None) if isinstance(home, ModuleType) else None
        return None

    def known(self, func: ast.expr) -> Any:
        """A known function as generated text calls it; None for any other, whatever its name."""
        found = self.found(func)
        for home, modules in ((PYTHON, [PYTHON]), (math, [math]), (np, [np, sys.modules.get("numba")])):
            for name in sorted(KNOWN - {"max", "min"} if home is np else KNOWN):  # np.max takes an axis
                if found is None or all(getattr(m, name, None) is not found for m in modules):
                    continue
                bare = isinstance(func, ast.Name) and func.id == name
                if home is np:
                    return ast.copy_location(quote("np." + name), func)
                if bare or home is math:
                    if home is math:
                        self.functions |= {name: found} if bare else {"math": math}
                    return ast.copy_location(quote(name if bare else "math." + name), func)
        return None

    def block(self, body: list[ast.stmt]) -> list[Stmt]:
        return [s for node in body for s in self.statement(node)]

    def statement(self, node: ast.stmt) -> list[Stmt]:
        """Read one statement."""
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return []
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                return self.unpack(node, targets, value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="reshape")) as call):
                return [self.view(node, name, call)]
            case ast.Assign(targets=[target], value=value):
                return [Assign(node.lineno, self.target(target), self.expr(value))]
            case ast.AugAssign(target=target, op=op, value=value):
                target, value = self.target(target), self.expr(value)
                if isinstance(op, ast.Add):
                    return [Accum(node.lineno, target, value)]
                if isinstance(op, ast.Sub):
                    return [Accum(node.lineno, target, ast.UnaryOp(ast.USub(), value))]
                if not isinstance(op, ast.Mult | ast.Div):
                    self.refuse(node, "this operator is not one of += -= *= /=", "write the assignment in full")
                return [Assign(node.lineno, target, ast.BinOp(copy.copy(target), op, value))]
            case ast.For():
                return [self.loop(node)]
            case ast.If(test=test, body=body, orelse=orelse):
                return [If(node.lineno, self.expr(test), self.block(body), self.block(orelse))]
        instead = {
            ast.While: "write a for loop over a range",
            ast.Break: "let the loop run to its end, with an if inside",
            ast.Continue: "put the rest of the body under an if",
            ast.Return: "write to an array parameter",
            ast.Assign: "assign to one name or element at a time",
            ast.AnnAssign: "write it without the annotation",
            ast.Expr: "a kernel only assigns",
        }.get(type(node), "see the subset in docs/ad.md")
        self.refuse(node, f"{type(node).__name__} is not in the differentiable subset", instead)

    def unpack(self, node: ast.Assign, targets: list[ast.expr], value: ast.expr) -> list[Stmt]:
        if not (isinstance(value, ast.Attribute) and value.attr == "shape"):
            self.refuse(node, "only tuples of one length, rows and .shape are unpacked", "write one line each")
        parts: list[ast.expr] = [ast.Subscript(value, ast.Constant(k)) for k in range(len(targets))]
        return [
            Assign(node.lineno, self.target(t), self.expr(ast.copy_location(v, node)))
            for t, v in zip(targets, parts, strict=True)
        ]

    def view(self, node: ast.Assign, name: str, call: ast.Call) -> Reshape:
        func = call.func
        assert isinstance(func, ast.Attribute)
        if not isinstance(func.value, ast.Name) or call.keywords or self.loops or name in self.views:
            self.refuse(node, "a view is made once, of a parameter, outside loops", "move it to the top of the kernel")
        shape = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args
        self.axes[name] = len(shape)
        self.views[name] = Reshape(node.lineno, name, func.value.id, [self.expr(e, whole=True) for e in shape])
        return self.views[name]

    def loop(self, node: ast.For) -> For:
        call = node.iter
        kind = last_name(call.func) if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or kind not in ("range", "prange") or call.keywords or node.orelse:
            self.refuse(node, "only 'for name in range(...)' and prange are differentiated", "loop over indices")
        if all(self.found(call.func) is not f for f in (range, getattr(sys.modules.get("numba"), "prange", range))):
            why = f"{text(call.func)} is neither Python's range nor numba's prange"
            self.refuse(node, why, "give a function of one's own another name")
        if not isinstance(node.target, ast.Name):
            self.refuse(node, "the loop variable is not a name", "write for i in range(...)")
        args = [self.expr(a, whole=True) for a in call.args]
        step = 1
        if len(args) == 3:
            try:
                step = ast.literal_eval(args[2])
            except ValueError:
                step = 0
            if type(step) is not int or step == 0:
                self.refuse(node, "the step of a range must be an integer other than 0", "write the number out")
        lo, hi = (quote("0"), args[0]) if len(args) == 1 else (args[0], args[1])
        var = node.target.id
        if var in self.loops:
            self.refuse(node, f"'{var}' is already the variable of a loop around it", "give this one another name")
        self.index_names.add(var)
        self.loops.append(var)
        body = self.block(node.body)
        self.loops.pop()
        written = assigned(body)
        if var in written:
            self.refuse(node, f"'{var}' is written in the loop", "use a variable of your own")
        written |= {self.views[n].base for n in written & self.views.keys()}
        for bound in (lo, hi):
            if clash := (names(bound) | {self.views[n].base for n in names(bound) & self.views.keys()}) & written:
                why = f"the bound reads '{min(clash)}', which the loop writes"
                self.refuse(node, why, "compute the bound before the loop")
        reduced = {n for n in written if kind == "prange" and _reduces(body, n)}
        return For(node.lineno, var, (lo, hi, step), body, kind == "prange", reduced)

    def target(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if node.id in self.views:
                self.refuse(node, f"'{node.id}' is a view and is assigned", "give the result another name")
            return node
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self.expr(node)
        self.refuse(node, "the target is neither a name nor an element of an array", "assign to one element at a time")

    def expr(self, e: ast.expr, whole: bool = False) -> Any:
        """Check an expression; `whole` if it stands for an integer, in an index or a range."""
        match e:
            case ast.Constant(value=bool() | int() | float()):
                return e
            case ast.Name(id=name):
                if whole:
                    self.index_names.add(name)
                return e
            case ast.Attribute(value=module, attr="inf" | "pi" | "e" as attr) if self.found(module) is np:
                return ast.copy_location(quote("np." + attr), e)
            case ast.Attribute(value=module, attr="inf" | "pi" | "e" | "tau" as attr) if self.found(module) is math:
                self.functions["math"] = math
                return ast.copy_location(quote("math." + attr), e)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant(value=int())):
                return e
            case ast.Subscript(value=ast.Name(id=name)):
                parts = index(e)
                if isinstance(table := self.outside.get(name), np.ndarray) and name not in self.axes:
                    if table.ndim != len(parts):
                        self.refuse(e, f"'{name}' has {table.ndim} axes", "give every index")
                    for part in parts:
                        self.expr(part, whole=True)
                    return e
                if any(isinstance(n, ast.Slice) for part in parts for n in ast.walk(part)):
                    self.refuse(e, "a slice is not in the subset", "loop over the indices")
                if self.axes.setdefault(name, len(parts)) != len(parts):
                    self.refuse(e, f"'{name}' has {self.axes[name]} indices elsewhere", "give every index")
                if whole:
                    self.index_names.add(name)
                for part in parts:
                    self.expr(part, whole=True)
                return e
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=x):
                return ast.copy_location(ast.UnaryOp(e.op, self.expr(x, whole)), e)
            case ast.BinOp(left=x, op=op, right=y):
                if isinstance(op, ast.MatMult):
                    self.refuse(e, "this operator is not in the subset", "write loops of + - * /")
                return ast.copy_location(ast.BinOp(self.expr(x, whole), op, self.expr(y, whole)), e)
            case ast.Compare(left=x, ops=ops, comparators=ys):
                return ast.copy_location(ast.Compare(self.expr(x), ops, [self.expr(y) for y in ys]), e)
            case ast.BoolOp(op=op, values=xs):
                return ast.copy_location(ast.BoolOp(op, [self.expr(x) for x in xs]), e)
            case ast.IfExp(test=test, body=x, orelse=y):
                new = ast.IfExp(self.expr(test), self.expr(x, whole), self.expr(y, whole))
                return ast.copy_location(new, e)
            case ast.Call(func=ast.Name(id="len") as func, args=[ast.Name()] as args) if self.found(func) is len:
                return quote("x.shape[0]", x=args[0])
            case ast.Call(func=func, args=args, keywords=[]) if known := self.known(func):
                return ast.copy_location(self.call(e, known, args, whole), e)
            case ast.Call(func=func):
                if e.keywords and self.known(func):
                    self.refuse(e, f"{text(func)} is given arguments by name", "give them by position")
                every = " ".join(sorted(KNOWN))
                why = f"{text(func)} has no derivative here"
                if last_name(func) in KNOWN and not e.keywords:
                    why = f"{text(func)} is not the function of that name of Python, math or numpy"
                instead = SORTED if last_name(func) in SORTS else "write it out"
                self.refuse(e, why, f"{instead}; known functions: {every}")
        self.refuse(e, f"'{text(e)}' is not in the subset", "see the subset in docs/ad.md")

    def call(self, e: ast.Call, known: Any, args: list[ast.expr], whole: bool) -> Any:
        """Check a call of a known function; several arguments of max and min are taken two at a time."""
        name = last_name(known)
        whole = whole and name not in INTEGER
        new = [self.expr(a, whole) for a in args]
        count = 3 if name == "clip" else 2 if name in CHOICES or name in BINARY or name in ("pow", "power") else 1
        if name in ("max", "min") and len(new) > 2:
            first = ast.Call(known, new[:2], [])
            return functools.reduce(lambda a, b: ast.Call(known, [a, b], []), new[2:], first)
        if len(new) != count:
            self.refuse(e, f"{text(e.func)} is given {len(args)} arguments", f"give it {count}")
        if name in ALIASES:
            self.rewritten |= name == "clip"  # numba's takes arrays
            return quote(ALIASES[name], **dict(zip("xyz", new, strict=False)))
        return ast.Call(known, new, [])


def _reduces(body: list[Stmt], name: str) -> bool:
    """Return whether a body does nothing with a scalar but ``+=``, or ``*=``, or ``= max(...)`` and so on."""
    kinds, read = set(), list[ast.expr]()
    for s in flat(body):
        if not isinstance(s, Assign) or text(s.target) != name:
            read += s.held
            continue
        match s.value:
            case value if isinstance(s, Accum):
                kind, parts = "+", [ast.Name(name), value]
            case ast.BinOp(left=x, op=ast.Mult() | ast.Div() as op, right=y):
                kind, parts = type(op).__name__, [x, y]
            case ast.Call(args=[x, y]) as call if function_name(call) in CHOICES:
                kind, parts = function_name(call), [x, y]
            case _:
                return False
        own = [k for k, x in enumerate(parts) if text(x) == name]
        if len(own) != 1 or (kind == "Div" and own != [0]):
            return False
        read.append(parts[1 - own[0]])
        kinds.add(kind)
    return len(kinds) == 1 and not any(name in names(e) for e in read)


def read(
    function: Callable[..., None], in_place: Iterable[str] = (), axes: Mapping[str, int] = MappingProxyType({})
) -> PlainKernel:
    """Read a kernel, compiled or not.

    Parameters
    ----------
    axes : the number of axes of its arrays, if it is known; it need not follow from the kernel's text then.
    in_place : arrays that it updates. The kernel that is read has a parameter more for each, `PlainKernel.before`,
        which it copies to that array first.

    Raises
    ------
    UnsupportedError
        For code outside the subset.
    """
    plain, source, node = source_of(function)
    file = plain.__code__.co_filename
    reader = _Reader(file, source, outside(plain))
    if node is None:
        reader.refuse(ast.Constant(0, lineno=min(source)), "this is not a function", "write a kernel with def")
    a = node.args
    if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or a.defaults:
        reader.refuse(node, "a kernel has plain parameters only", "name each one, without a default")
    params = [arg.arg for arg in a.args]
    scope = Scope(node, file, reader.refuse, reader.found, reader.outside, source, plain, axes)
    node = lower(node, scope)
    reader.index_names |= scope.indices
    body = reader.block(node.body)
    words: dict[int, set[str]] = {line: set() for line in source}
    for n in ast.walk(node):
        if isinstance(n, ast.Name | ast.Attribute) and hasattr(n, "lineno"):
            words.setdefault(n.lineno, set()).add(n.id if isinstance(n, ast.Name) else n.attr)
    kernel = PlainKernel(node.name, file, params, body, {}, reader.index_names, source, {}, reader.views, words)
    for name, made in scope.local.items():
        shape = [reader.expr(e, whole=True) for e in made.shape]
        kernel.local[name] = Local(shape, made.dtype, made.owner)
    kernel.rewritten = scope.rewritten or reader.rewritten
    _check(kernel, reader, node)
    for name in in_place:
        _copy_before(kernel, name, node.lineno)
    return kernel


def _copy_before(kernel: PlainKernel, name: str, line: int) -> None:
    """Let a kernel start from a copy of an array that it updates."""
    if name not in kernel.arrays:
        kernel.refuse_parameter(
            f"'{name}' is declared as updated in place, and is no array", "declare it as it is used"
        )
    old = f"{name}_before"
    while old in kernel.taken or f"d{old}" in kernel.taken:
        old += "_"
    at = [ast.Name(f"k{axis}_{name}") for axis in range(kernel.arrays[name])]
    body: list[Stmt] = [Assign(line, element(name, at), element(old, at))]
    for axis in reversed(range(len(at))):
        size = quote("x.shape[k]", x=ast.Name(name), k=ast.Constant(axis))
        body = [For(line, at[axis].id, (quote("0"), size, 1), body)]
    kernel.body[:0] = body
    kernel.params.append(old)
    kernel.arrays[old] = kernel.arrays[name]
    kernel.before[name] = old


def _check(kernel: PlainKernel, reader: _Reader, node: ast.FunctionDef) -> None:
    """Check the function as a whole: arrays, aliases, undefined names; find its globals."""
    arrays = reader.axes | {
        n.value.id: reader.axes.get(n.value.id, 0)
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and n.attr == "shape" and isinstance(n.value, ast.Name)
    }
    arrays |= {v.base: arrays.get(v.base, 0) for v in kernel.views.values()}
    written = assigned(kernel.body)
    where = ast.parse("pass").body[0]
    scalars = {s.name: s.line for s in flat(kernel.body) if isinstance(s, Assign)}
    for s in flat(kernel.body):
        where.lineno = s.line
        reads = s.held
        if isinstance(s, For) and s.var in {*scalars, *kernel.params, *kernel.views}:
            also = f"assigned in line {scalars[s.var]} too" if s.var in scalars else "a parameter or a view too"
            reader.refuse(where, f"the loop variable '{s.var}' is {also}", "give one of them another name")
        for e in reads:
            held = {id(n.value) for n in ast.walk(e) if isinstance(n, ast.Subscript | ast.Attribute)}
            for n in ast.walk(e):
                if isinstance(n, ast.Name) and n.id in arrays and id(n) not in held:
                    reader.refuse(where, f"the array '{n.id}' is used whole", "loop over its elements")
        if isinstance(s, Assign) and isinstance(s.target, ast.Name):
            if s.target.id in kernel.params or s.target.id in arrays:
                reader.refuse(where, f"the parameter '{s.target.id}' is assigned", "use a local of another name")
        if isinstance(s, Reshape) and s.base not in kernel.params:
            reader.refuse(where, f"'{s.base}' is no parameter", "make a view of a parameter")
        if isinstance(s, Assign) and isinstance(s.target, ast.Subscript) and s.name not in arrays:
            reader.refuse(where, f"'{s.name}' is not an array parameter", "pass it as a parameter")
    for name in arrays:
        if name not in kernel.params and name not in kernel.views and name not in kernel.local:
            where.lineno = next(iter(kernel.source))
            reader.refuse(where, f"the array '{name}' is no parameter", "pass it as a parameter")
    kernel.arrays = {n: k for n, k in arrays.items() if n in kernel.params}
    kernel.arrays |= {n: len(made.shape) for n, made in kernel.local.items()}
    local = {*kernel.params, *written, *kernel.views, *kernel.local}
    used = set().union(*(names(e) for s in flat(kernel.body) for e in s.held),
                       *(names(e) for made in kernel.local.values() for e in made.shape))  # fmt: skip
    for name in sorted(used - local):
        value = reader.outside.get(name)
        if not isinstance(value, NUMBER | np.ndarray):
            where.lineno = next((s.line for s in flat(kernel.body) for e in s.held if name in names(e)), 0)
            reader.refuse(where, f"'{name}' is not a number that is known when the module is loaded", "pass it in")
        kernel.names[name] = value
    kernel.names |= reader.functions
