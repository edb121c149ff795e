"""A rewrite before differentiation: sums of ``exp(x - top)`` are written with the log of their sum.

The shift by ``top`` cancels in ``log(total) + top`` and in ``exp(x - top) / total``, whatever ``top`` is. Both are
written with ``lse = log(total) + top``: no derivative then runs through the maximum.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, replace
from itertools import count

from .kernel import Accum, Assign, For, LogSumExp, PlainKernel, Stmt, assigned, blocks, every_element, flat
from .trees import Names, base, elements, function_name, names, quote, renamed, text


def unshift(kernel: PlainKernel, visible: Names, saved: Names) -> None:
    """Rewrite every shifted sum of exponentials, in every block.

    Parameters
    ----------
    visible : arrays that are read after the kernel, whose content must stay.
    saved : the arrays that the backward gets.
    """
    for block in list(blocks(kernel.body)):
        k = 0
        while k < len(block):
            if isinstance(loop := block[k], For):
                _unshift(kernel, block, k, loop, visible, saved)
            k += 1


def _unshift(kernel: PlainKernel, block: list[Stmt], k: int, loop: For, visible: Names, saved: Names) -> None:
    """Rewrite the sum that `loop` computes, if it is a shifted sum that is read only in the two forms."""
    sums = [s for s in loop.body if type(s) is Accum and isinstance(s.target, ast.Name)]
    for s in sums:
        total = s.name
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


@dataclass
class _Shift:
    """One shifted sum: ``total += exp(term - top)``, the exponential perhaps held by a name and stored in an array.

    Attributes
    ----------
    block, k : where the loop with the sum stands.
    held, store : the assignments that hold and store the exponential.
    """

    kernel: PlainKernel
    block: list[Stmt]
    k: int
    loop: For
    sum: Accum
    held: Assign | None
    term: ast.expr
    top: str
    total: str
    visible: Names
    saved: Names
    store: Assign | None = None

    def rewrite(self) -> None:
        """Rewrite the sum and its readers, unless another statement reads or changes them."""
        before, after = self.block[: self.k], self.block[self.k + 1 :]
        if not self.starts_at_zero(before) or not self.has_only_known_parts():
            return
        end = next((i for i, s in enumerate(after) if self.restarts(s)), len(after))
        after, later = after[:end], after[end:]
        near = set(flat([*before, self.loop, *after, *later]))
        scalars = {self.total, self.top} | ({self.held.name} if self.held else set())
        far = [s for s in flat(self.kernel.body) if s not in near]  # the ranges and conditions around it too
        if any(self.exposed(n, later) for n in scalars) or any(
            n in names(e) for s in far for e in s.reads for n in scalars
        ):
            return
        if self.held and any(self.held.name in names(e) for s in before for x in flat([s]) for e in x.reads):
            return
        root = self.kernel.root
        stored = root(self.store.name) if self.store else None
        inputs = {root(n) for n in names(self.term)}
        logs, quotients = [], []
        for s in flat(after):
            for e in s.held:
                found = self.uses(s, e)
                if found is None:
                    return
                logs += found[0]
                quotients += found[1]
        own = {s for s, _, _ in quotients if isinstance(s, Assign) and root(s.name) == stored}
        for s in flat(after):
            if isinstance(s, Assign):
                written = root(s.name)
                if written in inputs or written in (self.top, self.total) or (written == stored and s not in own):
                    return
        if {x.var for x in flat(after) if isinstance(x, For)} & (names(self.term) - {self.loop.var}):
            return
        if stored and not self.store_is_private(stored, bool(own), before, [*far, *flat(later)]):
            return
        if logs or quotients:
            self.apply(logs, quotients)

    def store_is_private(self, stored: str, normalized: bool, before: list[Stmt], others: list[Stmt]) -> bool:
        """Return whether only the stretch reads the array that the loop stores."""
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
                if not isinstance(s, For) or not self.same_range(s):
                    return False
                first = next((x for x in s.body if set(flat([x])) & touched), None)
                if type(first) is not Assign:
                    return False
                place = text(first.target)
                places = [e for x in flat(s.body) for e in every_element(x) if root(base(e)) == stored]
                return (
                    text(renamed(first.target, {s.var: self.loop.var})) == text(self.store.target)
                    and not any(root(base(e)) == stored for e in elements(first.value))
                    and all(text(e) == place for e in places)  # none that it has not written yet
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
        """Return whether the loop holds only the sum, its exponential, one store of it, and unrelated statements."""
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
        if self.held and (not isinstance(self.held.target, ast.Name) or self.top == self.held.name):
            return False
        order = [self.loop.body.index(s) for s in (self.held, self.sum) if s]
        if order != sorted(order) or (self.store and self.loop.body.index(self.store) < order[0]):
            return False
        inside = {self.total, self.top, *([self.held.name] if self.held else [])}
        if names(self.term) & inside or any(isinstance(n, ast.Call | ast.IfExp) for n in ast.walk(self.term)):
            return False
        if self.store:
            root = self.kernel.root(self.store.name)
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
        """Return whether a block reads a name before it assigns it."""
        for s in block:
            if any(name in names(e) for inner in flat([s]) for e in inner.held):
                return True
            if type(s) is Assign and text(s.target) == name:
                return False
            if name in assigned([s]):
                return True
        return False

    def uses(self, s: Stmt, e: ast.expr) -> tuple[list, list] | None:  # type: ignore[type-arg]
        """Find the two forms in an expression; None if the sum, the shift or the store is read in any other way."""
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
        bad = {self.total, self.top, *([self.held.name] if self.held else [])}
        root = self.kernel.root(self.store.name) if self.store else None
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
                if self.same_range(loop) and _same_element(e, self.store.target, loop.var, self.loop.var):
                    return loop.var
        return None

    def same_range(self, loop: For) -> bool:
        """Return whether a loop runs over the sum's range."""
        same = [text(a) == text(b) for a, b in zip(loop.bounds[:2], self.loop.bounds[:2], strict=True)]
        return all(same) and loop.bounds[2] == self.loop.bounds[2]

    def apply(self, logs: list, quotients: list) -> None:  # type: ignore[type-arg]
        """Put the log of the sum after its loop, and write the readers with it."""
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
            lse = ast.Name(next(f"lse{i}" for i in count(1) if f"lse{i}" not in self.kernel.taken))
            line = first.line if first else self.sum.line
            value = (
                logs[0][1] if logs else quote("np.log(total) + top", total=ast.Name(self.total), top=ast.Name(self.top))
            )
        exp = (self.held.value if self.held else self.sum.value).func  # type: ignore[attr-defined]

        def share(term: ast.expr) -> ast.expr:
            return quote("exp(term - lse)", exp=exp, term=term, lse=lse)  # type: ignore[no-any-return]

        weight = share(self.term)
        changes: dict[int, tuple[Stmt, ast.expr]] = {id(e): (s, lse) for s, e, _ in logs}
        for s, e, var in quotients:
            changes[id(e)] = s, share(renamed(self.term, {self.loop.var: var}))
            whole = type(s) is Assign and s.value is e
            if whole and isinstance(s.target, ast.Subscript) and self.kernel.written(s) in self.saved:
                if any(isinstance(x, For) and s in x.body for x in self.block):
                    weight = renamed(s.target, {var: self.loop.var})  # holds the same number, and the backward has it
        for s in {s for s, _ in changes.values()}:
            s.swap(lambda e: changes[id(e)][1] if id(e) in changes else None)
        made = LogSumExp(line, lse, copy.deepcopy(value), replace(self.loop, body=[]), self.term, weight)
        self.block.insert(self.k + 1, made)
        if self.store:
            self.loop.body.remove(self.store)


def _same_element(a: ast.expr, b: ast.expr, var_a: str, var_b: str) -> bool:
    """Return whether two expressions are equal up to the name of the loop variable."""
    return text(renamed(a, {var_a: var_b})) == text(b)
