"""The derivatives of functions, and the arithmetic on expressions that the chain rule asks for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from .kernel import PlainKernel
from .trees import function_name, quote, text

DERIVATIVE = {
    "exp": "y",
    "expm1": "y + ONE",
    "log": "ONE / x",
    "log1p": "ONE / (ONE + x)",
    "sqrt": "HALF / y",
    "tanh": "ONE - y * y",
    "sin": "np.cos(x)",
    "cos": "-np.sin(x)",
    "tan": "ONE + y * y",
    "sinh": "np.cosh(x)",
    "cosh": "np.sinh(x)",
    "abs": "np.sign(x)",
    "fabs": "np.sign(x)",
    "erf": "TWO / np.sqrt(np.pi) * np.exp(-(x * x))",
    "erfc": "-(TWO / np.sqrt(np.pi) * np.exp(-(x * x)))",
    "log2": "ONE / (x * np.log(2.0))",
    "log10": "ONE / (x * np.log(10.0))",
    "exp2": "y * np.log(2.0)",
    "rsqrt": "-(HALF * y * y * y)",  # written 1 / sqrt(x)
}
"""The derivative of each function of x as text, in x and in the result y. At 0, that of ``abs`` is 0."""

for _short, _long, _slope in (
    ("asin", "arcsin", "ONE / np.sqrt(ONE - x * x)"),
    ("acos", "arccos", "-(ONE / np.sqrt(ONE - x * x))"),
    ("atan", "arctan", "ONE / (ONE + x * x)"),
    ("asinh", "arcsinh", "ONE / np.sqrt(x * x + ONE)"),
    ("acosh", "arccosh", "ONE / np.sqrt(x * x - ONE)"),
    ("atanh", "arctanh", "ONE / (ONE - x * x)"),
):
    DERIVATIVE |= {_short: _slope, _long: _slope}

BINARY = {
    "hypot": ("x / y if y != ZERO else ZERO", "z / y if y != ZERO else ZERO"),
    "atan2": ("z / (x * x + z * z)", "-(x / (x * x + z * z))"),
    "arctan2": ("z / (x * x + z * z)", "-(x / (x * x + z * z))"),
    "**": ("z * x ** (z - ONE)", "y * np.log(x) if x > ZERO else ZERO"),
}
"""The derivatives of functions of x and z, in these and in the result y; ``**`` is a power with an active exponent."""

SINGULAR = {"log", "log1p", "log2", "log10", "sqrt", "rsqrt", "atan2", "arctan2", "power"}
SINGULAR |= {"asin", "arcsin", "acos", "arccos", "acosh", "arccosh", "atanh", "arctanh"}
"""The functions whose slope is infinite, or not a number, where a branch may leave the result out."""

GROWING = {"exp", "exp2", "expm1", "sinh", "cosh"}
"""The functions that overflow: their slope is infinite with them."""

ALIASES = {
    "pow": "x ** y",
    "power": "x ** y",
    "square": "x ** 2",
    "absolute": "np.abs(x)",
    "clip": "np.minimum(np.maximum(x, y), z)",
}
"""Functions of x, y and z that are written with others."""

CASTS = {"float32", "float64", "float"}
"""Functions whose derivative is 1."""

CHOICES = {"max": ">", "min": "<", "maximum": ">", "minimum": "<", "fmax": ">", "fmin": "<"}
"""The comparison with which each function returns its second argument; of equals it returns the first."""

INTEGER = {"int", "int64", "int32", "uint64", "len", "floor", "ceil", "trunc", "round", "rint", "sign", "bool"}
"""Functions that are flat wherever they have a derivative; it is taken to be 0 everywhere."""

CONSTANTS = {"ZERO": 0.0, "HALF": 0.5, "ONE": 1.0, "TWO": 2.0}
"""The names of exact constants in generated code."""


def is_one(kernel: PlainKernel, e: ast.expr) -> bool:
    """Return whether an expression is the number 1."""
    if isinstance(e, ast.Call) and function_name(e) in CASTS:
        return is_one(kernel, e.args[0])
    if isinstance(e, ast.Name):
        return bool(kernel.names.get(e.id) == 1)
    return isinstance(e, ast.Constant) and e.value == 1


def rule(
    kernel: PlainKernel, e: ast.expr, active: Callable[[ast.expr], bool]
) -> tuple[str, list[ast.expr], tuple[str, ...]] | None:
    """The name of the derivative's rule, the arguments, and the derivatives, if an expression is one function."""
    match e:
        case ast.Call(args=args) if (name := function_name(e)) in DERIVATIVE:
            return name, args, (DERIVATIVE[name],)
        case ast.Call(args=args) if (name := function_name(e)) in BINARY:
            return name, args, BINARY[name]
        case ast.BinOp(left=x, op=ast.Pow(), right=n) if active(n):
            return "power", [x, n], BINARY["**"]
        case ast.BinOp(left=one, op=ast.Div(), right=ast.Call(args=[x]) as root):
            if function_name(root) == "sqrt" and is_one(kernel, one):
                return "rsqrt", [x], (DERIVATIVE["rsqrt"],)
    return None


