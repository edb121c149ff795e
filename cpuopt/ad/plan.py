"""What the backward of a kernel keeps, computes again or records, in which order its loops run, and why.

The backward runs a forward sweep, then the statements in reverse; a loop whose iterations are independent does both in
one iteration (`fused`), so that what it needs is still in cache. The plan starts from the best that could be (every
loop fused, every temporary computed again, nothing recorded) and takes back what does not hold, until nothing does.
What is left is recorded: a value that is overwritten while an adjoint of an earlier statement, or of the statement
itself, still reads it (the to-be-recorded analysis of Hascoet, Naumann and Pascual 2005).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .normal import flows, rename, rule, sources, useful, varied
from .rules import CASTS
from .subset import (
    Accum,
    Assign,
    For,
    If,
    Kernel,
    LogSumExp,
    Stmt,
    UnsupportedError,
    View,
    assigned,
    base,
    elements,
    expressions,
    flat,
    index,
    names,
    text,
)

Names = set[str]
Key = tuple[str, tuple[str, ...]]
"""How an element is tied to a loop: the name of the array or view, and the index of each axis that carries the loop."""


class _Retry(Exception):  # noqa: N818  (a decision was taken back)
    pass


@dataclass
class Task:
    """What to differentiate.

    Attributes
    ----------
    wrt, outs : arrays whose adjoints are wanted, and given.
    saved : outputs that the backward is given as the forward left them.
    hidden : parameters that the backward is not given.
    fresh : outputs whose content before the call means nothing, so that nothing reads an element before it is assigned.
    record_all : record whatever is overwritten, fuse nothing, compute nothing again: slow, and simple to trust.
    """

    kernel: Kernel
    wrt: list[str]
    outs: list[str]
    saved: Names = field(default_factory=set)
    hidden: Names = field(default_factory=set)
    fresh: Names = field(default_factory=set)
    record_all: bool = False


class Plan:
    """The decisions for one task.

    Attributes
    ----------
    active : names that have an adjoint.
    recorded : assignments whose old value is pushed, and branches whose outcome is, with the reason.
    again : temporaries that the reverse loop computes again, with the reason.
    fused : loops that do forward and reverse in one iteration, with the reason.
    plain : loops that do not, with the reason.
    ascending : loops whose reverse runs upwards.
    split : fused parallel loops that run by chunks of an inner loop instead: that loop.
    partial : adjoints that each chunk of a parallel loop sums by itself.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.kernel = task, task.kernel
        k = self.kernel
        self.active = varied(k, task.wrt) & useful(k, task.outs)
        self.check_active()
        self.body = k.body
        self.known_under: dict[For, list[Stmt]] = {}
        self.known_written: dict[For, Names] = {}
        self.known_needs: dict[Stmt, Names] = {}
        self.parent: dict[Stmt, list[Stmt]] = {}
        self.block_of: dict[Stmt, list[Stmt]] = {}
        self.tie(self.body, [])
        self.accesses = [(s, e) for s in flat(self.body) for e in self.elements_of(s)]
        self.refuse_undefined()
        self.stored: dict[Stmt, Stmt] = {}
        for block in {id(b): b for b in self.block_of.values()}.values():
            for a, b in pairwise(block):
                if type(b) is Assign and self.kernel.root(base(b.target)) in task.saved and isinstance(a, Assign):
                    if isinstance(a.target, ast.Name) and text(a.target) == text(b.value):
                        self.stored[a] = b
        self.live_out: dict[For, Names] = {}
        self.find_live(self.body, set())
        self.locals = {s: self.local_names(s) for s in self.loops()}
        self.overwritten = {a for a in {*task.outs, *task.saved} if not self.assigned_once(a)}
        for name in task.saved:
            summed = any(type(s) is Accum and k.root(base(s.target)) == name for s in flat(self.body))
            read = any(name in self.values(names(e)) for s in flat(self.body) for e in expressions(s))
            if summed and read:
                self.overwritten.add(name)
        for name in sorted(task.saved & self.overwritten):
            raise UnsupportedError(
                f"{k.file}: '{name}' is given to the backward, but an element of it is written more than once; "
                "write each element of a saved output once"
            )
        self.ascending: set[For] = set()
        self.split: dict[For, For] = {}
        self.partial: dict[For, list[str]] = {}
        self.private: dict[For, Names] = {}
        self.plain: dict[Stmt, str] = {}
        self.not_again: dict[Stmt, str] = {}
        self.decide()

    # Facts about the kernel ------------------------------------------------------------------------------------------

    def loops(self) -> list[For]:
        """All loops of the kernel."""
        return [s for s in flat(self.body) if isinstance(s, For)]

    def under(self, loop: For) -> list[Stmt]:
        """Every statement inside a loop."""
        if loop not in self.known_under:
            self.known_under[loop] = list(flat(loop.body))
        return self.known_under[loop]

    def written(self, loop: For) -> Names:
        """The names that a loop writes, the variables of inner loops included."""
        if loop not in self.known_written:
            self.known_written[loop] = assigned(loop.body)
        return self.known_written[loop]

    def elements_of(self, s: Stmt) -> list[ast.Subscript]:
        """The array elements that a statement touches, forward or in its adjoint."""
        found = [e for x in expressions(s) for e in elements(x)]
        if isinstance(s, LogSumExp):
            found = [*elements(s.term), *(e for e in elements(s.weight) if base(e) not in self.task.saved)]
        if isinstance(s, Assign) and isinstance(s.target, ast.Subscript):
            found.append(s.target)
        return found

    def tie(self, block: list[Stmt], parents: list[Stmt]) -> None:
        """Note the block and the parents of each statement."""
        for s in block:
            self.parent[s], self.block_of[s] = parents, block
            if isinstance(s, For):
                self.tie(s.body, [*parents, s])
            elif isinstance(s, If):
                self.tie(s.body, [*parents, s])
                self.tie(s.orelse, [*parents, s])

    def refuse(self, line: int, why: str, instead: str) -> None:
        """Raise, with file, line and code."""
        code = self.kernel.source.get(line, "").strip()
        raise UnsupportedError(f"{self.kernel.file}:{line}: '{code}': {why}; {instead}")

    def check_active(self) -> None:
        """Refuse indices, bounds and integer arithmetic on active values."""
        k = self.kernel
        for s in flat(k.body):
            for e in [*expressions(s), *([s.term] if isinstance(s, LogSumExp) else [])]:
                for element in elements(e) if not isinstance(s, For) else ():
                    for i in index(element):
                        if self.is_active(i, names):
                            self.refuse(s.line, f"the index '{text(i)}' depends on what is differentiated", "use ints")
            if isinstance(s, Assign) and isinstance(s.target, ast.Subscript):
                for i in index(s.target):
                    if self.is_active(i, names):
                        self.refuse(s.line, f"the index '{text(i)}' depends on what is differentiated", "use ints")
            if isinstance(s, For) and any(self.is_active(e, names) for e in s.bounds[:2]):
                self.refuse(s.line, "the range depends on what is differentiated", "use integers in ranges")
            if isinstance(s, Assign) and not isinstance(s, LogSumExp) and k.root(base(s.target)) in self.active:
                self.check_expression(s, s.value)

    def is_active(self, e: ast.AST, of: object = None) -> bool:
        """Whether a derivative runs through an expression."""
        found = names(e) if of is names else flows(e)
        return any(self.kernel.root(n) in self.active for n in found)

    def check_expression(self, s: Assign, e: ast.expr) -> None:
        """Refuse what has no derivative."""
        if not self.is_active(e):
            return
        match e:
            case ast.Name() | ast.Subscript():
                return
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=x):
                return self.check_expression(s, x)
            case ast.BinOp(left=x, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=y):
                self.check_expression(s, x)
                return self.check_expression(s, y)
            case ast.BinOp(left=x, op=ast.Pow(), right=y) if not names(y) & self.active:
                return self.check_expression(s, x)
            case ast.BinOp(op=ast.Pow()):
                self.refuse(s.line, "the exponent depends on what is differentiated", "write it with exp and log")
        if found := rule(self.kernel, e):
            return self.check_expression(s, found[1])
        from .subset import function_name

        if isinstance(e, ast.Call) and function_name(e) in CASTS:
            return self.check_expression(s, e.args[0])
        self.refuse(s.line, f"'{text(e)}' has no derivative", "use only + - * / and the functions of docs/ad.md")

    def refuse_undefined(self) -> None:
        """Refuse locals that may be read before they are assigned."""
        scalars = self.scalars()
        for name in self.exposed(self.body, scalars):
            line = next(s.line for s in flat(self.body) if any(name in names(e) for e in self.reads(s)))
            self.refuse(line, f"'{name}' is read where it may not be assigned yet", "assign it on every path before")

    def scalars(self) -> Names:
        """The locals that are numbers."""
        return assigned(self.body) - self.kernel.arrays.keys() - self.kernel.views.keys()

    def reads(self, s: Stmt) -> list[ast.expr]:
        """The expressions that a statement reads when it runs forward."""
        found = expressions(s)
        return [*found, s.target] if isinstance(s, Accum) else found

    def exposed(self, block: Iterable[Stmt], scalars: Names) -> Names:
        """The scalars that a block may read before it assigns them."""
        exposed: Names = set()
        defined: Names = set()
        for s in block:
            for e in self.reads(s):
                exposed |= (names(e) & scalars) - defined
            match s:
                case For(var=var, body=body):
                    exposed |= self.exposed(body, scalars) - defined - {var}
                case If(body=body, orelse=orelse):
                    exposed |= (self.exposed(body, scalars) | self.exposed(orelse, scalars)) - defined
                    defined |= self.surely(body) & self.surely(orelse)
                case Assign(target=ast.Name(id=name)):
                    defined.add(name)
        return exposed

    def surely(self, block: Iterable[Stmt]) -> Names:
        """The scalars that a block assigns on every path."""
        found: Names = set()
        for s in block:
            if isinstance(s, Assign) and isinstance(s.target, ast.Name):
                found.add(s.target.id)
            elif isinstance(s, If):
                found |= self.surely(s.body) & self.surely(s.orelse)
        return found

    def find_live(self, block: list[Stmt], live: Names) -> Names:
        """Find the scalars that are live after each loop; return those before the block."""
        for s in reversed(block):
            if isinstance(s, For):
                self.live_out[s] = set(live)
                inner = live
                while True:
                    before = self.find_live(s.body, set(inner)) - {s.var}
                    if before <= inner:
                        break
                    inner = inner | before
                self.live_out[s] = set(live)
                live = live | inner
            elif isinstance(s, If):
                live = self.find_live(s.body, set(live)) | self.find_live(s.orelse, set(live))
            elif isinstance(s, Assign) and isinstance(s.target, ast.Name):
                live = live - {s.target.id}
            for e in self.reads(s):
                live = live | names(e)
        return live

    def local_names(self, loop: For) -> Names:
        """The scalars that live within one iteration."""
        here = {n for s in self.under(loop) for e in self.reads(s) for n in names(e)} | self.written(loop)
        scalars = here & self.scalars()
        return (scalars & self.written(loop)) - self.exposed(loop.body, scalars) - self.live_out[loop] - {loop.var}

    def keys(self, loop: For, e: ast.Subscript) -> set[Key]:
        """The ways in which an element is tied to a loop: by its bare variable, or by quotient and remainder of it."""
        parts = [text(i) for i in index(e)]
        found: set[Key] = {(base(e), (f"{k}",)) for k, p in enumerate(parts) if p == loop.var}
        for q, r in self.halves(loop):
            if q in parts and r in parts:
                found.add((base(e), (f"{parts.index(q)}", f"{parts.index(r)}")))
        return found

    def halves(self, loop: For) -> list[tuple[str, str]]:
        """Pairs of locals that are quotient and remainder of a loop's variable by one divisor."""
        q, r = {}, {}
        for s in loop.body:
            if type(s) is Assign and isinstance(s.target, ast.Name) and isinstance(s.value, ast.BinOp):
                v = s.value
                if text(v.left) == loop.var and not names(v.right) & self.written(loop) - {loop.var}:
                    if sum(1 for x in flat(self.body) if s.target.id in assigned([x])) > len(self.parent[s]) + 1:
                        continue
                    if isinstance(v.op, ast.FloorDiv):
                        q[text(v.right)] = s.target.id
                    if isinstance(v.op, ast.Mod):
                        r[text(v.right)] = s.target.id
        return [(q[n], r[n]) for n in q if n in r]

    def owned(self, loop: For, root: str, within: For | None = None) -> bool:
        """Whether each iteration of a loop touches elements of an array that no other iteration touches."""
        inside = set(flat((within or loop).body))
        keys = [self.keys(loop, e) for s, e in self.accesses if s in inside and self.kernel.root(base(e)) == root]
        return bool(keys) and bool(set.intersection(*keys)) and loop.bounds[2] != 0

    def assigned_once(self, name: str) -> bool:
        """Whether no element of an array is assigned twice, or touched before it is assigned."""
        sites = [(s, e) for s, e in self.accesses if self.kernel.root(base(e)) == name]
        if name in self.task.fresh:
            sites = [(s, e) for s, e in sites if isinstance(s, Assign) and e is s.target]
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
        """Whether at most one of some statements runs in an iteration: they are in branches of one if."""
        a, b = sites[0], sites[1]
        top = self.block_of[a]
        for p in self.parent[a]:
            if isinstance(p, If) and len(sites) == 2 and self.block_of[b] is not top:
                return {id(self.block_of[a]), id(self.block_of[b])} == {id(p.body), id(p.orelse)}
        return False

    def refreshed(self, block: list[Stmt], root: str) -> bool:
        """Whether a block writes every element of an array that it reads before it reads it."""
        sites = [(s, e) for s, e in self.accesses if s in set(flat(block)) and self.kernel.root(base(e)) == root]
        s, _ = sites[0]
        if type(s) is not Assign or base(s.target) in names(s.value) or not isinstance(s.target, ast.Subscript):
            return False
        if self.kernel.root(base(s.target)) != root or any(isinstance(p, If) for p in self.between(block, s)):
            return False
        loops = [p for p in self.between(block, s) if isinstance(p, For)]
        moving = assigned(block) - {p.var for p in loops}
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
                    and text(rename(s.target, loop.var, p.var)) == text(e)
                ]
                if not twin:
                    return False
                want = rename(want, loop.var, twin[0].var)  # type: ignore[assignment]
            if text(want) != text(e):
                return False
        return True

    def between(self, block: list[Stmt], s: Stmt) -> list[Stmt]:
        """The statements around one, inside a block."""
        chain = [*self.parent[s], s]
        start = next(i for i, p in enumerate(chain) if self.block_of[p] is block)
        return chain[start:-1]

    # What adjoints read ----------------------------------------------------------------------------------------------

    def has_adjoint(self, s: Stmt) -> bool:
        """Whether the reverse of a statement does anything."""
        if isinstance(s, Assign):
            return self.kernel.root(base(s.target)) in self.active
        return any(self.has_adjoint(x) for x in [*getattr(s, "body", []), *getattr(s, "orelse", [])])

    def needs(self, s: Assign) -> Names:
        """The values before the statement that its adjoint reads."""
        if s not in self.known_needs:
            self.known_needs[s] = self.find_needs(s)
        return self.known_needs[s]

    def find_needs(self, s: Assign) -> Names:
        """Work `needs` out."""
        if not self.has_adjoint(s):
            return set()
        found: Names = set()
        if isinstance(s.target, ast.Subscript):
            found |= names(s.target.slice)
        if isinstance(s, LogSumExp):
            for e in s.loop.bounds[:2]:
                found |= names(e)
            found |= names(s.weight) - {base(s.target)}
            self.pull(s.term, found)
            return found - {s.loop.var}
        self.pull(s.value, found, whole=type(s) is Assign)
        return found

    def result(self, s: Assign) -> Names:
        """The names whose value after the statement its adjoint reads."""
        if not self.has_adjoint(s):
            return set()
        if isinstance(s, LogSumExp):
            return {base(s.target)} & names(s.weight)
        found = rule(self.kernel, s.value)
        if found and type(s) is Assign and self.is_active(s.value):
            from .rules import DERIVATIVE

            if "y" in DERIVATIVE[found[0]].split():
                return {base(s.target)}
        return set()

    def pull(self, e: ast.expr, found: Names, whole: bool = False) -> None:
        """Collect what the partial derivatives of an expression read."""
        if not self.is_active(e):
            return
        match e:
            case ast.Name():
                return
            case ast.Subscript():
                found |= names(e.slice)
                return
            case ast.UnaryOp(operand=x):
                return self.pull(x, found)
        if one := rule(self.kernel, e):
            from .rules import DERIVATIVE

            if "x" in DERIVATIVE[one[0]].replace("x)", "x ").replace("(", " ").split():
                found |= names(one[1])
            return self.pull(one[1], found)
        if isinstance(e, ast.BinOp):
            if isinstance(e.op, ast.Mult | ast.Div | ast.Pow):
                if self.is_active(e.left):
                    found |= names(e.right)
                if isinstance(e.op, ast.Pow) or self.is_active(e.right):
                    found |= names(e.left)
                if isinstance(e.op, ast.Div):
                    found |= names(e.right)
            self.pull(e.left, found)
            self.pull(e.right, found)
        elif isinstance(e, ast.Call):
            self.pull(e.args[0], found)

    def values(self, found: Names) -> Names:
        """Roots of names."""
        return {self.kernel.root(n) for n in found}

    # Decisions -------------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Take decisions back until all hold."""
        while True:
            self.recorded: dict[Stmt, str] = {}
            self.again: dict[Stmt, str] = {}
            self.fused: dict[For, str] = {}
            self.demand: dict[For, Names] = {}
            try:
                self.walk(self.body, set(), plain=False)
                self.kept: set[Stmt] = set()
                self.keep(self.body, set(), True, self.kept)
                break
            except _Retry:
                continue
        for loop in self.loops():
            if loop in self.fused or self.is_free(loop):
                self.ascending.add(loop)
            if loop in self.fused and loop.parallel:
                self.parallelize(loop)

    def temporaries(self, body: list[Stmt]) -> list[Stmt]:
        """The statements of a plain loop's body whose results its reverse could compute again."""
        if self.task.record_all:
            return []
        count: dict[str, int] = {}
        for s in flat(body):
            if isinstance(s, Assign):
                count[base(s.target)] = count.get(base(s.target), 0) + 1
        written = self.values(assigned(body)) - self.task.saved
        again: list[Stmt] = []
        fixed: Names = set()
        seen: Names = set()
        for s in body:
            parts = self.choice(s)
            if parts:
                name = base(parts[0].target)
                reads = set().union(*(names(e) for p in [s, *parts] for e in expressions(p)))
                local = name not in seen and name not in reads and count[name] == len(parts)
                if local and not (self.values(reads) & written - fixed) and s not in self.not_again:
                    again.append(s)
                    fixed.add(name)
            seen |= {n for x in flat([s]) for e in self.reads(x) for n in names(e)} | assigned([s])
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

    def walk(self, block: list[Stmt], need: Names, plain: bool) -> None:
        """Find what is to be recorded, walking forward with the values that adjoints of earlier statements read."""
        for s in block:
            if isinstance(s, LogSumExp | Assign):
                self.walk_assign(s, need)
            elif isinstance(s, If):
                self.walk_if(s, need, plain)
            elif isinstance(s, For):
                if s not in self.plain and (why := self.dependent(s, plain, need)):
                    self.plain[s] = why
                    if s in self.fused:
                        raise _Retry
                if s in self.plain:
                    self.walk_plain(s, need)
                else:
                    self.walk_fused(s, need)

    def walk_assign(self, s: Assign, need: Names) -> None:
        """Walk over an assignment."""
        name = self.kernel.root(base(s.target))
        mine = self.values(self.needs(s))  # a new set
        if name in self.task.saved:
            need |= mine | self.values(self.result(s))
            return
        if s in self.again:
            mine |= self.values(names(s.value))
        elif self.task.record_all or name in need | mine:
            own = name in mine and name not in need
            who = "its own adjoint" if own else "the adjoint of an earlier line"
            self.recorded[s] = f"{name} is overwritten and {who} reads the old value"
            if isinstance(s.target, ast.Subscript):
                mine |= self.values(names(s.target.slice))
        need |= mine
        if isinstance(s.target, ast.Name) and type(s) is not Accum:
            need.discard(name)
        need |= self.values(self.result(s))

    def walk_if(self, s: If, need: Names, plain: bool) -> None:
        """Walk over a branch."""
        if s in self.again:
            for inner in self.choice(s):
                need |= self.values(self.needs(inner) | names(inner.value))
            need |= self.values(names(s.test))
            need.discard(base(self.choice(s)[0].target))
            for inner in self.choice(s):
                need |= self.values(self.result(inner))
            return
        writes = self.values(assigned([*s.body, *s.orelse])) - self.task.saved
        other = set(need)
        self.walk(s.body, need, plain)
        self.walk(s.orelse, other, plain)
        need |= other
        if not self.has_adjoint(s) and not any(x in self.recorded for x in flat([*s.body, *s.orelse])):
            return
        if self.task.record_all or self.values(names(s.test)) & writes:
            self.recorded[s] = "the branch writes what its condition reads"
        else:
            need |= self.values(names(s.test))

    def walk_plain(self, loop: For, need: Names) -> None:
        """Walk twice over a loop whose reverse follows its forward: an iteration may need what the next overwrites."""
        for _ in range(2):
            for s in self.temporaries(loop.body):
                name = base(self.choice(s)[0].target)
                if name in need and s not in self.again:
                    self.not_again[s] = "an earlier adjoint reads the value it overwrites"
                    raise _Retry
                self.again[s] = "its inputs are still there in the reverse loop"
            again = {base(self.choice(s)[0].target) for s in loop.body if s in self.again}
            if clash := need & again:
                for s in loop.body:
                    if s in self.again and base(self.choice(s)[0].target) in clash:
                        self.not_again[s] = "an earlier adjoint reads the value it overwrites"
                raise _Retry
            self.walk(loop.body, need, True)
            need -= again | {loop.var}
        for e in loop.bounds[:2]:
            need |= self.values(names(e))

    def dependent(self, loop: For, plain: bool, need: Names) -> str:
        """Say why a loop's iterations are not independent, or why it cannot be fused here; empty where it can."""
        if self.task.record_all:
            return "everything is recorded"
        root = self.kernel.root
        inside = set(self.under(loop))
        for name in sorted(self.written(loop)):
            if name in self.locals[loop] or name in {s.var for s in inside if isinstance(s, For)}:
                continue
            if root(name) in self.task.saved and not any(
                isinstance(s, Assign) and self.has_adjoint(s) and root(name) in sources(self.kernel, s) for s in inside
            ):
                continue
            writes = [s for s in inside if isinstance(s, Assign) and base(s.target) == name]
            only_summed = all(type(s) is Accum for s in writes) and not any(
                root(n) == root(name) for s in inside for e in expressions(s) for n in names(e)
            )
            if only_summed:
                continue
            if name not in self.kernel.arrays and name not in self.kernel.views:
                return f"'{name}' is carried from one iteration to the next"
            if self.owned(loop, root(name)):
                continue
            outside = any(root(base(e)) == root(name) and s not in inside for s, e in self.accesses)
            if outside or root(name) in self.task.outs or not self.refreshed(loop.body, root(name)):
                return f"'{name}' is carried from one iteration to the next"
            if loop.parallel:
                self.refuse(loop.line, f"every iteration writes the same elements of '{name}'", "give each its own")
        if clash := self.values(self.written(loop)) & need - self.task.saved:
            return f"it overwrites '{min(clash)}', which an earlier adjoint reads"
        return ""

    def walk_fused(self, loop: For, need: Names) -> None:
        """Walk over a loop that does both in one iteration."""
        self.fused[loop] = "its iterations are independent"
        inner: Names = set()
        self.walk(loop.body, inner, plain=False)
        replay: set[Stmt] = set()
        demand = self.values(self.keep(loop.body, set(), True, replay)) - {loop.var}
        written = self.values({base(s.target) for s in replay if isinstance(s, Assign)}) - self.task.saved
        for name in sorted(demand & written & self.kernel.arrays.keys()):
            if self.refreshed(loop.body, name):
                demand.discard(name)
        self.demand[loop] = demand
        if (demand & written) and any(isinstance(p, For) and p not in self.fused for p in self.parent[loop]):
            self.take_back(loop, f"it reads '{min(demand & written)}', which it overwrites, inside a loop that is not")
        need |= demand
        for e in loop.bounds[:2]:
            need |= self.values(names(e))

    def take_back(self, loop: For, why: str) -> None:
        """Give up fusing a loop, and start again."""
        self.plain[loop] = why
        raise _Retry

    def keep(self, block: list[Stmt], live: Names, push: bool, kept: set[Stmt]) -> Names:
        """Find the statements of the forward sweep whose results are read, walking backwards; return what is live.

        Parameters
        ----------
        live : names read after the block.
        push : whether the reverse of this block runs from this sweep, so that it records, and its reads count.
        """
        for s in reversed(block):
            if isinstance(s, Assign):
                live = self.keep_assign(s, live, push, kept)
            elif isinstance(s, If):
                a = self.keep(s.body, set(live), push, kept)
                b = self.keep(s.orelse, set(live), push, kept)
                live = a | b
                inside = [x for x in flat([*s.body, *s.orelse]) if x in kept]
                if inside or (push and (s in self.recorded or self.has_adjoint(s))):
                    live |= self.values(names(s.test))
                if inside or (push and s in self.recorded):
                    kept.add(s)
            elif isinstance(s, For):
                live = self.keep_loop(s, live, push, kept)
            elif isinstance(s, View):
                live |= set().union(*map(names, s.shape))
        return live

    def keep_assign(self, s: Assign, live: Names, push: bool, kept: set[Stmt]) -> Names:
        """Decide on an assignment of the sweep."""
        name = self.kernel.root(base(s.target))
        live = set(live)
        if push:
            live |= self.values(self.result(s))
        if name in self.task.saved:
            if self.restores(s, live):
                kept.add(s)
                live.discard(base(s.value))
                live |= self.values(names(s.target.slice))  # type: ignore[attr-defined]
        elif name in live and s in self.stored and s not in self.recorded:
            kept.add(self.stored[s])
            live.discard(name)
            live |= self.values(names(self.stored[s].target.slice))  # type: ignore[attr-defined]
        else:
            record = push and s in self.recorded
            if name in live or record:
                kept.add(s)
                if isinstance(s.target, ast.Name) and type(s) is not Accum:
                    live.discard(name)
                live |= self.values(set().union(*(names(e) for e in self.reads(s))))
                if record:
                    live |= {name} | self.values(names(s.target) - {base(s.target)})
        if push:
            live |= self.values(self.needs(s))
        return live

    def restores(self, s: Assign, live: Names) -> bool:
        """Whether a saved output gives back a scalar that was stored in it."""
        return type(s) is Assign and isinstance(s.value, ast.Name) and s.value.id in live

    def keep_loop(self, loop: For, live: Names, push: bool, kept: set[Stmt]) -> Names:
        """Decide on a loop of the sweep."""
        after = set(live)
        own = push and loop not in self.fused
        end = set(after)
        if own:
            for s in loop.body:
                if s in self.again:
                    for x in flat([s]):
                        for e in expressions(x):
                            end |= self.values(names(e))
        while True:
            before = self.keep(loop.body, set(end), own, kept) - {loop.var}
            if before <= end:
                break
            end |= before
        inside = any(s in kept for s in self.under(loop))
        live = after | end
        if push and loop in self.fused:
            written = self.values({base(s.target) for s in self.under(loop) if s in kept and isinstance(s, Assign)})
            if inside and self.demand.get(loop, set()) & written - self.task.saved:
                self.take_back(loop, "a later line reads what it overwrites in place")
            live |= self.demand.get(loop, set())
        if inside or (push and (self.has_adjoint(loop) or any(s in self.recorded for s in self.under(loop)))):
            for e in loop.bounds[:2]:
                live |= self.values(names(e))
        if inside:
            kept.add(loop)
        return live

    def is_free(self, loop: For) -> bool:
        """Whether the reverse of a plain loop may run upwards: nothing is recorded, and no adjoint is carried."""
        inside = list(self.under(loop))
        if self.task.record_all or any(s in self.recorded for s in inside):
            return False
        reads, adds = set(), set()
        for s in inside:
            if isinstance(s, Assign) and self.has_adjoint(s):
                name = self.kernel.root(base(s.target))
                if name in self.locals[loop]:
                    continue
                reads.add(name)
                if type(s) is not Accum and not self.unconsumed(name):
                    adds.add(name)
        for s in inside:
            if isinstance(s, Assign) and self.has_adjoint(s):
                adds |= (sources(self.kernel, s) & self.active) - self.locals[loop]
        return all(n in self.kernel.arrays and self.owned(loop, n) for n in reads & adds)

    def unconsumed(self, name: str) -> bool:
        """Whether the given adjoint of an output is only read."""
        if name not in self.task.outs or name in self.overwritten:
            return False
        return not any(
            name in sources(self.kernel, s) and self.has_adjoint(s) for s in flat(self.body) if isinstance(s, Assign)
        )

    def writes(self, loop: For) -> tuple[Names, Names]:
        """The adjoints outside a fused loop's iterations that it only adds to, and those that it writes otherwise."""
        adds, others = set(), set()
        for s in self.under(loop):
            if isinstance(s, Assign) and self.has_adjoint(s):
                name = self.kernel.root(base(s.target))
                if name not in self.locals[loop] and not self.unconsumed(name) and type(s) is not Accum:
                    others.add(name)
                elif name not in self.locals[loop] and not self.unconsumed(name):
                    others.add(name + "?")  # is read
                adds |= (sources(self.kernel, s) & self.active) - self.locals[loop]
        read = {n[:-1] for n in others if n.endswith("?")}
        others = {n for n in others if not n.endswith("?")}
        both = adds & (read | others)
        return adds - both - others, others | both

    def parallelize(self, loop: For) -> None:
        """Find how a fused parallel loop runs without a race."""
        adds, others = self.writes(loop)
        if any(not (n in self.kernel.arrays and self.owned(loop, n)) for n in others):
            self.serial(loop, "an adjoint is written by several iterations")
            return
        shared = sorted(n for n in adds if not (n in self.kernel.arrays and self.owned(loop, n)))
        if not shared:
            return
        rest = [s for s in loop.body if isinstance(s, For)]
        simple = [s for s in loop.body if isinstance(s, Assign) and isinstance(s.target, ast.Name)]
        if len(rest) == 1 and len(simple) + 1 == len(loop.body) and not any(map(self.has_adjoint, simple)):
            inner = rest[0]
            wanted = self.values(assigned(inner.body)) & self.kernel.arrays.keys() | adds | others
            private = self.locals[inner] | self.locals[loop]
            fixed = not any(names(e) & (self.written(loop) | {loop.var}) for e in inner.bounds[:2])
            if inner in self.fused and fixed and inner.bounds[2] == loop.bounds[2] == 1:
                if all(n in self.kernel.arrays and self.owned(inner, n, loop) for n in wanted - private):
                    self.split[loop] = inner
                    return
        if any(base(e) != self.kernel.root(base(e)) for s, e in self.accesses if self.kernel.root(base(e)) in shared):
            self.serial(loop, "an adjoint that several iterations add to is seen through a view")
            return
        if loop.bounds[2] != 1:
            self.serial(loop, "several iterations add to one adjoint, and the step is not 1")
            return
        self.partial[loop] = shared

    def serial(self, loop: For, why: str) -> None:
        """Run a fused loop on one thread."""
        self.fused[loop] = f"its iterations are independent; on one thread, because {why}"
        self.one_thread = {*getattr(self, "one_thread", set()), loop}
