"""The text of a candidate: what it may contain, as a whitelist on its syntax tree. The text is parsed, never imported.

A kernel in nopython mode does arithmetic on its arrays, and nothing else, as long as its text cannot name a way out:
object mode, pointers, random numbers, other kernels, state that outlives a call. So each rule names what is allowed;
whatever it does not name is refused. ``tests/judge/test_rules.py`` has a kernel for each rule that it alone stops.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from .. import ops
from ..errors import BY_RULE, RefusedError
from ..kernels.registry import NAME
from ..ops import declaration
from ..ops.declaration import Dim

RULES: Mapping[str, str] = {
    "text": "Python in UTF-8 of at most 256 KiB and 32,768 nodes, 200 levels deep",
    "statement": "imports, constants and functions at the level of the file",
    "import": "numpy as np, math, numba's prange, cpuopt's kernel, helper and ops, symbols of sizes, and the toolkit",
    "toolkit": "functions and numbers of the kernel toolkit that kernels call",
    "name": "names of the function itself, of those around it, and of the file; none that begins with an underscore",
    "shadow": "one meaning for each name at the level of the file",
    "constant": "constants: numbers, tuples of them, loops made from a formula, and lists of scratch",
    "power": "powers with an exponent of at most 64 where the file computes a constant",
    "decorator": "functions under @kernel(ops.OP, 'NAME', ...) or @helper(...), or plain ones that size scratch",
    "option": "the options scratch, parallel, fastmath, skips and narrow of a kernel; of a helper forceinline too",
    "signature": "parameters without defaults, annotations or stars",
    "syntax": "arithmetic, comparisons, assignments, for, while, if, return, subscripts, tuples and calls",
    "text constant": "no text in a function but its docstring, and sizes['N'] in one that sizes scratch",
    "literal": "whole numbers of 64 bits",
    "call": "calls of functions of the file, the toolkit, np and math, and of a few of Python's",
    "numpy": "NumPy's types and elementwise functions, sums, and arrays of one value",
    "math": "the functions and constants of math on floats",
    "attribute": "the attributes shape, size, ndim and T of arrays, and the methods reshape, sum, max, min and mean",
    "library": "no product of matrices by a library",
    "keyword": "arguments by place, and dtype= in a compiled function; an array's type is one of NumPy's",
}
"""What each rule allows, by its name."""
LONGEST, DEEPEST, MOST_NODES, MOST_POWER = 256 << 10, 200, 32_768, 64


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(text.split())


TOOLKIT = "constants elementwise fastmath lanes queue simd tiles pairs"
"""The modules of the toolkit from which a candidate may import."""
MAKERS = {"queue": {"for_each_thread", "QUEUE", "ORDERED"}, "elementwise": {"loop_of"}}
"""What a candidate may import of them that is neither a compiled function nor a number."""
ADDRESSES = {"begins_line", "put_place", "listed_pair_product"}
"""What no candidate may import of them: it makes a number of an address, or an address of a number. A text that knows
where its arrays lie can tell a check from the timing, and find there what it wrote for an earlier call."""


def usable(module: str) -> set[str]:
    """Return the names of a module of the toolkit that a candidate may import: compiled functions, and numbers."""
    there = vars(import_module(f"cpuopt.kernels.toolkit.{module}")).items()
    found = {name for name, x in there if hasattr(x, "py_func") or type(x).__name__ == "_Intrinsic" or _is_number(x)}
    return {name for name in found - ADDRESSES if not name.startswith("_")} | MAKERS.get(module, set())


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | np.number) or (isinstance(x, tuple | set) and all(map(_is_plain, x)))


def _is_plain(x: object) -> bool:
    return isinstance(x, int | float | str | np.number)


MODULES: Mapping[str, Collection[str]] = {
    "numba": {"prange"},
    "cpuopt": {"kernel", "helper", "ops"},
    "math": words("sqrt exp expm1 log log1p log2 tanh sinh cosh sin cos atan erf erfc pow fabs floor ceil trunc "
                "pi e inf nan lcm gcd isnan isinf isfinite"),
    "cpuopt.ops.declaration": {n for n, x in vars(declaration).items() if isinstance(x, Dim)},
    **{f"cpuopt.kernels.toolkit.{name}": usable(name) for name in TOOLKIT.split()},
}  # fmt: skip
"""What a candidate may import from where."""
TYPES = words("float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_")
NUMPY = TYPES | words(
    "sqrt exp exp2 expm1 log log1p log2 tanh sinh cosh sin cos arctan abs fabs absolute sign square power minimum "
    "maximum fmin fmax floor ceil rint trunc isnan isinf isfinite copysign where sum max min mean prod cumsum argmax "
    "argmin zeros ones full zeros_like ones_like full_like pi e inf nan"
)
ARRAYS = ("zeros", "ones", "full")
COMPILED = {n for n in NUMPY if n.startswith(ARRAYS)} | words("where sum max min mean prod cumsum argmax argmin")
"""What only compiled functions may call: in Python some make arrays, and others read a type from a text."""
BUILTINS = {f.__name__: f for f in (range, len, min, max, abs, int, float, bool, round, divmod)}
PYTHONS = frozenset(vars(sys.modules["builtins"]))
ATTRIBUTES, METHODS = {"shape", "size", "ndim", "T"}, {"reshape", "sum", "max", "min", "mean"}
KERNEL_OPTIONS = {"scratch", "parallel", "fastmath", "skips", "narrow"}
HELPER_OPTIONS = {"parallel", "fastmath", "forceinline"}
STATEMENTS = (ast.Assign, ast.AugAssign, ast.For, ast.While, ast.If, ast.Return, ast.Expr, ast.Pass, ast.Break,
              ast.Continue)  # fmt: skip
EXPRESSIONS = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
               ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple, ast.Starred)  # fmt: skip
COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CONSTANTS = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.IfExp,
             ast.Compare, ast.Subscript)  # fmt: skip


def importing(name: str, *_: Any) -> Any:
    """Import as ``__import__`` does, from the modules that a candidate may name; NumPy also imports its own parts."""
    if name not in {*MODULES, __name__} and name.partition(".")[0] != "numpy":
        raise ImportError(f"a candidate may not import {name}")
    return import_module(name)


NAMES: dict[str, Any] = {**BUILTINS, "__import__": importing}
"""The ``__builtins__`` of a candidate. The rules are the wall; behind it, a name that they let through is not there."""
GUARD = "from cpuopt.judge.rules import NAMES as __builtins__"
"""The first line of an adopted file, by which its functions have those names alone."""


def breach(rule: str, line: int, said: str) -> RefusedError:
    """Return the error of a text that breaks a rule: the line, what stands there, and what is allowed."""
    return RefusedError(f"line {line}: {said}; allowed are {RULES[rule]}", BY_RULE, {"rule": rule, "line": line})


Kernels = tuple[tuple[str, str], ...]
"""The op of each kernel of a text, and the name that it registers under."""


def read(text: str, without: Collection[str] = ()) -> Kernels:
    """Parse a text, hold it against the rules, and return its kernels.

    Parameters
    ----------
    without : rules that are left out, for a test of the others.

    Raises
    ------
    RefusedError
        For the first breach of a rule.
    """
    try:
        return _Text(text, frozenset(without)).read()
    except RecursionError:
        raise breach("text", 1, "its syntax has too many levels") from None


@dataclass
class _Text:
    text: str
    without: frozenset[str]
    bound: dict[str, str] = field(default_factory=dict)
    """What each name of the file is, from the line on that binds it: ``module``, ``function``, ``maker``,
    ``decorator``, ``ops``, ``constant``, or ``list``, which only options of a kernel may name."""
    defined: set[str] = field(default_factory=set)
    """The functions of the file, which others call before they stand there."""
    types: set[str] = field(default_factory=lambda: {"float", "int", "bool"})
    """The names of types of numbers."""
    kernels: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, rule: str, node: ast.AST | None, said: str) -> None:
        if rule not in self.without:
            raise breach(rule, getattr(node, "lineno", 1), said)

    def read(self) -> Kernels:
        try:
            raw = self.text.encode()
            if len(raw) > LONGEST:
                self.refuse("text", None, f"the text has {len(raw):,} bytes")
            tree = ast.parse(self.text.removeprefix("\ufeff"))
            depth, nodes = _extent(tree)
            small = depth <= DEEPEST and nodes <= MOST_NODES
            other = small and b"coding" in raw and ast.dump(ast.parse(raw)) != ast.dump(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError, LookupError) as e:
            raise breach("text", getattr(e, "lineno", None) or 1, f"it cannot be parsed ({e})") from None
        if other:  # an encoding can hide lines in what is a comment here
            self.refuse("text", None, "the encoding that it declares makes another text of it")
        if not small:
            self.refuse("text", None, f"its syntax has {nodes:,} nodes or more, and {depth} levels or more")
        self.defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        for node in tree.body:
            if _is_text(node):
                continue
            if isinstance(node, ast.FunctionDef):
                self.function(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports(node)
            elif isinstance(node, ast.Assign):
                self.assigned(node)
            else:
                self.refuse("statement", node, f"{_shown(node)} at the level of the file")
        return tuple(self.kernels)

    # The level of the file --------------------------------------------------------------------------------------------

    def meaning(self, name: str) -> str:
        """Return what a function of the file finds by a name that is nobody's local: a kind, or "" for what is refused.

        A function may run before a line below it did. By then a name that is also one of Python's would be Python's.
        """
        if name in self.bound:
            return self.bound[name]
        if name in BUILTINS or (name in self.defined and name not in PYTHONS):
            return "function"
        return ""

    def bind(self, name: str, kind: str, node: ast.AST) -> None:
        self.own(name, node)
        if name in self.bound or name in BUILTINS:
            self.refuse("shadow", node, f"{name!r} has a meaning already")
        self.bound[name] = kind

    def own(self, name: str, node: ast.AST, *, local: bool = False) -> None:
        """Check a name that the text gives."""
        if name.startswith("_") and not (local and name == "_"):
            self.refuse("name", node, f"the name {name!r}")

    def imports(self, node: ast.Import | ast.ImportFrom) -> None:
        if ast.unparse(node) == GUARD:
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name
                if (alias.name, name) not in (("numpy", "np"), ("math", "math")):
                    self.refuse("import", node, f"import {alias.name}")
                self.bind(name, "module", node)
            return
        home = node.module or ""
        if node.level or home not in MODULES:
            self.refuse("import", node, f"from {'.' * node.level}{home} import ...")
        for alias in node.names:
            name = alias.asname or alias.name
            if alias.name not in MODULES.get(home, ()):
                rule = "toolkit" if home.startswith("cpuopt.kernels") else "math" if home == "math" else "import"
                self.refuse(rule, node, f"{alias.name!r} from {home}")
            self.bind(name, _kind(home, alias.name), node)

    def assigned(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.List | ast.Set) and not _sizes(node.value):
            self.refuse("constant", node, _shown(node.value))
        self.option(node.value)
        values = node.value.elts if isinstance(node.value, ast.Tuple) else []
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for i, name in enumerate(names):
                if not isinstance(name, ast.Name):
                    self.refuse("statement", node, f"an assignment to {_shown(name)}")
                    continue
                value = values[i] if len(names) > 1 and i < len(values) else node.value
                function = value.func if isinstance(value, ast.Call) else value
                kind = self.bound.get(function.id, "") if isinstance(function, ast.Name) else ""
                kind = "list" if kind == "list" or isinstance(node.value, ast.List | ast.Set) else kind
                kind = "function" if kind == "maker" else kind
                self.types |= {name.id} if _is_type(value) else set()
                self.bind(name.id, kind if kind in ("function", "list") else "constant", node)

    def option(self, node: ast.expr, named: bool = True) -> None:
        """Check what an option of a kernel may be: a constant, or a list, which no function can name and so change.

        Parameters
        ----------
        named : whether it has a name in the file; otherwise a tuple may be in place of the list.
        """
        of = (ast.List, ast.Set) if named else (ast.List, ast.Set, ast.Tuple)
        for x in node.elts if isinstance(node, of) else [node]:
            starred = isinstance(x, ast.Starred) and isinstance(node, ast.List)
            other = x.value if starred and isinstance(x, ast.Starred) else x
            if isinstance(other, ast.Name) and self.bound.get(other.id) == "list" and (starred or x is node):
                continue
            for part in x.elts if isinstance(x, ast.Tuple) and x is not node else [x]:
                if x is node or not _is_word(part):  # the names of scratch and of gradients
                    self.constant(part, sizes=True)

    def constant(self, node: ast.AST, *, sizes: bool = False) -> None:
        """Check what the child computes when it loads the text: numbers, and with `sizes` functions of sizes too."""
        if isinstance(node, ast.Lambda) and sizes:
            self.sized_by(node)
            return
        if not isinstance(node, CONSTANTS):
            self.refuse("constant", node, _shown(node))
        match node:
            case ast.Constant():
                self.literal(node)
                if _is_word(node):  # its arithmetic shows addresses: '%r' % (function,)
                    self.refuse("constant", node, _shown(node))
            case ast.Name():
                if self.bound.get(node.id) not in ("function", "constant"):
                    self.refuse("name", node, f"{node.id!r}, which is no constant or function that is defined above")
            case ast.Attribute():
                self.member(node)
            case ast.Call(func=func):
                if isinstance(func, ast.Name):
                    plain = self.bound.get(func.id) in ("maker", "function") or func.id in BUILTINS
                    if not plain:
                        self.refuse("call", node, f"a call of {func.id!r}")
                elif isinstance(func, ast.Attribute):
                    self.member(func)
                else:
                    self.refuse("call", node, f"a call of {_shown(func)}")
                self.keywords(node)
                for x in node.args:
                    self.constant(x, sizes=sizes)
            case ast.BinOp(op=ast.Pow(), right=right):
                if not _small(right.operand if isinstance(right, ast.UnaryOp) else right):
                    self.refuse("power", node, _shown(node))
                self.constant(node.left)
            case ast.BinOp(op=ast.MatMult()):
                self.refuse("library", node, _shown(node))
            case ast.BinOp(op=ast.LShift()):
                self.refuse("constant", node, _shown(node)) if not _small(node.right) else self.constant(node.left)
            case ast.BinOp() | ast.UnaryOp() | ast.Tuple() | ast.IfExp() | ast.Compare() | ast.Subscript():
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.constant(child, sizes=sizes)
            case _:
                pass

    # Functions --------------------------------------------------------------------------------------------------------

    def function(self, node: ast.FunctionDef, around: _Body | None = None) -> None:
        """Check a function; one inside another is a helper that the other makes."""
        for d in node.decorator_list:
            self.decorated(node, d, around)
        if len(node.decorator_list) > 1:
            self.refuse("decorator", node, "several decorators")
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
        more = a.vararg, a.kwarg, a.kwonlyargs, a.defaults, node.returns, getattr(node, "type_params", None)
        if any(more) or any(x.annotation for x in every):
            self.refuse("signature", node, f"def {node.name}({ast.unparse(a)})")
        if around is None:
            self.bind(node.name, "function", node)
        names = {x.arg for x in every} | {x.arg for x in (a.vararg, a.kwarg) if x}
        _Body(self, names, not node.decorator_list and around is None, around).statements(node)

    def decorated(self, node: ast.FunctionDef, d: ast.expr, around: _Body | None) -> None:
        known = ("helper",) if around else ("kernel", "helper")
        if not (isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id in known):
            self.refuse("decorator", d, f"@{_shown(d)}")
            return
        if self.bound.get(d.func.id) != "decorator":
            self.refuse("decorator", d, f"@{d.func.id}, which is not imported from cpuopt")
        if around and any(around.holder(n.id) for n in ast.walk(d) if isinstance(n, ast.Name)):
            self.refuse("decorator", d, f"@{_shown(d)}, of which a function around it has another meaning")
        if d.func.id == "kernel":
            match d.args:
                case [ast.Attribute(value=ast.Name("ops"), attr=op), ast.Constant(str(variant))] if (
                    self.bound.get("ops") == "ops" and op in ops.ALL and NAME.fullmatch(variant)
                ):
                    self.kernels.append((op, variant))
                case _:
                    self.refuse("decorator", d, f"@{_shown(d)}")
        elif d.args:
            self.refuse("decorator", d, f"@{_shown(d)}")
        allowed = KERNEL_OPTIONS if d.func.id == "kernel" else HELPER_OPTIONS
        for k in d.keywords:
            if k.arg not in allowed:
                self.refuse("option", d, f"the option {k.arg}=")
            self.option(k.value, named=False)

    def sized_by(self, node: ast.Lambda, around: _Body | None = None) -> None:
        a = node.args
        if len(a.args) != 1 or a.posonlyargs or a.defaults or a.vararg or a.kwarg or a.kwonlyargs:
            self.refuse("signature", node, _shown(node))
        for x in a.args:
            self.own(x.arg, node, local=True)
        _Body(self, {x.arg for x in a.args}, True, around).expression(node.body)

    def literal(self, node: ast.Constant) -> None:
        if isinstance(node.value, bytes | complex) or node.value is Ellipsis:
            self.refuse("constant", node, _shown(node))
        if isinstance(node.value, int) and not -(2**63) <= node.value < 2**64:
            self.refuse("literal", node, f"a number of {node.value.bit_length()} bits")

    def member(self, node: ast.Attribute, *, compiled: bool = False) -> None:
        """Check ``np.x`` and ``math.x``."""
        home = node.value.id if isinstance(node.value, ast.Name) else ""
        if home == "np" and self.bound.get("np") == "module":
            if node.attr not in NUMPY:
                self.refuse("numpy", node, f"np.{node.attr}")
            if node.attr in COMPILED and not compiled:
                self.refuse("constant", node, f"{_shown(node)} outside of a compiled function")
        elif home == "math" and self.bound.get("math") == "module":
            if node.attr not in MODULES["math"]:
                self.refuse("math", node, f"math.{node.attr}")
        else:
            self.refuse("attribute", node, _shown(node))

    def keywords(self, node: ast.Call, *, compiled: bool = False) -> None:
        for k in node.keywords:
            if k.arg != "dtype" or not compiled:
                self.refuse("keyword", node, f"the argument {k.arg or '**'}=")


@dataclass
class _Body:
    """The scope of one function. Its names are looked up as Python does: here, around it, in the file, in Python."""

    file: _Text
    local: set[str]
    texts: bool
    """Whether it is Python, which sizes scratch or makes helpers, and no kernel."""
    around: _Body | None = None
    """The scope of the function that makes this one, whose names may be functions."""

    def holder(self, name: str) -> _Body | None:
        """Return the scope, this one or one around it, that has a local of a name."""
        scope: _Body | None = self
        while scope and name not in scope.local:
            scope = scope.around
        return scope

    def statements(self, node: ast.FunctionDef) -> None:
        self.local |= {*_stored(node)}
        for name in sorted(self.local):
            self.file.own(name, node, local=True)
        body = node.body[1:] if _is_text(node.body[0]) else node.body
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        file = self.file
        if isinstance(node, ast.FunctionDef) and self.texts and node.decorator_list:
            file.function(node, self)
            return
        if not isinstance(node, STATEMENTS):
            file.refuse("syntax", node, _shown(node))
            return
        match node:
            case ast.For() | ast.While() if node.orelse:
                file.refuse("syntax", node, "else of a loop")
            case ast.Expr() if not isinstance(node.value, ast.Call):
                file.refuse("syntax", node, _shown(node))
            case ast.AugAssign(op=ast.BitOr()) if self.texts:  # which would write to the sizes that were passed
                file.refuse("syntax", node, _shown(node))
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                self.expression(child)

    def expression(self, node: ast.expr) -> None:
        file = self.file
        if isinstance(node, ast.Lambda) and self.texts:
            file.sized_by(node, self)
            return
        if not isinstance(node, EXPRESSIONS):
            file.refuse("syntax", node, _shown(node))
            return
        match node:
            case ast.Constant():
                file.literal(node)
                if _is_word(node):
                    file.refuse("text constant", node, _shown(node))
            case ast.Name():
                if not self.holder(node.id) and file.meaning(node.id) not in ("function", "constant"):
                    file.refuse("name", node, f"{node.id!r}")
            case ast.Attribute():
                self.attribute(node, called=False)
            case ast.Call():
                self.call(node)
            case ast.BinOp(op=ast.MatMult()):
                file.refuse("library", node, _shown(node))
            case ast.Starred(ctx=ast.Store()):  # the list that it makes could count calls
                file.refuse("syntax", node, f"an assignment to {_shown(node)}")
            case ast.Subscript(ctx=ast.Store()) if self.texts:  # an array of Python could count its calls
                file.refuse("syntax", node, f"an assignment to {_shown(node)}")
            case ast.Compare() if not all(isinstance(op, (*COMPARISONS, *[ast.In] * self.texts)) for op in node.ops):
                file.refuse("syntax", node, _shown(node))
            case _:
                pass
        if not isinstance(node, ast.Call | ast.Attribute):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr) and not (self.texts and child is _key(node)):
                    self.expression(child)

    def attribute(self, node: ast.Attribute, called: bool) -> None:
        if isinstance(node.ctx, ast.Store):
            self.file.refuse("syntax", node, f"an assignment to {_shown(node)}")
        home = node.value.id if isinstance(node.value, ast.Name) else ""
        if home in ("np", "math") and self.file.bound.get(home) == "module" and not self.holder(home):
            self.file.member(node, compiled=not self.texts)
            return
        if node.attr not in ATTRIBUTES if not called else self.texts or node.attr not in METHODS:
            self.file.refuse("attribute", node, f".{node.attr}")
        self.expression(node.value)

    def call(self, node: ast.Call) -> None:
        file, func = self.file, node.func
        if isinstance(func, ast.Name):
            holder = self.holder(func.id)
            if holder is self or (not holder and file.meaning(func.id) != "function"):
                file.refuse("call", node, f"a call of {func.id!r}")
        elif isinstance(func, ast.Attribute):
            self.attribute(func, called=True)
        else:
            file.refuse("call", node, f"a call of {_shown(func)}")
        file.keywords(node, compiled=not self.texts)
        name = func.attr if isinstance(func, ast.Attribute) else ""
        place = (2 if name.startswith("full") else 1) if name.startswith(ARRAYS) else len(node.args)
        for x in [*node.args[place:], *(k.value for k in node.keywords)]:  # types, which NumPy would read from a text
            known = isinstance(x, ast.Name) and x.id in file.types and not self.holder(x.id)
            if not known and not _is_type(x):
                file.refuse("keyword", node, f"the type {_shown(x)}")
        for x in [*node.args, *(k.value for k in node.keywords)]:
            self.expression(x)


def _kind(home: str, name: str) -> str:
    """Return what a name is that is imported."""
    known = {"ops": "ops", "kernel": "decorator", "helper": "decorator", "loop_of": "maker", "for_each_thread": "maker"}
    found = None if home not in MODULES or name in known else getattr(import_module(home), name, None)
    if isinstance(found, set):
        return "list"
    return known.get(name, "function" if callable(found) and not isinstance(found, Dim) else "constant")


def _stored(node: ast.AST) -> Iterator[str]:
    """Yield the names that a function binds in its own scope, and not in those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from _stored(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and _is_word(node.value)


def _is_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _key(node: ast.expr) -> ast.expr | None:
    """Return the text by which a size is asked for, as in ``sizes["N"]`` and ``"N" in sizes``."""
    match node:
        case ast.Subscript(slice=ast.Constant(str()) as key, ctx=ast.Load()):
            return key
        case ast.Compare(left=ast.Constant(str()) as key, ops=[ast.In()]):
            return key
    return None


def _sizes(node: ast.List | ast.Set) -> bool:
    """Return whether a list is of scratch, ``("name", size)`` each, as far as its first element tells."""
    match node.elts:
        case [ast.Tuple(elts=[ast.Constant(str()), *_]) | ast.Starred(), *_] if isinstance(node, ast.List):
            return True
    return False


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in TYPES


def _small(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= MOST_POWER


def _extent(tree: ast.AST) -> tuple[int, int]:
    """Count the levels and the nodes of a tree, up to the first level that has one too many."""
    depth, nodes, level = 0, 0, [tree]
    while level and nodes <= MOST_NODES:
        depth, nodes = depth + 1, nodes + len(level)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth, nodes


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
