"""Facts of a kernel: the nesting of its statements, live scalars, and the elements of an array that each loop owns."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from .kernel import Accum, Assign, For, If, LogSumExp, Stmt, Task, assigned, flat
from .rules import CHOICES
from .trees import Names, base, elements, function_name, index, names, renamed, text

Key = tuple[str, tuple[str, ...]]
"""The tie of an element to a loop: the name of the array or view, and the index of each axis that carries the loop."""

Sites = list[tuple[Stmt, ast.Subscript]]
"""Elements of arrays, each with the statement that touches it."""


class Facts:
    """The facts of one kernel that do not depend on the plan.

    Attributes
    ----------
    parent : the statements around each statement, outermost first.
    block_of : the block of each statement.
    accesses : every array element, with the statement that touches it, in the order of the source.
    locals : for each loop, the scalars that live within one iteration.
    under, written : for each loop, every statement inside, and the names that it writes, with those of inner loops.
    halves : for each loop, the result of `find_halves`.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.kernel, self.body = task, task.kernel, task.kernel.body
        self.under = cache(lambda loop: list(flat(loop.body)))
        self.written = cache(lambda loop: assigned(loop.body))
        self.halves = cache(self.find_halves)
        self.parent: dict[Stmt, list[Stmt]] = {}
        self.block_of: dict[Stmt, list[Stmt]] = {}
        self.tie(self.body, [])
        self.accesses = [(s, e) for s in flat(self.body) for e in self.elements_of(s)]
        self.refuse_undefined()
        self.live_out: dict[For, Names] = {}
        self.find_live(self.body, set())
        self.locals = {s: self.local_names(s) for s in self.loops()}
        self.refuse_races()

    def loops(self) -> list[For]:
        """All loops of the kernel."""
        return [s for s in flat(self.body) if isinstance(s, For)]

    def elements_of(self, s: Stmt) -> list[ast.Subscript]:
        """The array elements that a statement touches, forward or in its adjoint."""
        found = [e for x in s.held for e in elements(x)]
        if isinstance(s, LogSumExp):
            found = [*elements(s.term), *(e for e in elements(s.weight) if base(e) not in self.task.saved)]
        if isinstance(s, Assign) and isinstance(s.target, ast.Subscript):
            found.append(s.target)
        return found

    def tie(self, block: list[Stmt], parents: list[Stmt]) -> None:
        """Note the block and the parents of each statement."""
        for s in block:
            self.parent[s], self.block_of[s] = parents, block
            for inner in s.blocks:
                self.tie(inner, [*parents, s])

    def refuse_undefined(self) -> None:
        """Refuse locals that may be read before they are assigned."""
        scalars = self.scalars()
        for name in self.flow(self.body, scalars)[0]:
            line = next(s.line for s in flat(self.body) if any(name in names(e) for e in s.reads))
            why = f"'{name}' is read where it may not be assigned yet"
            self.kernel.refuse(line, why, "assign it on every path before")

    def scalars(self) -> Names:
        """The locals that are numbers."""
        return assigned(self.body) - self.kernel.arrays.keys() - self.kernel.views.keys()

    def flow(self, block: Iterable[Stmt], scalars: Names) -> tuple[Names, Names]:
        """The scalars that a block may read before it assigns them, and those that it assigns on every path."""
        exposed: Names = set()
        defined: Names = set()
        for s in block:
            inner = [self.flow(b, scalars) for b in s.blocks]
            own = {s.var} if isinstance(s, For) else set()
            read = set().union(*map(names, s.reads), *(before - own for before, _ in inner))
            exposed |= (read & scalars) - defined
            if isinstance(s, If):
                defined |= inner[0][1] & inner[1][1]
            elif isinstance(s, Assign) and isinstance(s.target, ast.Name):
                defined.add(s.name)
        return exposed, defined

    def find_live(self, block: list[Stmt], live: Names) -> Names:
        """Find the scalars that are live after each loop; return those before the block."""
        for s in reversed(block):
            if isinstance(s, For):
                self.live_out[s] = inner = live
                while (before := self.find_live(s.body, inner) - {s.var}) - inner:
                    inner = inner | before
                live = live | inner
            elif isinstance(s, If):
                live = self.find_live(s.body, live) | self.find_live(s.orelse, live)
            elif isinstance(s, Assign) and isinstance(s.target, ast.Name):
                live = live - {s.target.id}
            live = live.union(*map(names, s.reads))
        return live

    def local_names(self, loop: For) -> Names:
        """The scalars that live within one iteration."""
        here = {n for s in self.under(loop) for e in s.reads for n in names(e)} | self.written(loop)
        scalars = here & self.scalars()
        return (scalars & self.written(loop)) - self.flow(loop.body, scalars)[0] - self.live_out[loop] - {loop.var}

    def refuse_races(self) -> None:
        """Refuse what a parallel loop carries from one iteration to another, or out of its last one."""
        for loop in (s for s in self.loops() if s.parallel):
            own = self.locals[loop] | loop.reduced | {s.var for s in self.under(loop) if isinstance(s, For)}
            if carried := self.written(loop) & self.scalars() - own:
                name = min(carried)
                line = next(s.line for s in self.under(loop) if isinstance(s, Assign) and text(s.target) == name)
                why = f"'{name}' is carried over the iterations of a prange, which run in no order"
                self.kernel.refuse(line, why, "loop over a range, or let each iteration assign it first")
            if not any(isinstance(p, For) and p.parallel for p in self.parent[loop]):  # else it is a range for numba
                for name in sorted(self.kernel.roots(self.written(loop)) & self.kernel.arrays.keys()):
                    self.refuse_shared_elements(loop, name)

    def refuse_shared_elements(self, loop: For, root: str) -> None:
        """Refuse elements of an array that one iteration of a parallel loop touches and another may write."""
        inside = set(self.under(loop))
        sites = [(s, e) for s, e in self.accesses if s in inside and self.kernel.root(base(e)) == root]
        if set.intersection(*(self.keys(loop, e, signed=True) for _, e in sites)):
            return
        moving = self.written(loop) | {loop.var}
        moving -= {s.var for s in inside if isinstance(s, For) and not moving.intersection(*map(names, s.bounds[:2]))}
        targets = {text(s.target) for s, e in sites if isinstance(s, Assign) and e is s.target}
        for s, e in sites:
            always = not any(isinstance(p, If) for p in self.between(loop.body, s))
            if text(e) not in targets or (always and not names(e.slice) & moving):
                why = f"'{text(e)}' is an element that other iterations of the prange may write"
                self.kernel.refuse(s.line, why, "loop over a range, or give each iteration elements of its own")

    def keys(self, loop: For, e: ast.expr, signed: bool = False) -> set[Key]:
        """The ways in which an element is tied to a loop: by its bare variable, or by quotient and remainder of it.

        A variable that may be negative ties no element, unless `signed`: x[-1] belongs to another iteration.
        """
        if not signed and not self.counts_from_zero(loop):
            return set()
        parts = [text(i) for i in index(e)]
        found: set[Key] = {(base(e), (f"{k}",)) for k, p in enumerate(parts) if p == loop.var}
        for q, r in self.halves(loop):
            if q in parts and r in parts:
                found.add((base(e), (f"{parts.index(q)}", f"{parts.index(r)}")))
        return found

    def counts_from_zero(self, loop: For, seen: Names = frozenset()) -> bool:  # type: ignore[assignment]
        """Return whether a loop's variable is surely never negative."""
        lo, hi, step = loop.bounds
        return self.nonnegative(lo, seen) if step > 0 else text(hi) == "-1" or self.nonnegative(hi, seen)

    def nonnegative(self, e: ast.expr, seen: Names = frozenset()) -> bool:  # type: ignore[assignment]
        """Return whether an expression is surely an integer of at least 0; the names in `seen` are assumed to be."""
        match e:
            case ast.Constant(value=int() as value):
                return value >= 0
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return True
            case ast.BinOp(left=x, op=ast.Add() | ast.Mult() | ast.FloorDiv(), right=y) | ast.IfExp(body=x, orelse=y):
                return self.nonnegative(x, seen) and self.nonnegative(y, seen)
            case ast.BinOp(op=ast.Mod(), right=x):
                return self.nonnegative(x, seen)
            case ast.Call(args=args) if function_name(e) in CHOICES:
                sure = any if CHOICES[function_name(e)] == ">" else all
                return sure(self.nonnegative(x, seen) for x in args)
            case ast.Name(id=name) if name in self.kernel.names:
                return isinstance(self.kernel.names[name], int | np.integer) and self.kernel.names[name] >= 0
            case ast.Name(id=name) if name not in self.kernel.params:
                if name not in seen:
                    seen = {*seen, name}
                    values = [s.value for s in flat(self.body) if isinstance(s, Assign) and text(s.target) == name]
                    loops = [s for s in self.loops() if s.var == name]
                    return (
                        bool(values or loops)
                        and all(self.nonnegative(x, seen) for x in values)
                        and all(self.counts_from_zero(s, seen) for s in loops)
                    )
                return True
        return False

    def find_halves(self, loop: For) -> list[tuple[str, str]]:
        """Pairs of locals that are quotient and remainder of a loop's variable by one divisor."""
        q, r = {}, {}
        for s in loop.body:
            if type(s) is Assign and isinstance(s.target, ast.Name) and isinstance(s.value, ast.BinOp):
                v = s.value
                if text(v.left) == loop.var and not names(v.right) & self.written(loop) - {loop.var}:
                    if sum(s.target.id in assigned([x]) for x in flat(self.body)) > len(self.parent[s]) + 1:
                        continue
                    if isinstance(v.op, ast.FloorDiv):
                        q[text(v.right)] = s.target.id
                    if isinstance(v.op, ast.Mod):
                        r[text(v.right)] = s.target.id
        return [(q[n], r[n]) for n in q if n in r]

    def owned(self, loop: For, root: str, within: For | None = None) -> bool:
        """Return whether each iteration of a loop touches elements of an array that no other iteration touches."""
        inside = set(flat((within or loop).body))
        keys = [self.keys(loop, e) for s, e in self.accesses if s in inside and self.kernel.root(base(e)) == root]
        return bool(keys) and bool(set.intersection(*keys)) and loop.bounds[2] != 0

    def assigned_once(self, name: str) -> bool:
        """Return whether no element of an array is assigned twice, or touched before it is assigned."""
        sites = [(s, e) for s, e in self.accesses if self.kernel.root(base(e)) == name]
        if name in self.task.fresh:
            sites = [(s, e) for s, e in sites if isinstance(s, Assign) and e is s.target]
        return all(map(self.each_assigned_once, self.disjoint(sites)))

    def disjoint(self, sites: Sites) -> list[Sites]:
        """Split the accesses of an array by the numbers among their indices: other numbers are other elements."""
        every = [index(e) for _, e in sites]
        if len({base(e) for _, e in sites}) != 1:
            return [sites]
        axes = enumerate(zip(*every, strict=True))
        fixed = [k for k, found in axes if all(isinstance(i, ast.Constant) for i in found)]
        parts: dict[tuple[str, ...], Sites] = {}
        for site, at in zip(sites, every, strict=True):
            parts.setdefault(tuple(text(at[k]) for k in fixed), []).append(site)
        return list(parts.values())

    def each_assigned_once(self, sites: Sites) -> bool:
        """Return whether, among some accesses, no element is assigned twice, or touched before it is assigned."""
        first = [s for s, e in sites if isinstance(s, Assign) and type(s) is not Accum and e is s.target]
        if not first:
            return all(isinstance(s, Assign) and e is s.target for s, e in sites)
        order = [s for s, _ in sites]
        if order[: len(first)] != first or (len(first) > 1 and not self.exclusive(first)):
            return False
        s = first[0]
        e: Any = s.target
        loops = [p for p in self.parent[s] if isinstance(p, For)]
        for loop in loops:
            mine = self.keys(loop, e)
            if not mine:
                return False
            for other, x in sites:
                if loop in self.parent[other] and not mine & self.keys(loop, x):
                    return False
        return all(text(x.target) == text(e) for x in first)

    def exclusive(self, sites: Sequence[Stmt]) -> bool:
        """Return whether at most one of some statements runs in an iteration: they are in branches of one if."""
        a, b = sites[0], sites[1]
        top = self.block_of[a]
        for p in self.parent[a]:
            if isinstance(p, If) and len(sites) == 2 and self.block_of[b] is not top:
                return {id(self.block_of[a]), id(self.block_of[b])} == {id(p.body), id(p.orelse)}
        return False

    def refreshed(self, block: list[Stmt], root: str) -> bool:
        """Return whether a block writes every element of an array that it reads before it reads it."""
        inside = set(flat(block))
        sites = [(s, e) for s, e in self.accesses if s in inside and self.kernel.root(base(e)) == root]
        s, _ = sites[0]
        if type(s) is not Assign or s.name in names(s.value) or not isinstance(s.target, ast.Subscript):
            return False
        if self.kernel.written(s) != root or any(isinstance(p, If) for p in self.between(block, s)):
            return False
        loops = [p for p in self.between(block, s) if isinstance(p, For)]
        moving = assigned(block) - {p.var for p in loops} - self.settled(block, s, {x for x, _ in sites})
        if names(s.target.slice) & moving:
            return False
        for other, e in sites:
            here = [p for p in self.between(block, other) if isinstance(p, For)]
            want = s.target
            for loop in loops:
                if loop in here:
                    continue
                twin = [
                    p
                    for p in [*here, *([other.loop] if isinstance(other, LogSumExp) else [])]
                    if [text(b) for b in p.bounds[:2]] == [text(b) for b in loop.bounds[:2]]
                    and p.bounds[2] == loop.bounds[2]
                    and not any(names(b) & moving for b in p.bounds[:2])
                    and text(renamed(s.target, {loop.var: p.var})) == text(e)
                ]
                if not twin:
                    return False
                want = renamed(want, {loop.var: twin[0].var})
            if text(want) != text(e):
                return False
        return True

    def settled(self, block: list[Stmt], s: Stmt, others: set[Stmt]) -> Names:
        """The scalars that are assigned once in a block, in a block around a statement and others, and before them."""
        every = [x.name for x in flat(block) if isinstance(x, Assign)]
        found: Names = set()
        for b in [self.block_of[p] for p in [*self.between(block, s), s]]:
            top = next(k for k, x in enumerate(b) if x is s or x in self.parent[s])
            if others <= set(flat(b)):
                found |= {x.name for x in b[:top] if type(x) is Assign and every.count(x.name) == 1}
        return found & self.scalars()

    def between(self, block: list[Stmt], s: Stmt) -> list[Stmt]:
        """The statements around one, inside a block."""
        chain = [*self.parent[s], s]
        start = next(i for i, p in enumerate(chain) if self.block_of[p] is block)
        return chain[start:-1]