# Arithmetic on expressions ------------------------------------------------------------------------------------------


def negated(e: ast.expr) -> ast.expr | None:
    """Return an expression without the minus in front; None if it has none."""
    return e.operand if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub) else None


def negative(a: ast.expr) -> ast.expr:
    """Change the sign."""
    return negated(a) or ast.UnaryOp(ast.USub(), a)


def times(a: ast.expr, b: ast.expr) -> ast.expr:
    """Multiply, keeping a sign in front."""
    if inner := negated(b):
        return negative(times(a, inner))
    if inner := negated(a):
        return negative(times(inner, b))
    if text(b) == "ONE":
        return a
    if isinstance(b, ast.BinOp) and isinstance(b.op, ast.Div) and text(b.left) == "ONE":
        return ast.BinOp(a, ast.Div(), b.right)
    return ast.BinOp(a, ast.Mult(), b)


def spared(e: ast.expr, seed: ast.expr) -> Any:
    """Return a slope that need not be finite if the adjoint that it multiplies is 0: the product is then 0 too."""
    if inner := negated(e):
        return negative(spared(inner, seed))
    match e:
        case ast.BinOp(left=ast.Name(id="ONE") as one, op=ast.Div(), right=x):  # times(seed, e) divides by x
            return ast.BinOp(one, ast.Div(), quote("x if seed != ZERO else ONE", x=x, seed=seed))
    return quote("e if seed != ZERO else ZERO", e=e, seed=seed)


def power(x: ast.expr, n: ast.expr) -> ast.expr:
    """The derivative of x ** n."""
    try:
        number = ast.literal_eval(n)
    except ValueError:
        return quote("n * x ** (n - 1) if n != 0 else ZERO", x=x, n=n)  # type: ignore[no-any-return]
    less = number - 1
    if isinstance(number, float) and number.is_integer():
        less = int(less)  # a product, not a call of pow
    written = {0: "ZERO", 1: "ONE", 2: "TWO * x"}.get(number, "n * x ** less")
    return quote(written, x=x, n=n, less=ast.Constant(less))  # type: ignore[no-any-return]


def plus(e: ast.expr, n: int) -> ast.expr:
    """Add an integer, folded into the numbers of a sum."""
    match e:
        case ast.Constant(value=int() as value):
            return ast.Constant(value + n)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return ast.Constant(n - value)
        case ast.BinOp(left=x, op=ast.Add(), right=ast.Constant(value=int() as value)):
            return plus(x, n + value)
        case ast.BinOp(left=x, op=ast.Sub(), right=ast.Constant(value=int() as value)):
            return plus(x, n - value)
    if n == 0:
        return e
    return ast.BinOp(e, ast.Add() if n > 0 else ast.Sub(), ast.Constant(abs(n)))


def total(parts: Sequence[ast.expr]) -> ast.expr:
    """Add up."""
    found = parts[0]
    for p in parts[1:]:
        found = ast.BinOp(found, ast.Sub() if negated(p) else ast.Add(), negated(p) or p)
    return found


def added(a: ast.expr, b: ast.expr) -> ast.expr:
    """Add a sum to an expression, term by term from the left."""
    if isinstance(b, ast.BinOp) and isinstance(b.op, ast.Add | ast.Sub):
        return ast.BinOp(added(a, b.left), b.op, b.right)
    return ast.BinOp(a, ast.Add(), b)
