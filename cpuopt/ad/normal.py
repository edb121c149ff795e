"""Two rewrites of a kernel before it is differentiated, neither of which changes what it computes.

`flatten` gives every function of an active value a name of its own, and turns conditional expressions, max and min into
branches. `unshift` finds sums of ``exp(x - top)`` whose shift by ``top`` cancels in ``log(total) + top`` and in
``exp(x - top) / total``, and writes both with ``lse = log(total) + top``: no derivative then runs through the maximum.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .rules import CASTS, CHOICES, DERIVATIVE, INTEGER
from .subset import (
    Accum,
    Assign,
    For,
    If,
    Kernel,
    LogSumExp,
    Stmt,
    assigned,
    base,
    elements,
    expressions,
    flat,
    function_name,
    names,
    parse,
    text,
)

Names = set[str]


def flows(e: ast.AST) -> Names:
    """The names that a derivative of an expression may run through: not those of indices, tests and comparisons."""
    if (known := getattr(e, "known_flows", None)) is not None:
        return known  # type: ignore[no-any-return]
    match e:
        case ast.Name(id=name):
            return {name}
        case ast.Subscript(value=ast.Name(id=name)):
            return {name}
        case ast.Compare() | ast.BoolOp() | ast.Attribute() | ast.Subscript():
            return set()
        case ast.IfExp(body=x, orelse=y):
            return flows(x) | flows(y)
        case ast.Call(args=args):
            return set().union(*map(flows, args))
    return set().union(*map(flows, ast.iter_child_nodes(e)), set())


def freeze(kernel: Kernel) -> None:
    """Note at each expression which names it holds; it is not changed any more."""
    for s in flat(kernel.body):
        mine = [*expressions(s), *([s.target] if isinstance(s, Assign) else [])]
        for e in [*mine, *([s.term, s.weight] if isinstance(s, LogSumExp) else [])]:
            for node in reversed(list(ast.walk(e))):
                found = flows(node), names(node)
                node.known_flows, node.known_names = found  # type: ignore[attr-defined]


def sources(kernel: Kernel, s: Assign) -> Names:
    """What a statement's adjoint may go to."""
    e = s.term if isinstance(s, LogSumExp) else s.value
    return {kernel.root(n) for n in flows(e)}


def varied(kernel: Kernel, wrt: Iterable[str]) -> Names:
    """The names that depend on `wrt`, to a fixpoint."""
    found, size = set(wrt), -1
    while size != len(found):
        size = len(found)
        for s in flat(kernel.body):
            if isinstance(s, Assign) and sources(kernel, s) & found:
                found.add(kernel.root(base(s.target)))
    return found


def useful(kernel: Kernel, outs: Iterable[str]) -> Names:
    """The names that `outs` depend on, to a fixpoint."""
    found, size = set(outs), -1
    while size != len(found):
        size = len(found)
        for s in flat(kernel.body):
            if isinstance(s, Assign) and kernel.root(base(s.target)) in found:
                found |= sources(kernel, s)
    return found


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


class _Flatten:
    def __init__(self, kernel: Kernel, varied: Names, saved: Names) -> None:
        self.kernel, self.varied, self.saved = kernel, varied, saved
        self.taken = {*kernel.params, *kernel.views, *assigned(kernel.body), *kernel.names}

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
        value, target, own = s.value, s.target, base(s.target)
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
        if found := rule(self.kernel, value):
            plain = type(s) is Assign and own not in names(value)
            if plain and (isinstance(target, ast.Name) or self.kernel.root(own) in self.saved):
                value = self.inside(value, found[1], s, out)
                return [*out, replace(s, value=value)]
        value = self.hoist(value, s, out)
        return [*out, replace(s, value=value)]

    def inside(self, call: ast.expr, arg: ast.expr, s: Stmt, out: list[Stmt]) -> ast.expr:
        """Flatten the argument of a function that stays."""
        new = self.hoist(arg, s, out)
        call = copy.deepcopy(call)
        inner = call.right if isinstance(call, ast.BinOp) else call
        assert isinstance(inner, ast.Call)
        inner.args = [new]
        return call

    def simple(self, e: ast.expr, s: Stmt, out: list[Stmt]) -> ast.expr:
        """Flatten to what may be written twice."""
        e = self.hoist(e, s, out)
        if isinstance(e, ast.Name | ast.Subscript | ast.Constant) or not self.active(e):
            return e
        name = self.fresh("arg")
        out.append(Assign(s.line, name, e))
        return name

    def hoist(self, e: ast.expr, s: Stmt, out: list[Stmt]) -> ast.expr:
        if not self.active(e):
            return e
        choice = isinstance(e, ast.IfExp) or (isinstance(e, ast.Call) and function_name(e) in CHOICES)
        if choice or rule(self.kernel, e):
            word = "either" if isinstance(e, ast.IfExp) else (rule(self.kernel, e) or [function_name(e)])[0]  # type: ignore
            name = self.fresh(word)
            out += self.statement(Assign(s.line, name, e))
            return name
        if isinstance(e, ast.BinOp):
            return ast.BinOp(self.hoist(e.left, s, out), e.op, self.hoist(e.right, s, out))
        if isinstance(e, ast.UnaryOp):
            return ast.UnaryOp(e.op, self.hoist(e.operand, s, out))
        if isinstance(e, ast.Call) and function_name(e) not in INTEGER:
            return ast.Call(e.func, [self.hoist(a, s, out) for a in e.args], [])
        return e


