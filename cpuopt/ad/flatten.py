"""Rewrites before differentiation: one function to a statement, choices as branches, saved outputs written early.

`flatten` gives every function of a varied value a name of its own, and makes conditional expressions, max and min plain
assignments under an if, so that no later step knows of them. `restore_early` lets a saved output give its value back.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .flows import flows, reached
from .kernel import Assign, For, If, LogSumExp, PlainKernel, Stmt, assigned, blocks, every_element, flat
from .rules import CHOICES, rule
from .trees import Names, base, function_name, names, swap, text


def flatten(kernel: PlainKernel, wrt: Iterable[str], saved: Names) -> PlainKernel:
    """Name every function of an active value, and turn choices into branches."""
    work = _Flatten(kernel, reached(kernel, wrt, forward=True), saved)
    return replace(kernel, body=work.block(kernel.body))


def restore_early(kernel: PlainKernel, saved: Names) -> None:
    """Move ``mean[row] = m`` up to the last line that writes m, so that a saved output gives m back from there on."""
    for block in list(blocks(kernel.body)):
        for s in list(block):
            if type(s) is Assign and isinstance(s.value, ast.Name) and kernel.written(s) in saved:
                k = block.index(s)
                root, fixed = kernel.written(s), names(s.target) | {s.value.id}
                while k and not fixed & assigned([block[k - 1]]) and not any(
                    kernel.root(base(e)) == root for x in flat([block[k - 1]]) for e in every_element(x)
                ):  # fmt: skip
                    k -= 1
                block.remove(s)
                block.insert(k, s)


class _Flatten:
    def __init__(self, kernel: PlainKernel, varied: Names, saved: Names) -> None:
        self.kernel, self.varied, self.saved = kernel, varied, saved
        self.taken = kernel.taken

    def active(self, e: ast.AST) -> bool:
        return any(self.kernel.root(n) in self.varied for n in flows(e))

    def fresh(self, word: str) -> ast.Name:
        """A name that is not taken."""
        k = 1
        while f"{word}{k}" in self.taken:
            k += 1
        self.taken.add(f"{word}{k}")
        self.varied.add(f"{word}{k}")
        return ast.Name(f"{word}{k}", ast.Load())

    def block(self, body: list[Stmt]) -> list[Stmt]:
        return [new for s in body for new in self.statement(s)]

    def statement(self, s: Stmt) -> list[Stmt]:
        """Read one statement."""
        if isinstance(s, For):
            return [replace(s, body=self.block(s.body))]
        if isinstance(s, If):
            return [replace(s, body=self.block(s.body), orelse=self.block(s.orelse))]
        if not isinstance(s, Assign) or isinstance(s, LogSumExp) or not self.active(s.value):
            return [s]
        out: list[Stmt] = []
        value, target, own = s.value, s.target, s.name
        if isinstance(value, ast.IfExp):
            yes, no = replace(s, value=value.body), replace(s, value=value.orelse)
            return [If(s.line, value.test, self.statement(yes), self.statement(no))]
        if isinstance(value, ast.Call) and function_name(value) in CHOICES:
            a, b = (self.simple(x, s, out) for x in value.args)
            op = ast.Gt() if CHOICES[function_name(value)] == ">" else ast.Lt()
            keeps: list[list[Stmt]] = [
                [] if text(x) == text(target) and type(s) is Assign else [replace(s, value=x)] for x in (b, a)
            ]
            return [*out, If(s.line, ast.Compare(b, [op], [a]), *keeps)]
        if found := rule(self.kernel, value, self.active):
            plain = type(s) is Assign and own not in names(value)
            if plain and (isinstance(target, ast.Name) or self.kernel.root(own) in self.saved):
                args = [(x, self.hoist(x, s, out)) for x in found[1]]
                return [*out, replace(s, value=swap(value, lambda e: next((new for x, new in args if e is x), None)))]
        value = self.hoist(value, s, out)
        return [*out, replace(s, value=value)]

    def simple(self, e: ast.expr, s: Stmt, out: list[Stmt]) -> ast.expr:
        """Flatten to an expression that may be written twice."""
        e = self.hoist(e, s, out)
        if isinstance(e, ast.Name | ast.Subscript | ast.Constant) or not self.active(e):
            return e
        name = self.fresh("arg")
        out.append(Assign(s.line, name, e))
        return name

    def hoist(self, e: ast.expr, s: Stmt, out: list[Stmt]) -> Any:
        """Flatten an expression: its functions and choices are assigned to names of their own before it."""

        def new(x: ast.expr) -> ast.expr | None:
            if not self.active(x):
                return x
            found = rule(self.kernel, x, self.active)
            if found or isinstance(x, ast.IfExp) or (isinstance(x, ast.Call) and function_name(x) in CHOICES):
                name = self.fresh(found[0] if found else function_name(x) if isinstance(x, ast.Call) else "either")
                out.extend(self.statement(Assign(s.line, name, x)))
                return name
            inner = isinstance(x, ast.BinOp | ast.UnaryOp)
            return None if inner or isinstance(x, ast.Call) else x

        return swap(e, new)
