"""The text of a candidate: what it may contain, as a whitelist on its syntax tree. The text is parsed, never imported.

A kernel in nopython mode does arithmetic on its arrays, and nothing else, as long as its text cannot name a way out:
object mode, pointers, random numbers, other kernels, state that outlives a call. So each rule names what is allowed;
whatever it does not name is refused. ``tests/judge/test_rules.py`` has a kernel for each rule that it alone stops.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from ..ops import declaration
from ..ops.declaration import Dim

RULES: Mapping[str, str] = {
    "text": "Python in UTF-8 of at most 256 KiB, 200 levels deep",
    "statement": "imports, constants and functions at the level of the file",
    "import": "numpy as np, math, numba's prange, cpuopt's kernel, helper and ops, symbols of sizes, and the toolkit",
    "toolkit": "functions and numbers of the kernel toolkit that kernels call",
    "name": "names that the file defines, in a function or above it; none that begins with an underscore",
    "shadow": "one meaning for each name at the level of the file",
    "constant": "constants: numbers, tuples of them, sizes of scratch, and loops made from a formula",
    "power": "powers with an exponent of at most 64 where the file computes a constant",
    "decorator": "functions under @kernel(ops.OP, 'NAME', ...) or @helper(...), or plain ones that size scratch",
    "option": "the options scratch, parallel, fastmath, skips and narrow of a kernel; of a helper forceinline too",
    "signature": "parameters without defaults, annotations or stars",
    "syntax": "arithmetic, comparisons, assignments, for, while, if, return, subscripts, tuples and calls",
    "text constant": "no text in a function but its docstring",
    "literal": "whole numbers of 64 bits",
    "call": "calls of functions of the file, the toolkit, np and math, and of a few of Python's",
    "numpy": "NumPy's types and elementwise functions, sums, and arrays of one value",
    "math": "the functions and constants of math on floats",
    "attribute": "the attributes shape, size, ndim and T of arrays, and the methods reshape, sum, max, min and mean",
    "library": "no product of matrices by a library",
    "keyword": "arguments by place, and dtype=",
}
"""What each rule allows, by its name."""
LONGEST, DEEPEST, MOST_POWER = 256 << 10, 200, 64


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(text.split())


TOOLKIT = "elementwise fastmath lanes queue simd tiles pairs"
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
ARRAYS = {n for n in NUMPY if n.startswith(("zeros", "ones", "full"))}
BUILTINS = words("range len min max abs int float bool round divmod")
ATTRIBUTES, METHODS = {"shape", "size", "ndim", "T", "py_func"}, {"reshape", "sum", "max", "min", "mean"}
KERNEL_OPTIONS = {"scratch", "parallel", "fastmath", "skips", "narrow"}
HELPER_OPTIONS = {"parallel", "fastmath", "forceinline"}
OUTER = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef)
STATEMENTS = (ast.Assign, ast.AugAssign, ast.For, ast.While, ast.If, ast.Return, ast.Expr, ast.Pass, ast.Break,
              ast.Continue)  # fmt: skip
EXPRESSIONS = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
               ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple, ast.Starred)  # fmt: skip
COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CONSTANTS = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.IfExp,
             ast.Compare, ast.Subscript)  # fmt: skip


class RefusedError(Exception):
    """A text breaks a rule; the message has the line, what stands there, and what is allowed."""

    def __init__(self, rule: str, line: int, said: str) -> None:
        super().__init__(f"line {line}: {said}; allowed are {RULES[rule]}")
        self.rule, self.line = rule, line


@dataclass(frozen=True)
class Candidate:
    """What an allowed text defines: the op of each kernel, by the name that it registers under."""

    kernels: tuple[tuple[str, str], ...]


def read(text: str, without: Collection[str] = ()) -> Candidate:
    """Parse a text and hold it against the rules.

    Parameters
    ----------
    without : rules that are left out, for a test of the others.

    Raises
    ------
    RefusedError
        For the first breach of a rule.
    """
    return _Text(text, frozenset(without)).candidate()


@dataclass
class _Text:
    text: str
    without: frozenset[str]
    bound: dict[str, str] = field(default_factory=dict)
    """What each name of the file is: ``module``, ``function``, ``maker``, ``decorator``, ``ops`` or ``constant``."""
    defined: set[str] = field(default_factory=set)
    """The functions of the file, which others call before they stand there."""
    kernels: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, rule: str, node: ast.AST | None, said: str) -> None:
        if rule not in self.without:
            raise RefusedError(rule, getattr(node, "lineno", 1), said)

    def candidate(self) -> Candidate:
        if len(self.text) > LONGEST:
            self.refuse("text", None, f"the text has {len(self.text)} characters")
        try:
            tree = ast.parse(self.text)
            depth = _depth(tree)
            other = depth <= DEEPEST and ast.dump(ast.parse(self.text.encode())) != ast.dump(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError, LookupError) as e:
            raise RefusedError("text", getattr(e, "lineno", None) or 1, f"it cannot be parsed ({e})") from None
        if other:  # an encoding can hide lines in what is a comment here
            self.refuse("text", None, "the encoding that it declares makes another text of it")
        if depth > DEEPEST:
            self.refuse("text", None, f"its syntax is {depth} levels deep")
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
        return Candidate(tuple(self.kernels))

    # The level of the file --------------------------------------------------------------------------------------------

    def bind(self, name: str, kind: str, node: ast.AST) -> None:
        if name.startswith("_"):
            self.refuse("name", node, f"the name {name!r}")
        if name in self.bound or name in BUILTINS:
            self.refuse("shadow", node, f"{name!r} has a meaning already")
        self.bound[name] = kind

    def imports(self, node: ast.Import | ast.ImportFrom) -> None:
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
            known = {"ops": "ops", "kernel": "decorator", "helper": "decorator", "loop_of": "maker"}
            usual = "constant" if name.isupper() or home.endswith("declaration") else "function"
            usual = "constant" if home == "math" and alias.name in ("pi", "e", "inf", "nan") else usual
            self.bind(name, "maker" if alias.name == "for_each_thread" else known.get(alias.name, usual), node)

    def assigned(self, node: ast.Assign) -> None:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else []
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for i, name in enumerate(names):
                if not isinstance(name, ast.Name):
                    self.refuse("statement", node, f"an assignment to {_shown(name)}")
                    continue
                value = values[i] if len(names) > 1 and i < len(values) else node.value
                function = value.func if isinstance(value, ast.Call) else value
                made = isinstance(function, ast.Name) and self.bound.get(function.id) in ("maker", "function")
                self.bind(name.id, "function" if made else "constant", node)
        self.constant(node.value)

    def constant(self, node: ast.AST, *, listed: bool = False) -> None:
        """Check what the child computes when it loads the text: numbers, and the sizes of scratch."""
        if isinstance(node, ast.List | ast.Set) and (listed or _sizes(node)):
            for x in node.elts:
                self.constant(x, listed=True)
            return
        if isinstance(node, ast.Lambda) and listed:
            self.sized_by(node)
            return
        if not isinstance(node, CONSTANTS):
            self.refuse("constant", node, _shown(node))
        match node:
            case ast.Constant():
                self.literal(node)
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
                    if func.attr in ARRAYS:
                        self.refuse("constant", node, f"an array, {_shown(node)}")
                else:
                    self.refuse("call", node, f"a call of {_shown(func)}")
                self.keywords(node)
                for x in node.args:
                    self.constant(x, listed=listed)
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
                        self.constant(child, listed=listed)
            case _:
                pass

    # Functions --------------------------------------------------------------------------------------------------------

    def function(self, node: ast.FunctionDef, inside: Collection[str] | None = None) -> None:
        """Check a function; one inside another, whose names are given, is a helper that the other makes."""
        for d in node.decorator_list:
            self.decorated(node, d, inside is not None)
        if len(node.decorator_list) > 1:
            self.refuse("decorator", node, "several decorators")
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
        more = a.vararg, a.kwarg, a.kwonlyargs, a.defaults, node.returns, getattr(node, "type_params", None)
        if any(more) or any(x.annotation for x in every):
            self.refuse("signature", node, f"def {node.name}({ast.unparse(a)})")
        if inside is None:
            self.bind(node.name, "function", node)
        names = [x.arg for x in every] + [x.arg for x in (a.vararg, a.kwarg) if x]
        around = set(inside or ())
        _Body(self, {*names, *around}, not node.decorator_list and inside is None, around).statements(node, names)

    def decorated(self, node: ast.FunctionDef, d: ast.expr, inside: bool) -> None:
        known = ("helper",) if inside else ("kernel", "helper")
        if not (isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id in known):
            self.refuse("decorator", d, f"@{_shown(d)}")
            return
        if self.bound.get(d.func.id) != "decorator":
            self.refuse("decorator", d, f"@{d.func.id}, which is not imported from cpuopt")
        if d.func.id == "kernel":
            match d.args:
                case [ast.Attribute(value=ast.Name("ops"), attr=op), ast.Constant(str(variant))]:
                    self.kernels.append((op, variant))
                case _:
                    self.refuse("decorator", d, f"@{_shown(d)}")
        elif d.args:
            self.refuse("decorator", d, f"@{_shown(d)}")
        allowed = KERNEL_OPTIONS if d.func.id == "kernel" else HELPER_OPTIONS
        for k in d.keywords:
            if k.arg not in allowed:
                self.refuse("option", d, f"the option {k.arg}=")
            self.constant(k.value, listed=True)

    def sized_by(self, node: ast.Lambda, around: Collection[str] = ()) -> None:
        names = [x.arg for x in node.args.args]
        if len(names) != 1 or node.args.defaults or node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
            self.refuse("signature", node, _shown(node))
        _Body(self, {*names, *around}, texts=True).expression(node.body)

    def literal(self, node: ast.Constant) -> None:
        if isinstance(node.value, bytes | complex) or node.value is Ellipsis:
            self.refuse("constant", node, _shown(node))
        if isinstance(node.value, int) and not -(2**63) <= node.value < 2**64:
            self.refuse("literal", node, f"a number of {node.value.bit_length()} bits")

    def member(self, node: ast.Attribute) -> None:
        """Check ``np.x`` and ``math.x``."""
        home = node.value.id if isinstance(node.value, ast.Name) else ""
        if home == "np" and self.bound.get("np") == "module":
            if node.attr not in NUMPY:
                self.refuse("numpy", node, f"np.{node.attr}")
        elif home == "math" and self.bound.get("math") == "module":
            if node.attr not in MODULES["math"]:
                self.refuse("math", node, f"math.{node.attr}")
        else:
            self.refuse("attribute", node, _shown(node))

    def keywords(self, node: ast.Call) -> None:
        for k in node.keywords:
            if k.arg != "dtype":
                self.refuse("keyword", node, f"the argument {k.arg or '**'}=")


@dataclass
class _Body:
    """The body of one function."""

    file: _Text
    local: set[str]
    texts: bool
    """Whether it is Python, which sizes scratch or makes helpers, and no kernel."""
    around: set[str] = field(default_factory=set)
    """The names of the function that makes this one, which may be functions."""

    def statements(self, node: ast.FunctionDef, names: Iterable[str]) -> None:
        self.local |= {sub.name for sub in node.body if isinstance(sub, ast.FunctionDef)}
        for sub in ast.walk(node):
            if isinstance(sub, ast.Name) and isinstance(sub.ctx, ast.Store):
                self.local.add(sub.id)
                self.own(sub.id, sub)
        for name in names:
            self.own(name, node)
        body = node.body[1:] if _is_text(node.body[0]) else node.body
        for statement in body:
            self.statement(statement)

    def own(self, name: str, node: ast.AST) -> None:
        if name.startswith("_") and name != "_":
            self.file.refuse("name", node, f"the name {name!r}")

    def statement(self, node: ast.stmt) -> None:
        file = self.file
        if isinstance(node, ast.FunctionDef) and self.texts and node.decorator_list:
            file.function(node, self.local)
            return
        if not isinstance(node, STATEMENTS):
            file.refuse("syntax", node, _shown(node))
            return
        match node:
            case ast.For() | ast.While() if node.orelse:
                file.refuse("syntax", node, "else of a loop")
            case ast.Expr() if not isinstance(node.value, ast.Call):
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
            file.sized_by(node, self.local)
            return
        if not isinstance(node, EXPRESSIONS):
            file.refuse("syntax", node, _shown(node))
            return
        match node:
            case ast.Constant():
                file.literal(node)
                if isinstance(node.value, str) and not self.texts:
                    file.refuse("text constant", node, _shown(node))
            case ast.Name():
                known = file.bound.get(node.id) in ("function", "constant") or node.id in file.defined
                if not known and node.id not in self.local and node.id not in BUILTINS:
                    file.refuse("name", node, f"{node.id!r}")
            case ast.Attribute():
                self.attribute(node, called=False)
            case ast.Call():
                self.call(node)
            case ast.BinOp(op=ast.MatMult()):
                file.refuse("library", node, _shown(node))
            case ast.Subscript(ctx=ast.Store()) if self.texts:  # an array of Python could count its calls
                file.refuse("syntax", node, f"an assignment to {_shown(node)}")
            case ast.Compare() if not all(isinstance(op, (*COMPARISONS, *[ast.In] * self.texts)) for op in node.ops):
                file.refuse("syntax", node, _shown(node))
            case _:
                pass
        if not isinstance(node, ast.Call | ast.Attribute):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.expression(child)

    def attribute(self, node: ast.Attribute, called: bool) -> None:
        if isinstance(node.ctx, ast.Store):
            self.file.refuse("syntax", node, f"an assignment to {_shown(node)}")
        home = node.value.id if isinstance(node.value, ast.Name) else ""
        if home in ("np", "math") and self.file.bound.get(home) == "module" and home not in self.local:
            self.file.member(node)
            return
        if node.attr not in (METHODS if called and node.attr != "py_func" else ATTRIBUTES):
            self.file.refuse("attribute", node, f".{node.attr}")
        self.expression(node.value)

    def call(self, node: ast.Call) -> None:
        file, func = self.file, node.func
        if isinstance(func, ast.Name):
            known = file.bound.get(func.id) == "function" or func.id in BUILTINS or func.id in file.defined
            if (not known or func.id in self.local) and func.id not in self.around:
                file.refuse("call", node, f"a call of {func.id!r}")
        elif isinstance(func, ast.Attribute):
            self.attribute(func, called=True)
        else:
            file.refuse("call", node, f"a call of {_shown(func)}")
        file.keywords(node)
        for x in [*node.args, *(k.value for k in node.keywords)]:
            self.expression(x)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _sizes(node: ast.List | ast.Set) -> bool:
    """Return whether a list is of scratch, ``("name", size)`` each: no kernel can use such a list."""
    first = node.elts[0] if node.elts else None
    return isinstance(first, ast.Tuple) and bool(first.elts) and _is_text(ast.Expr(first.elts[0]))


def _small(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= MOST_POWER


def _depth(tree: ast.AST) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