def flatten(kernel: Kernel, wrt: Iterable[str], saved: Names) -> Kernel:
    """Name every function of an active value, and turn choices into branches."""
    work = _Flatten(kernel, varied(kernel, wrt), saved)
    return replace(kernel, body=work.block(kernel.body))


def reads(s: Stmt) -> list[ast.expr]:
    """The expressions that a statement reads."""
    return [*expressions(s), s.target] if isinstance(s, Accum) else expressions(s)


def every_element(s: Stmt) -> list[ast.Subscript]:
    """The array elements that a statement itself reads or writes."""
    found = [e for x in expressions(s) for e in elements(x)]
    return [*found, *elements(s.target)] if isinstance(s, Assign) else found


# Sums of exponentials -----------------------------------------------------------------------------------------------


def restore_early(kernel: Kernel, saved: Names) -> Kernel:
    """Move ``mean[row] = m`` up to the last line that writes m, so that a saved output gives m back from there on."""
    kernel = replace(kernel, body=copy.deepcopy(kernel.body))
    for block in list(_blocks(kernel.body)):
        for s in list(block):
            if type(s) is Assign and isinstance(s.value, ast.Name) and kernel.root(base(s.target)) in saved:
                k = block.index(s)
                root, fixed = kernel.root(base(s.target)), names(s.target) | {s.value.id}
                while k and not fixed & assigned([block[k - 1]]) and not any(
                    kernel.root(base(e)) == root for x in flat([block[k - 1]]) for e in every_element(x)
                ):  # fmt: skip
                    k -= 1
                block.remove(s)
                block.insert(k, s)
    return kernel


def unshift(kernel: Kernel, visible: Names, saved: Names) -> Kernel:
    """Rewrite every shifted sum of exponentials, in every block.

    Parameters
    ----------
    visible : arrays that somebody sees at the end, so that what they hold may not change.
    saved : those that the backward is given.
    """
    kernel = replace(kernel, body=copy.deepcopy(kernel.body))
    for block in list(_blocks(kernel.body)):
        k = 0
        while k < len(block):
            if isinstance(loop := block[k], For):
                _unshift(kernel, block, k, loop, visible, saved)
            k += 1
    return kernel


def _blocks(block: list[Stmt]) -> Iterable[list[Stmt]]:
    yield block
    for s in block:
        if isinstance(s, For | If):
            yield from _blocks(s.body)
        if isinstance(s, If):
            yield from _blocks(s.orelse)


def _same_element(a: ast.expr, b: ast.expr, var_a: str, var_b: str) -> bool:
    """Whether two expressions are one but for the name of the loop variable."""
    return text(rename(a, var_a, var_b)) == text(b)


def rename(e: ast.expr, old: str, new: str) -> ast.expr:
    """Give a name in an expression another name."""
    e = parse(text(e))
    for n in ast.walk(e):
        if isinstance(n, ast.Name) and n.id == old:
            n.id = new
    return e


def _unshift(kernel: Kernel, block: list[Stmt], k: int, loop: For, visible: Names, saved: Names) -> None:
    """Rewrite the sum that `loop` computes, if it is one and all that reads it is of the two forms."""
    sums = [s for s in loop.body if type(s) is Accum and isinstance(s.target, ast.Name)]
    for s in sums:
        total = base(s.target)
        held = next((a for a in loop.body if type(a) is Assign and text(a.target) == text(s.value)), None)
        power = held.value if held else s.value
        if not (isinstance(power, ast.Call) and function_name(power) == "exp"):
            continue
        match power.args[0]:
            case ast.BinOp(left=term, op=ast.Sub(), right=ast.Name(id=top)):
                pass
            case _:
                continue
        _Shift(kernel, block, k, loop, s, held, term, top, total, visible, saved).rewrite()
        return


