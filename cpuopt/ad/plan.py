"""The plan of a backward: the values that it keeps, recomputes or records, the order of its loops, and the reasons.

The backward runs a forward sweep, then the statements in reverse; a loop whose iterations are independent does both in
one iteration (`fused`), so that its operands are still in cache. The plan starts from the best case (every loop fused,
every temporary recomputed, nothing recorded) and drops assumptions that fail, until none does. A value is then recorded
only where it is overwritten while an adjoint of an earlier statement, or of the statement itself, still reads it (the
to-be-recorded analysis of Hascoet, Naumann and Pascual 2005).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import pairwise

from .activity import Activity
from .facts import Facts
from .flows import sources
from .kernel import Accum, Assign, For, If, Reshape, Stmt, Task, WrittenTwiceError, assigned, flat
from .trees import Names, base, names, text


class _TakenBackError(Exception):
    """A decision was dropped; the others are made again."""


class BackwardPlan:
    """The decisions for one task.

    Attributes
    ----------
    recorded : assignments whose old value is pushed, and branches whose outcome is pushed, with the reason.
    recomputed : temporaries that the reverse loop computes again, with the reason.
    fused : loops that do forward and reverse in one iteration, with the reason.
    plain : the other loops, with the reason.
    ascending : loops whose reverse runs upwards.
    serial : fused parallel loops that run on one thread, with the reason.
    split : fused parallel loops that run by chunks of an inner loop instead: that loop.
    partial : adjoints that each chunk of a parallel loop sums by itself.
    kept : the statements of the forward sweep.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.kernel, self.body = task, task.kernel, task.kernel.body
        self.activity, self.facts = Activity(task), Facts(task)
        self.stored = self.find_stored()
        self.overwritten = self.find_overwritten()
        self.plain: dict[For, str] = {}
        self.not_recomputed: set[Stmt] = set()
        self.decide()
        self.ascending = {s for s in self.facts.loops() if s in self.fused or self.may_ascend(s)}
        self.serial: dict[For, str] = {}
        self.split: dict[For, For] = {}
        self.partial: dict[For, list[str]] = {}
        for loop in self.facts.loops():
            if loop in self.fused and loop.parallel:
                self.parallelize(loop)

    def find_stored(self) -> dict[Stmt, Assign]:
        """Find the assignments of a local that the next line stores in a saved output: that line."""
        found: dict[Stmt, Assign] = {}
        for block in {id(b): b for b in self.facts.block_of.values()}.values():
            for a, b in pairwise(block):
                if type(b) is Assign and self.kernel.written(b) in self.task.saved and isinstance(a, Assign):
                    if isinstance(a.target, ast.Name) and text(a.target) == text(b.value):
                        found[a] = b
        return found

    def find_overwritten(self) -> Names:
        """Find the outputs of which an element is written more than once; a saved one may not be.

        Raises
        ------
        WrittenTwiceError
            For a saved one.
        """
        task, every = self.task, list(flat(self.body))
        found = {a for a in {*task.outs, *task.saved} if not self.facts.assigned_once(a)}
        for name in task.saved:
            summed = any(type(s) is Accum and self.kernel.written(s) == name for s in every)
            if summed and any(name in self.kernel.read([e]) for s in every for e in s.held):
                found.add(name)
        for name in sorted(task.saved & found):
            line = [s.line for s in every if isinstance(s, Assign) and self.kernel.written(s) == name][-1]
            why = f"'{name}' is given to the backward, but an element of it may be written more than once"
            raise WrittenTwiceError(self.kernel.at(line, why, "write each element of it once"), name)
        return found

    def decide(self) -> None:
        """Drop decisions that fail, until all hold."""
        while True:
            self.recorded: dict[Stmt, str] = {}
            self.recomputed: dict[Stmt, str] = {}
            self.fused: dict[For, str] = {}
            self.demand: dict[For, Names] = {}
            self.kept: set[Stmt] = set()
            try:
                self.find_records(self.body, set())
                self.sweep(self.body, set(), True, self.kept)
                return
            except _TakenBackError:
                continue

    # What is to be recorded ------------------------------------------------------------------------------------------

    def find_records(self, block: list[Stmt], need: Names) -> None:
        """Find the assignments to record, walking forward with the values that adjoints of earlier statements read."""
        for s in block:
            if isinstance(s, Assign):
                self.record_assign(s, need)
            elif isinstance(s, If):
                self.record_branch(s, need)
            elif isinstance(s, For):
                if s not in self.plain and (why := self.dependence(s, need)):
                    self.plain[s] = why
                    if s in self.fused:
                        raise _TakenBackError
                if s in self.plain:
                    self.record_plain(s, need)
                else:
                    self.record_fused(s, need)

    def record_assign(self, s: Assign, need: Names) -> None:
        """Walk over an assignment."""
        name = self.kernel.written(s)
        mine = self.kernel.roots(self.activity.needs[s])  # a new set
        if name in self.task.saved:
            need |= mine | self.kernel.roots(self.activity.result[s])
            return
        if s in self.recomputed:
            mine |= self.kernel.read([s.value])
        elif self.task.record_all or name in need | mine:
            own = name in mine and name not in need
            who = "its own adjoint" if own else "the adjoint of an earlier line"
            self.recorded[s] = f"{name} is overwritten and {who} reads the old value"
            if isinstance(s.target, ast.Subscript):
                mine |= self.kernel.read([s.target.slice])
        need |= mine
        if isinstance(s.target, ast.Name) and type(s) is not Accum:
            need.discard(name)
        need |= self.kernel.roots(self.activity.result[s])

    def record_branch(self, s: If, need: Names) -> None:
        """Walk over a branch."""
        if s in self.recomputed:
            for inner in self.choice(s):
                need |= self.kernel.roots(self.activity.needs[inner] | names(inner.value))
            need |= self.kernel.read([s.test])
            need.discard(self.choice(s)[0].name)
            need |= self.kernel.roots(set().union(*(self.activity.result[x] for x in self.choice(s))))
            return
        writes = self.kernel.roots(assigned([*s.body, *s.orelse])) - self.task.saved
        other = set(need)
        self.find_records(s.body, need)
        self.find_records(s.orelse, other)
        need |= other
        if not self.activity.has_adjoint(s) and not any(x in self.recorded for x in flat([*s.body, *s.orelse])):
            return
        if self.task.record_all or self.kernel.read([s.test]) & writes:
            self.recorded[s] = "the branch writes what its condition reads"
        else:
            need |= self.kernel.read([s.test])

    def record_plain(self, loop: For, need: Names) -> None:
        """Walk twice over a loop whose reverse follows its forward: an iteration may need what the next overwrites."""
        before = set(need)
        for _ in range(2):
            for s in self.recomputable(loop.body):
                name = self.choice(s)[0].name
                if name in need and s not in self.recomputed:
                    self.not_recomputed.add(s)
                    raise _TakenBackError
                self.recomputed[s] = "its inputs are still there in the reverse loop"
            again = {self.choice(s)[0].name for s in loop.body if s in self.recomputed}
            if clash := need & again:
                for s in loop.body:
                    if s in self.recomputed and self.choice(s)[0].name in clash:
                        self.not_recomputed.add(s)
                raise _TakenBackError
            self.find_records(loop.body, need)
            need -= again | {loop.var}
        need |= before  # the loop may have no iteration
        need |= self.kernel.read(loop.trees)

    def recomputable(self, body: list[Stmt]) -> list[Stmt]:
        """The statements of a plain loop's body whose results its reverse could compute again."""
        if self.task.record_all:
            return []
        count: dict[str, int] = {}
        for s in flat(body):
            if isinstance(s, Assign):
                count[s.name] = count.get(s.name, 0) + 1
        written = self.kernel.roots(assigned(body)) - self.task.saved
        again: list[Stmt] = []
        fixed: Names = set()
        seen: Names = set()
        for s in body:
            parts = self.choice(s)
            if parts:
                name = base(parts[0].target)
                inputs = set().union(*(names(e) for p in [s, *parts] for e in p.held))
                local = name not in seen and name not in inputs and count[name] == len(parts)
                if local and not (self.kernel.roots(inputs) & written - fixed) and s not in self.not_recomputed:
                    again.append(s)
                    fixed.add(name)
            seen |= {n for x in flat([s]) for e in x.reads for n in names(e)} | assigned([s])
        return again

    def choice(self, s: Stmt) -> list[Assign]:
        """The assignments to one name that a statement consists of: itself, or those in both branches of an if."""
        if type(s) is Assign and isinstance(s.target, ast.Name):
            return [s]
        if isinstance(s, If) and len(s.body) == len(s.orelse) == 1:
            a, b = s.body[0], s.orelse[0]
            if type(a) is Assign and type(b) is Assign and isinstance(a.target, ast.Name):
                return [a, b] if text(a.target) == text(b.target) else []
        return []

    def dependence(self, loop: For, need: Names) -> str:
        """Return why a loop cannot be fused here, such as dependent iterations; empty if it can."""
        if self.task.record_all:
            return "everything is recorded"
        root = self.kernel.root
        inside = set(self.facts.under(loop))
        for name in sorted(self.facts.written(loop)):
            if name in self.facts.locals[loop] or name in {s.var for s in inside if isinstance(s, For)}:
                continue
            if root(name) in self.task.saved and not self.has_adjoint_from(inside, root(name)):
                continue
            writes = [s for s in inside if isinstance(s, Assign) and s.name == name]
            only_summed = all(type(s) is Accum for s in writes) and not any(
                root(n) == root(name) for s in inside for e in s.held for n in names(e)
            )
            if only_summed:
                continue
            if name not in self.kernel.arrays and name not in self.kernel.views:
                return f"'{name}' is carried from one iteration to the next"
            if self.facts.owned(loop, root(name)):
                continue
            outside = any(root(base(e)) == root(name) and s not in inside for s, e in self.facts.accesses)
            if outside or root(name) in self.task.outs or not self.facts.refreshed(loop.body, root(name)):
                return f"'{name}' is carried from one iteration to the next"
            if loop.parallel:
                why = f"every iteration writes the same elements of '{name}'"
                self.kernel.refuse(loop.line, why, "give each its own")
        if clash := self.kernel.roots(self.facts.written(loop)) & need - self.task.saved:
            return f"it overwrites '{min(clash)}', which an earlier adjoint reads"
        return ""

    def record_fused(self, loop: For, need: Names) -> None:
        """Walk over a fused loop."""
        self.fused[loop] = "its iterations are independent"
        inner: Names = set()
        self.find_records(loop.body, inner)
        replay: set[Stmt] = set()
        demand = self.kernel.roots(self.sweep(loop.body, set(), True, replay)) - {loop.var}
        written = self.kernel.roots({s.name for s in replay if isinstance(s, Assign)}) - self.task.saved
        for name in sorted(demand & written & self.kernel.arrays.keys()):
            if self.facts.refreshed(loop.body, name):
                demand.discard(name)
        self.demand[loop] = demand
        if (demand & written) and any(isinstance(p, For) and p not in self.fused for p in self.facts.parent[loop]):
            self.take_back(loop, f"it reads '{min(demand & written)}', which it overwrites, inside a loop that is not")
        need |= demand
        need |= self.kernel.read(loop.trees)

    def take_back(self, loop: For, why: str) -> None:
        """Drop the fusion of a loop, and start again."""
        self.plain[loop] = why
        raise _TakenBackError

    # The forward sweep -----------------------------------------------------------------------------------------------

    def sweep(self, block: list[Stmt], live: Names, push: bool, kept: set[Stmt]) -> Names:
        """Find the statements of the forward sweep whose results are read, walking backwards; return what is live.

        Parameters
        ----------
        live : names read after the block.
        push : whether the reverse of this block runs from this sweep, so that it records, and its reads count.
        """
        for s in reversed(block):
            if isinstance(s, Assign):
                live = self.sweep_assign(s, live, push, kept)
            elif isinstance(s, If):
                a = self.sweep(s.body, set(live), push, kept)
                b = self.sweep(s.orelse, set(live), push, kept)
                live = a | b
                inside = [x for x in flat([*s.body, *s.orelse]) if x in kept]
                if inside or (push and (s in self.recorded or self.activity.has_adjoint(s))):
                    live |= self.kernel.read([s.test])
                if inside or (push and s in self.recorded):
                    kept.add(s)
            elif isinstance(s, For):
                live = self.sweep_loop(s, live, push, kept)
            elif isinstance(s, Reshape):
                live |= set().union(*map(names, s.shape))
        return live

    def sweep_assign(self, s: Assign, live: Names, push: bool, kept: set[Stmt]) -> Names:
        """Decide on an assignment of the sweep."""
        name = self.kernel.written(s)
        live = set(live)
        if push:
            live |= self.kernel.roots(self.activity.result[s])
        if name in self.task.saved:
            if self.restores(s, live):
                kept.add(s)
                live.discard(base(s.value))
                live |= self.kernel.read([s.target.slice])  # type: ignore[attr-defined]
        elif name in live and s in self.stored and s not in self.recorded:
            kept.add(self.stored[s])
            live.discard(name)
            live |= self.kernel.roots(names(self.stored[s].target.slice))  # type: ignore[attr-defined]
        else:
            record = push and s in self.recorded
            if name in live or record:
                kept.add(s)
                if isinstance(s.target, ast.Name) and type(s) is not Accum:
                    live.discard(name)
                live |= self.kernel.read(s.reads)
                if record:
                    live |= {name} | self.kernel.roots(names(s.target) - {s.name})
        if push:
            live |= self.kernel.roots(self.activity.needs[s])
        return live

    def restores(self, s: Assign, live: Names) -> bool:
        """Return whether a scalar can be read back from a saved output."""
        outside = {*self.kernel.names, *self.kernel.params}
        return type(s) is Assign and isinstance(s.value, ast.Name) and s.value.id in live - outside

    def sweep_loop(self, loop: For, live: Names, push: bool, kept: set[Stmt]) -> Names:
        """Decide on a loop of the sweep."""
        after = set(live)
        own = push and loop not in self.fused
        end = set(after)
        if own:
            again = flat(s for s in loop.body if s in self.recomputed)
            end |= self.kernel.read(e for s in again for e in s.held)
        while (before := self.sweep(loop.body, set(end), own, kept) - {loop.var}) - end:
            end |= before
        inside = any(s in kept for s in self.facts.under(loop))
        live = after | end
        if push and loop in self.fused:
            written = {s.name for s in self.facts.under(loop) if s in kept and isinstance(s, Assign)}
            if inside and self.demand.get(loop, set()) & self.kernel.roots(written) - self.task.saved:
                self.take_back(loop, "a later line reads what it overwrites in place")
            live |= self.demand.get(loop, set())
        reversed_ = self.activity.has_adjoint(loop) or any(s in self.recorded for s in self.facts.under(loop))
        if inside or (push and reversed_):
            live |= self.kernel.read(loop.trees)
        if inside:
            kept.add(loop)
        return live

    # The order of loops ----------------------------------------------------------------------------------------------

    def may_ascend(self, loop: For) -> bool:
        """Return whether the reverse of a plain loop may run upwards, without records or a carried adjoint."""
        if self.task.record_all or any(s in self.recorded for s in self.facts.under(loop)):
            return False
        return all(self.is_owned(loop, n) for n in self.shared_adjoints(loop)[1])

    def unconsumed(self, name: str) -> bool:
        """Return whether the given adjoint of an output is only read."""
        if name not in self.task.outs or name in self.overwritten:
            return False
        return not self.has_adjoint_from(flat(self.body), name)

    def has_adjoint_from(self, block: Iterable[Stmt], name: str) -> bool:
        """Return whether the adjoint of a statement adds to that of an array."""
        return any(
            isinstance(s, Assign) and self.activity.has_adjoint(s) and name in sources(self.kernel, s) for s in block
        )

    # Races -----------------------------------------------------------------------------------------------------------

    def parallelize(self, loop: For) -> None:
        """Find how a fused parallel loop runs without a race."""
        adds, others = self.shared_adjoints(loop)
        if not all(self.is_owned(loop, n) for n in others):
            self.serial[loop] = "an adjoint is written by several iterations"
            return
        summed = sorted(n for n in adds if not self.is_owned(loop, n))
        if not summed:
            return
        if inner := self.inner_owner(loop, adds | others):
            self.split[loop] = inner
        elif any(base(e) != self.kernel.root(base(e)) for _, e in self.facts.accesses
                 if self.kernel.root(base(e)) in summed):  # fmt: skip
            self.serial[loop] = "an adjoint that several iterations add to is seen through a view"
        elif loop.bounds[2] != 1:
            self.serial[loop] = "several iterations add to one adjoint, and the step is not 1"
        else:
            self.partial[loop] = summed

    def is_owned(self, loop: For, name: str) -> bool:
        """Return whether an adjoint is that of an array of which each iteration has elements of its own."""
        return name in self.kernel.arrays and self.facts.owned(loop, name)

    def shared_adjoints(self, loop: For) -> tuple[Names, Names]:
        """The adjoints outside a loop's iterations that it only adds to, and those that it reads or overwrites too."""
        adds: Names = set()
        read: Names = set()
        overwrites: Names = set()
        for s in self.facts.under(loop):
            if isinstance(s, Assign) and self.activity.has_adjoint(s):
                adds |= sources(self.kernel, s) & self.activity.active
                name = self.kernel.written(s)
                if not self.unconsumed(name):
                    (read if type(s) is Accum else overwrites).add(name)
        inside = self.facts.locals[loop]
        others = (overwrites | adds & read) - inside
        return adds - inside - others, others

    def inner_owner(self, loop: For, adjoints: Names) -> For | None:
        """The one inner loop of which each iteration, over all of the outer ones, has elements of its own."""
        rest = [s for s in loop.body if isinstance(s, For)]
        simple = [s for s in loop.body if isinstance(s, Assign) and isinstance(s.target, ast.Name)]
        if len(rest) != 1 or len(simple) + 1 != len(loop.body) or any(map(self.activity.has_adjoint, simple)):
            return None
        inner = rest[0]
        moving = self.facts.written(loop) | {loop.var}
        if any(s in self.recorded for s in self.facts.under(loop)):
            return None
        if inner not in self.fused or inner.bounds[2] != 1 or loop.bounds[2] != 1:
            return None
        if any(names(e) & moving for e in inner.bounds[:2]):
            return None
        touched = self.kernel.roots(assigned(inner.body)) & self.kernel.arrays.keys() | adjoints
        touched -= self.facts.locals[inner] | self.facts.locals[loop]
        if all(n in self.kernel.arrays and self.facts.owned(inner, n, loop) for n in touched):
            return inner
        return None
