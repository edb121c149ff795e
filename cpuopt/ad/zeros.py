"""How gradients start from zero: in the loop that owns their elements, at the start, or not at all."""

from __future__ import annotations

import ast

from .flows import sources
from .kernel import Assign, For, If, Interface, LogSumExp, Stmt, assigned, flat
from .naming import Naming, along, every, nest
from .plan import BackwardPlan
from .pullback import ZERO, Pullback
from .trees import Names, base, element, index, quote, text


class Zeros:
    """Writer of the zeroing of the adjoint arrays that are not only added to.

    Attributes
    ----------
    work : adjoint arrays in working memory, with the array whose shape they have.
    done : those that a loop zeroes by itself.
    """

    def __init__(self, plan: BackwardPlan, pullback: Pullback, naming: Naming, face: Interface) -> None:
        self.plan, self.kernel, self.pullback, self.naming, self.face = plan, plan.kernel, pullback, naming, face
        self.work: dict[str, str] = {}
        self.done: Names = set()
        pullback.once = {name for name in plan.task.wrt if self.written_once(name)}

    def sites(self, name: str) -> list[Assign]:
        """The assignments of which the adjoint reads or adds to that of an array."""
        return [s for s in flat(self.kernel.body) if isinstance(s, Assign) and self.plan.activity.has_adjoint(s)
                and (name in sources(self.kernel, s) or self.kernel.written(s) == name)]  # fmt: skip

    def only_loop(self, name: str) -> For | None:
        """The one outermost loop in which an adjoint is added to, if there is one."""
        tops = {[*self.plan.facts.parent[s], s][0] for s in self.sites(name)}
        top = next(iter(tops)) if len(tops) == 1 else None
        return top if isinstance(top, For) else None

    def needs_zero(self) -> list[str]:
        """Adjoint arrays that start from zero: those that the caller may want overwritten, those in own memory."""
        flagged = [n for n in self.plan.task.wrt if self.face.flag(f"d{n}")]
        own = [n for n in self.kernel.arrays if n in self.plan.activity.active and f"d{n}" not in self.face.params]
        own = [n for n in own if n not in self.naming.copied]
        return [*flagged, *own]

    def in_loop(self, top: For, loop: For, part: For | None = None) -> list[Stmt]:
        """Zero, in one iteration or chunk, the slices that it owns of the adjoints that only this loop adds to."""
        made: list[Stmt] = []
        for name in self.needs_zero():
            if self.only_loop(name) is not top or name in self.pullback.once or name in self.plan.partial.get(top, []):
                continue
            keys = [self.plan.facts.keys(loop, e) for st, e in self.plan.facts.accesses
                    if self.kernel.root(base(e)) == name and top in self.plan.facts.parent[st]]  # fmt: skip
            key = next(iter(sorted(set.intersection(*keys))), None) if keys else None
            if key is None or not self.covers(loop, name, key):
                continue
            seen, axes = key[0], [int(k) for k in key[1]]
            d = self.naming.adjoint(seen)
            count = len(self.kernel.views[seen].shape) if seen in self.kernel.views else self.kernel.arrays[seen]
            fixed = dict(
                zip(axes, [ast.Name(loop.var)] if len(axes) == 1 else self.halves(loop, seen, axes), strict=True)
            )
            body: list[Stmt] = [Assign(0, element(d, [fixed.get(k, ast.Name(f"j{k}")) for k in range(count)]), ZERO)]
            mine = part if len(axes) == 1 else None
            rows = axes[0] != 0 and count == 2
            if mine and rows:
                body = [For(0, loop.var, mine.bounds, body)]
            for k in reversed([k for k in range(count) if k not in fixed]):
                body = [along(d, k, body)]
            if mine and not rows:
                body = [For(0, loop.var, mine.bounds, body)]
            if flag := self.face.flag(f"d{name}"):
                test = "not flag and d.size > 0" if f"d{name}" in self.face.optional else "not flag"
                body = [If(0, quote(test, flag=ast.Name(flag), d=ast.Name(f"d{name}")), body)]
            made += body
            self.done.add(name)
        return made

    def halves(self, loop: For, seen: str, axes: list[int]) -> list[ast.expr]:
        """The quotient and the remainder by which a loop owns slices, written out: they may not be computed yet."""
        for pair in self.plan.facts.halves(loop):
            for s, e in self.plan.facts.accesses:
                if base(e) == seen and loop in self.plan.facts.parent[s]:
                    parts = [text(i) for i in index(e)]
                    if (parts[axes[0]], parts[axes[1]]) == pair:
                        made = {x.name: x.value for x in loop.body if type(x) is Assign}
                        return [made[n] for n in pair]
        raise AssertionError(seen)

    def covers(self, loop: For, name: str, key: tuple[str, tuple[str, ...]]) -> bool:
        """Return whether a loop's range is all of the axes that it owns."""
        lo, hi, step = loop.bounds
        if text(lo) != "0" or step != 1:
            return False
        seen, axes = key
        if seen in self.kernel.views:
            sizes = [text(self.resolve(e)) for e in self.kernel.views[seen].shape]
        else:
            sizes = list(self.face.sizes.get(name, ()))
        if not sizes:
            return False
        want = [sizes[int(k)] for k in axes]
        got = self.resolve(hi)
        if len(want) == 1:
            return self.size(got) == want[0] or text(got) == want[0]
        if not isinstance(got, ast.BinOp) or not isinstance(got.op, ast.Mult):
            return False
        return [text(got.left), text(got.right)] == want

    def resolve(self, e: ast.expr) -> ast.expr:
        """Replace a local that is assigned once, outside loops, by its value."""
        if isinstance(e, ast.BinOp):
            return ast.BinOp(self.resolve(e.left), e.op, self.resolve(e.right))
        if isinstance(e, ast.Name):
            sites = [s for s in flat(self.kernel.body) if e.id in assigned([s])]
            if len(sites) == 1 and type(sites[0]) is Assign and not self.plan.facts.parent[sites[0]]:
                return self.resolve(sites[0].value)
        return e

    def size(self, e: ast.expr) -> str:
        """The declared size that an expression such as ``x.shape[0]`` stands for."""
        match e:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int(k))
            ):
                sizes = self.face.sizes.get(name, ())
                return sizes[k] if k < len(sizes) else text(e)
        return text(e)

    def written_once(self, name: str) -> bool:
        """Return whether every element of a gradient is added to exactly once, in a loop over all of it."""
        sites = self.sites(name)
        if len(sites) != 1 or isinstance(sites[0], LogSumExp) or self.kernel.written(sites[0]) == name:
            return False
        s, loops = sites[0], self.plan.facts.parent[sites[0]]
        leaves = self.plan.activity.derivatives[s]
        found = {text(e): e for e, _ in leaves if self.kernel.root(base(e)) == name}
        if len(found) != 1 or any(isinstance(p, If) for p in loops):
            return False
        (e,) = found.values()
        if base(e) != name or len(loops) != self.kernel.arrays[name]:
            return False
        return all(
            any(self.covers(p, name, key) for key in self.plan.facts.keys(p, e) if len(key[1]) == 1)
            for p in loops
            if isinstance(p, For)
        ) and name not in {n for parts in self.plan.partial.values() for n in parts}

    def at_start(self) -> list[Stmt]:
        """Zero at the start the adjoints that no loop zeroes."""
        made: list[Stmt] = []
        for name in self.needs_zero():
            d = self.naming.adjoint(name)
            if f"d{name}" not in self.face.params:
                self.work[d] = name
                if self.face.own_memory or name in self.kernel.local:
                    continue  # np.zeros
            if name in self.done or name in self.pullback.once:
                continue
            top = self.only_loop(name)
            if top and name in self.plan.partial.get(top, []):
                continue
            axes = self.kernel.arrays[name]
            body = nest(d, axes, [Assign(0, element(d, every(axes)), ZERO)], parallel=True)
            flag = self.face.flag(d)
            made += [If(0, quote("not flag", flag=ast.Name(flag)), body)] if flag else body
        return made