class _Shift:
    """One shifted sum: ``total += exp(term - top)``, the exponential perhaps held by a name and stored in an array."""

    def __init__(
        self, kernel: Kernel, block: list[Stmt], k: int, loop: For, s: Accum, held: Assign | None, term: ast.expr,
        top: str, total: str, visible: Names, saved: Names,
    ) -> None:  # fmt: skip
        self.kernel, self.block, self.k, self.loop, self.sum = kernel, block, k, loop, s
        self.held, self.term, self.top, self.total = held, term, top, total
        self.visible, self.saved = visible, saved
        self.store: Assign | None = None

    def rewrite(self) -> None:
        """Rewrite the sum and its readers, unless something else reads or disturbs them."""
        before, after = self.block[: self.k], self.block[self.k + 1 :]
        if not self.starts_at_zero(before) or not self.has_only_known_parts():
            return
        end = next((i for i, s in enumerate(after) if self.restarts(s)), len(after))
        after, later = after[:end], after[end:]
        near = set(flat([*before, self.loop, *after, *later]))
        scalars = {self.total, self.top} | ({base(self.held.target)} if self.held else set())
        far = [s for s in flat(self.kernel.body) if s not in near]  # the ranges and conditions around it too
        if any(self.exposed(n, later) for n in scalars) or any(
            n in names(e) for s in far for e in reads(s) for n in scalars
        ):
            return
        if self.held and any(base(self.held.target) in names(e) for s in before for x in flat([s]) for e in reads(x)):
            return
        root = self.kernel.root
        stored = root(base(self.store.target)) if self.store else None
        inputs = {root(n) for n in names(self.term)}
        logs, quotients = [], []
        for s in flat(after):
            for e in expressions(s):
                found = self.uses(s, e)
                if found is None:
                    return
                logs += found[0]
                quotients += found[1]
        own = {s for s, _, _ in quotients if isinstance(s, Assign) and root(base(s.target)) == stored}
        for s in flat(after):
            if isinstance(s, Assign):
                written = root(base(s.target))
                if written in inputs or written in (self.top, self.total) or (written == stored and s not in own):
                    return
        if {x.var for x in flat(after) if isinstance(x, For)} & (names(self.term) - {self.loop.var}):
            return
        if stored and not self.store_is_private(stored, bool(own), before, [*far, *flat(later)]):
            return
        if logs or quotients:
            self.apply(logs, quotients)

    def store_is_private(self, stored: str, normalized: bool, before: list[Stmt], others: list[Stmt]) -> bool:
        """Whether nothing but the stretch sees what the loop stores."""
        root = self.kernel.root
        if stored in self.visible and not normalized:
            return False
        touched = {x for x in [*others, *flat(before)] if any(root(base(e)) == stored for e in every_element(x))}
        if touched - set(flat(before)):
            return False
        if not any(root(base(e)) == stored for e in elements(self.term)):
            return not touched
        for s in before:  # its first touch writes, in a loop over the same range, what the terms are
            if set(flat([s])) & touched:
                assert self.store
                if not isinstance(s, For) or [text(b) for b in s.bounds[:2]] != [text(b) for b in self.loop.bounds[:2]]:
                    return False
                first = next((x for x in s.body if set(flat([x])) & touched), None)
                return (
                    type(first) is Assign
                    and text(rename(first.target, s.var, self.loop.var)) == text(self.store.target)
                    and not any(root(base(e)) == stored for e in elements(first.value))
                )
        return False

    def starts_at_zero(self, before: list[Stmt]) -> bool:
        for s in reversed(before):
            if isinstance(s, Assign) and text(s.target) == self.total:
                value = s.value.args[0] if isinstance(s.value, ast.Call) and s.value.args else s.value
                return type(s) is Assign and isinstance(value, ast.Constant) and value.value == 0
            if self.total in assigned([s]):
                return False
        return False

    def has_only_known_parts(self) -> bool:
        """Whether the loop holds the sum, its exponential and one store of it, and nothing that disturbs them."""
        power = text(self.sum.value)
        for s in self.loop.body:
            if s is self.sum or s is self.held:
                continue
            if type(s) is Assign and isinstance(s.target, ast.Subscript) and self.held and text(s.value) == power:
                if self.store:
                    return False
                self.store = s
                continue
            return False
        if self.held and (not isinstance(self.held.target, ast.Name) or self.top == base(self.held.target)):
            return False
        order = [self.loop.body.index(s) for s in (self.held, self.sum) if s]
        if order != sorted(order) or (self.store and self.loop.body.index(self.store) < order[0]):
            return False
        inside = {self.total, self.top, *([base(self.held.target)] if self.held else [])}
        if names(self.term) & inside or any(isinstance(n, ast.Call | ast.IfExp) for n in ast.walk(self.term)):
            return False
        if self.store:
            root = self.kernel.root(base(self.store.target))
            own = [e for e in elements(self.term) if self.kernel.root(base(e)) == root]
            if any(text(e) != text(self.store.target) for e in own):
                return False
            if self.loop.var not in names(self.store.target):
                return False
        return True

    def restarts(self, s: Stmt) -> bool:
        return type(s) is Assign and isinstance(s.target, ast.Name) and s.target.id in (self.total, self.top) and not (
            names(s.value) & {self.total, self.top}
        )  # fmt: skip

    def exposed(self, name: str, block: list[Stmt]) -> bool:
        """Whether a block reads a name before it assigns it."""
        for s in block:
            if any(name in names(e) for inner in flat([s]) for e in expressions(inner)):
                return True
            if type(s) is Assign and text(s.target) == name:
                return False
            if name in assigned([s]):
                return True
        return False

    def uses(self, s: Stmt, e: ast.expr) -> tuple[list, list] | None:  # type: ignore[type-arg]
        """Find the two forms in an expression; None where the sum, the shift or the store is read in any other way."""
        logs: list[tuple[Stmt, ast.expr, None]] = []
        quotients: list[tuple[Stmt, ast.expr, str]] = []
        seen: set[int] = set()
        for n in ast.walk(e):
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add):
                for x, y in ((n.left, n.right), (n.right, n.left)):
                    if isinstance(x, ast.Call) and function_name(x) == "log" and text(x.args[0]) == self.total:
                        if text(y) == self.top:
                            logs.append((s, n, None))
                            seen |= {id(x.args[0]), id(y)}
                            break
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) and text(n.right) == self.total and self.store:
                if isinstance(n.left, ast.Subscript) and (var := self.range_of(s, n.left)):
                    quotients.append((s, n, var))
                    seen |= {id(n.right), id(n.left)}
        bad = {self.total, self.top, *([base(self.held.target)] if self.held else [])}
        root = self.kernel.root(base(self.store.target)) if self.store else None
        for n in ast.walk(e):
            if isinstance(n, ast.Name) and n.id in bad and id(n) not in seen:
                return None
            if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name) and id(n) not in seen:
                if self.kernel.root(n.value.id) == root:
                    return None
        return logs, quotients

    def range_of(self, s: Stmt, e: ast.Subscript) -> str | None:
        """The variable of the loop over the sum's range that a statement with an element of the store stands in."""
        assert self.store
        for loop in flat(self.block[self.k + 1 :]):
            if isinstance(loop, For) and s in set(flat(loop.body)):
                same = [text(a) == text(b) for a, b in zip(loop.bounds[:2], self.loop.bounds[:2], strict=True)]
                if all(same) and loop.bounds[2] == self.loop.bounds[2]:
                    if _same_element(e, self.store.target, loop.var, self.loop.var):
                        return loop.var
        return None

    def apply(self, logs: list, quotients: list) -> None:  # type: ignore[type-arg]
        """Put the log of the sum after its loop, and write the readers with it."""
        self.kernel.names.setdefault("np", None)
        first = logs[0][0] if logs else None
        if (
            type(first) is Assign and isinstance(first.target, ast.Name) and first in self.block
            and first.value is logs[0][1]
            and all(text(x.target) != first.target.id for x in flat(self.kernel.body)
                    if isinstance(x, Assign) and x is not first)
        ):  # fmt: skip
            lse, line, value = first.target, first.line, first.value
            self.block.remove(first)
            logs = logs[1:]
        else:
            taken = {*self.kernel.params, *self.kernel.views, *assigned(self.kernel.body), *self.kernel.names}
            lse = ast.Name(next(f"lse{i}" for i in range(1, 99) if f"lse{i}" not in taken), ast.Load())
            line = first.line if first else self.sum.line
            value = logs[0][1] if logs else parse(f"np.log({self.total}) + {self.top}")
        exp_name = text((self.held.value if self.held else self.sum.value).func)  # type: ignore[attr-defined]
        weight = parse(f"{exp_name}(0 - {lse.id})")
        weight.args[0].left = self.term
        for s, e, var in quotients:
            new = parse(f"{exp_name}(0 - {lse.id})")
            new.args[0].left = rename(self.term, self.loop.var, var)
            whole = isinstance(s, Assign) and type(s) is Assign and s.value is e
            _swap(s, e, new)
            if whole and isinstance(s.target, ast.Subscript) and self.kernel.root(base(s.target)) in self.saved:
                if any(isinstance(x, For) and s in x.body for x in self.block):
                    weight = rename(s.target, var, self.loop.var)  # holds the same number, and the backward has it
        for s, e, _ in logs:
            _swap(s, e, lse)
        made = LogSumExp(line, lse, copy.deepcopy(value), replace(self.loop, body=[]), self.term, weight)
        self.block.insert(self.k + 1, made)
        if self.store:
            self.loop.body.remove(self.store)


def _swap(s: Stmt, old: ast.expr, new: ast.expr) -> None:
    """Replace one expression in a statement by another."""

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else super().visit(node)

    if isinstance(s, Assign):
        s.value = Swap().visit(s.value)
    elif isinstance(s, If):
        s.test = Swap().visit(s.test)
