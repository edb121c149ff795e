"""The derivatives of functions, and the arithmetic on expressions that the chain rule asks for."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .kernel import Kernel, function_name, parse, text

DERIVATIVE = {
    "exp": "y",
    "expm1": "y + ONE",
    "log": "ONE / x",
    "log1p": "ONE / (ONE + x)",
    "sqrt": "HALF / y",
    "tanh": "ONE - y * y",
    "sin": "np.cos(x)",
    "cos": "-np.sin(x)",
    "abs": "np.sign(x)",
    "rsqrt": "-(HALF * y * y * y)",  # written 1 / sqrt(x)
}
"""Of each function of one argument, as text in x (the argument) and y (the result). At 0, that of ``abs`` is 0."""

CASTS = {"float32", "float64", "float"}
"""Functions whose derivative is 1."""

CHOICES = {"max": ">", "min": "<", "maximum": ">", "minimum": "<", "fmax": ">", "fmin": "<"}
"""Functions that give their second argument where it stands so to the first; of equals, the first counts."""

INTEGER = {"int", "int64", "int32", "len", "floor", "ceil", "bool"}
"""Functions without a derivative; their argument may not be active."""

CONSTANTS = {"ZERO": 0.0, "HALF": 0.5, "ONE": 1.0, "TWO": 2.0}
"""The names of exact constants in generated code."""


def is_one(kernel: Kernel, e: ast.expr) -> bool:
    """Whether an expression is the number 1."""
    if isinstance(e, ast.Call) and function_name(e) in CASTS:
        return is_one(kernel, e.args[0])
    if isinstance(e, ast.Name):
        return bool(kernel.names.get(e.id) == 1)
    return isinstance(e, ast.Constant) and e.value == 1


def rule(kernel: Kernel, e: ast.expr) -> tuple[str, ast.expr] | None:
    """The name of the derivative's rule, and the argument, where an expression is one function of one argument."""
    if isinstance(e, ast.Call) and function_name(e) in DERIVATIVE:
        return function_name(e), e.args[0]
    if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Div) and is_one(kernel, e.left):
        inner = e.right
        if isinstance(inner, ast.Call) and function_name(inner) == "sqrt":
            return "rsqrt", inner.args[0]
    return None


# Arithmetic on expressions ------------------------------------------------------------------------------------------


def times(a: ast.expr, b: ast.expr) -> ast.expr:
    """Multiply, keeping a sign in front."""
    if isinstance(b, ast.UnaryOp) and isinstance(b.op, ast.USub):
        return negative(times(a, b.operand))
    if isinstance(a, ast.UnaryOp) and isinstance(a.op, ast.USub):
        return negative(times(a.operand, b))
    if text(b) == "ONE":
        return a
    if isinstance(b, ast.BinOp) and isinstance(b.op, ast.Div) and text(b.left) == "ONE":
        return ast.BinOp(a, ast.Div(), b.right)
    return ast.BinOp(a, ast.Mult(), b)


def negative(a: ast.expr) -> ast.expr:
    """Change the sign."""
    if isinstance(a, ast.UnaryOp) and isinstance(a.op, ast.USub):
        return a.operand
    return ast.UnaryOp(ast.USub(), a)


def power(x: ast.expr, n: ast.expr) -> ast.expr:
    """The derivative of x ** n."""
    number = literal(n)
    if number == 2:
        return ast.BinOp(ast.Name("TWO", ast.Load()), ast.Mult(), x)
    if number == 1:
        return ast.Name("ONE", ast.Load())
    if number == 0:
        return ast.Name("ZERO", ast.Load())
    if number is not None:
        return ast.BinOp(n, ast.Mult(), ast.BinOp(x, ast.Pow(), ast.Constant(number - 1)))
    slope = ast.BinOp(n, ast.Mult(), ast.BinOp(x, ast.Pow(), ast.BinOp(n, ast.Sub(), parse("1"))))
    return ast.IfExp(ast.Compare(n, [ast.NotEq()], [parse("0")]), slope, ast.Name("ZERO", ast.Load()))


def literal(e: ast.expr) -> float | None:
    """The number that an expression writes out, if it does."""
    match e:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    return None


def total(parts: Sequence[ast.expr]) -> ast.expr:
    """Add up."""
    found = parts[0]
    for p in parts[1:]:
        if isinstance(p, ast.UnaryOp) and isinstance(p.op, ast.USub):
            found = ast.BinOp(found, ast.Sub(), p.operand)
        else:
            found = ast.BinOp(found, ast.Add(), p)
    return found


def substitute(e: ast.expr, x: ast.expr, y: ast.expr) -> ast.expr:
    """Put expressions for x and y."""

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return x if node.id == "x" else y if node.id == "y" else node

    return parse(text(Put().visit(e)))  # type: ignore[no-any-return]
