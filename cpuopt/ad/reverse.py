"""From a kernel and its plan to the lines of its backward: the forward sweep, then every statement in reverse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from .kernel import (
    Accum,
    Assign,
    For,
    If,
    LogSumExp,
    Stmt,
    UnsupportedError,
    View,
    assigned,
    base,
    elements,
    flat,
    index,
    parse,
    reads,
    text,
)
from .lines import CHUNKS, Interface, Line, every_line, nest
from .naming import Naming
from .plan import Plan
from .pullback import Pullback
from .rules import negative
from .zeros import Zeros


class Reverse:
    """Writes the backward of one plan."""

    def __init__(self, plan: Plan, interface: Interface) -> None:
        self.plan, self.kernel, self.task, self.face = plan, plan.kernel, plan.task, interface
        self.naming = Naming(plan, interface)
        self.pullback = Pullback(plan, self.naming, interface)
        self.zeros = Zeros(plan, self.pullback, self.naming, interface)
        self.tapes = ["tape"]

    def write(self) -> list[Line]:
        """Write the body of the backward."""
        forward = self.forward(self.kernel.body, self.plan.kept, push=True)
        backward = self.backward(self.kernel.body)
        pushes = any(line.mentions("tape") for line in [*forward, *backward])
        start: list[Line] = []
        for name in sorted({base(s.target) for s in self.plan.recorded if isinstance(s, Assign)}):
            if name not in self.kernel.arrays and name not in self.kernel.views:
                start.append(Line(f"{name} = {'0' if name in self.kernel.ints else 'ZERO'}"))
        if pushes:
            start += [Line("tape, tape_top = np.empty(1024), 0")]
        scalars = self.initial(None)
        backward = self.initialize(scalars, backward)
        views = [line for line in forward if line.role == "view"]
        used = [*[line for line in forward if line.role != "view"], *backward]
        for view in reversed(views):
            if not any(line.mentions(view.text.split(" = ")[0]) for line in used):
                forward.remove(view)
            else:
                used.append(view)
        body = [*self.copies(), *self.zeros.at_start(), *start, *forward, *backward]
        self.check_available(body)
        return [*self.allocations(), *body]

    def check_available(self, body: list[Line]) -> None:
        """Find hidden outputs that are read: they become working memory; a hidden input that is read is refused."""
        for name in sorted(self.task.hidden):
            uses = [line for line in every_line(body) if re.search(rf"\b{name}\b(?!\.shape)", line.text)]
            if not uses:
                continue
            if name not in assigned(self.kernel.body) and not any(
                v.base == name and v.name in assigned(self.kernel.body) for v in self.kernel.views.values()
            ):
                line = next((u.source for u in uses if u.source), 0)
                raise UnsupportedError(
                    f"{self.kernel.file}:{line}: '{self.kernel.source.get(line, '').strip()}': its adjoint reads "
                    f"'{name}', which the declared backward is not given; add it to the declaration of the backward"
                )
            self.zeros.work[name] = name

    def allocations(self) -> list[Line]:
        """Make or shape the working memory."""
        lines = []
        for name, like in self.zeros.work.items():
            axes = self.kernel.arrays[like]
            if axes == 1 and not self.face.own_memory:
                self.face.scratch[name] = (1, like)
                continue
            source = like if like in self.face.params else self.naming.shaped(like)
            if self.face.own_memory:
                lines.append(Line(f"{name} = np.zeros({source}.shape, {source}.dtype)"))
            else:
                self.face.scratch[f"{name}_memory"] = (1, like)
                lines.append(Line(f"{name} = {name}_memory[:{source}.size].reshape({source}.shape)"))
        return lines

    def copies(self) -> list[Line]:
        """Copy the given adjoints that the reverse consumes."""
        lines = []
        for name in self.naming.copied:
            d = self.naming.adjoint(name)
            self.zeros.work[d] = name
            lines += nest(d, self.kernel.arrays[name], f"{d}[{{i}}] = {d.removesuffix('_copy')}[{{i}}]", parallel=True)
        return lines

    # The forward sweep -----------------------------------------------------------------------------------------------

    def forward(self, block: Iterable[Stmt], kept: set[Stmt], push: bool) -> list[Line]:
        """Write the forward sweep of a block: what is kept of it, with records where the reverse needs them."""
        lines: list[Line] = []
        for s in block:
            if isinstance(s, View):
                shape = ", ".join(map(self.naming.show, s.shape))
                lines.append(Line(f"{s.name} = {s.base}.reshape({shape})", s.line, "view"))
                if s.base in self.plan.activity.active:
                    d = self.naming.adjoint(s.base)
                    self.naming.adjoints[s.name] = self.naming.fresh(f"d{s.name}")
                    lines.append(Line(f"{self.naming.adjoints[s.name]} = {d}.reshape({shape})", s.line, "view"))
            elif s in kept:
                lines += self.forward_one(s, kept, push)
        return lines

    def forward_one(self, s: Stmt, kept: set[Stmt], push: bool) -> list[Line]:
        """Write one statement of the forward sweep."""
        record = push and s in self.plan.recorded
        if isinstance(s, If):
            body = self.forward(s.body, kept, push) or [Line("pass")]
            orelse = self.forward(s.orelse, kept, push)
            head: list[Line] = []
            test = self.naming.show(s.test)
            if record:
                name = self.naming.fresh("taken")
                head, test = [Line(f"{name} = {test}", s.line, "primal")], name
            lines = [*head, Line(f"if {test}:", s.line, "primal", body)]
            lines += [Line("else:", s.line, "primal", orelse)] if orelse else []
            return lines + (self.push(f"ONE if {test} else ZERO", s.line) if record else [])
        if isinstance(s, For):
            inner = push and s not in self.plan.fused
            lo, hi, step = s.bounds
            word = "prange" if s.parallel and self.may_run_parallel(s) else "range"
            loop = f"for {s.var} in {word}({self.naming.range(lo, hi, step)}):"
            return [Line(loop, s.line, "primal", self.forward(s.body, kept, inner) or [Line("pass")])]
        assert isinstance(s, Assign)
        if self.kernel.root(base(s.target)) in self.task.saved:
            return [Line(f"{self.naming.show(s.value)} = {self.naming.show(s.target)}", s.line, "primal")]
        op = "+=" if type(s) is Accum else "="
        line = Line(f"{self.naming.show(s.target)} {op} {self.naming.show(s.value)}", s.line, "primal")
        if type(s) is Accum and isinstance(s.value, ast.UnaryOp) and isinstance(s.value.op, ast.USub):
            line.text = f"{self.naming.show(s.target)} -= {self.naming.show(s.value.operand)}"
        return [*(self.push(self.naming.show(s.target), s.line) if record else []), line]

    def may_run_parallel(self, loop: For) -> bool:
        """Whether a repeated loop may be parallel: no sum runs through its iterations."""
        if loop not in self.plan.fused or any(p.parallel for p in self.plan.facts.parent[loop] if isinstance(p, For)):
            return False
        return all(
            n in self.plan.facts.locals[loop] or (self.kernel.root(n) in self.kernel.arrays)
            for n in assigned(loop.body) - {x.var for x in flat(loop.body) if isinstance(x, For)}
        )

    # Records ---------------------------------------------------------------------------------------------------------

    def push(self, value: str, line: int) -> list[Line]:
        """Write a record."""
        t = self.tapes[-1]
        return [
            Line(f"if {t}_top == {t}.size:", line, "record", [Line(f"{t} = np.concatenate(({t}, {t}))")]),
            Line(f"{t}[{t}_top] = {value}", line, "record"),
            Line(f"{t}_top += 1", line, "record"),
        ]

    def pop(self, target: str, line: int, integer: bool = False) -> list[Line]:
        """Write the reading of a record."""
        t = self.tapes[-1]
        value = f"int({t}[{t}_top])" if integer else f"{t}[{t}_top]"
        return [Line(f"{t}_top -= 1", line, "record"), Line(f"{target} = {value}", line, "record")]

    # The reverse -----------------------------------------------------------------------------------------------------

    def backward(self, block: Sequence[Stmt]) -> list[Line]:
        """Write the reverse of a block."""
        lines: list[Line] = []
        for s in reversed(block):
            if isinstance(s, If):
                lines += self.backward_if(s)
            elif isinstance(s, For):
                lines += self.backward_for(s)
            elif isinstance(s, Assign):
                lines += self.backward_assign(s)
        return lines

    def backward_if(self, s: If) -> list[Line]:
        """Write the reverse of a branch."""
        test, lines = self.naming.show(s.test), list[Line]()
        body, orelse = self.backward(s.body), self.backward(s.orelse)
        if s in self.plan.recorded:
            name = self.naming.fresh("took")
            lines += self.pop(name, s.line)
            test = f"{name} != ZERO"
        if body:
            lines.append(Line(f"if {test}:", s.line, "adjoint", body))
            lines += [Line("else:", s.line, "adjoint", orelse)] if orelse else []
        elif orelse:
            lines.append(Line(f"if not ({test}):", s.line, "adjoint", orelse))
        return lines

    def backward_assign(self, s: Assign) -> list[Line]:
        """Write the reverse of an assignment, and the reading of its record on the right side of it."""
        pop: list[Line] = []
        if s in self.plan.recorded:
            pop = self.pop(self.naming.show(s.target), s.line, base(s.target) in self.kernel.ints)
        if not self.plan.activity.has_adjoint(s):
            return pop
        lines = self.pullback.log_sum_exp(s) if isinstance(s, LogSumExp) else self.pullback.assignment(s)
        return [*lines, *pop] if self.plan.activity.result(s) else [*pop, *lines]

    def backward_for(self, s: For) -> list[Line]:
        """Write the reverse of a loop."""
        plan = self.plan
        if not plan.activity.has_adjoint(s) and not any(x in plan.recorded for x in flat(s.body)):
            return []
        if s in plan.fused and s.parallel and s not in plan.serial:
            return self.parallel(s)
        if s in plan.fused:
            body = self.iteration(s)
        else:
            again = [x for x in s.body if x in plan.recomputed]
            kept = set(flat(again))
            body = self.initialize(self.initial(s), self.backward(s.body))
            body = [*self.forward(again, kept, push=False), *body]
        if not body:
            return []
        return [Line(f"for {s.var} in {self.order(s)}:", s.line, "adjoint", body)]

    def iteration(self, s: For) -> list[Line]:
        """One iteration of a fused loop: the forward again, then its reverse."""
        kept: set[Stmt] = set()
        self.plan.sweep(s.body, set(), True, kept)
        forward = self.forward(s.body, kept, push=True)
        return [*forward, *self.initialize(self.initial(s), self.backward(s.body))]

    def order(self, s: For) -> str:
        """The range of a loop, upwards or downwards."""
        lo, hi, step = s.bounds
        if s in self.plan.ascending:
            return f"range({self.naming.range(lo, hi, step)})"
        a, b = self.naming.show(lo), self.naming.show(hi)
        last = f"({b}) - 1" if step == 1 else f"({a}) + (len(range({a}, {b}, {step})) - 1) * {step}"
        return f"range({text(parse(last))}, {text(parse(f'({a}) - {step}'))}, {-step})"

    def initial(self, home: For | None) -> list[str]:
        """The locals whose adjoints start from zero in a loop, or in the kernel."""
        return sorted(
            name
            for name, where in self.pullback.homes.items()
            if name in self.plan.activity.active and name not in self.kernel.arrays and home in where.values()
        )

    def initialize(self, scalars: list[str], lines: list[Line]) -> list[Line]:
        """Start adjoints from zero, or from what is added first."""
        start = []
        for name in scalars:
            d = self.naming.adjoint(name)
            first = next((line for line in lines if line.mentions(d)), None)
            if first is None:
                continue
            rest = first.text.removeprefix(f"{d} ")
            if first.body is None and rest[:2] in ("+=", "-=") and not re.search(rf"\b{d}\b", rest):
                first.text = f"{d} = {rest[3:]}" if rest[0] == "+" else f"{d} = {text(negative(parse(rest[3:])))}"
            else:
                start.append(Line(f"{d} = ZERO"))
        return [*start, *lines]

    # Parallel loops --------------------------------------------------------------------------------------------------

    def parallel(self, s: For) -> list[Line]:
        """Write a parallel loop: free of races, by chunks where iterations add to one adjoint or record."""
        if inner := self.plan.split.get(s):
            return self.by_chunks_of(s, inner)
        tape, parts = f"tape{len(self.tapes) + 1}", self.plan.partial.get(s, [])
        whole = {name: self.naming.adjoint(name) for name in parts}
        outer = set(self.naming.parts)
        for name, d in whole.items():
            if name in self.kernel.arrays:
                self.naming.parts.add(d)
            else:
                self.naming.adjoints[name] = self.naming.fresh(f"{d}_part")
        self.tapes.append(tape)
        body = self.zeros.in_loop(s, s) + self.iteration(s)
        self.tapes.pop()
        own = {name: self.naming.adjoint(name) for name in parts}
        self.naming.adjoints |= whole
        self.naming.parts = outer
        return self.in_chunks(s, body, own, tape) if body or own else []

    def in_chunks(self, s: For, body: list[Line], own: dict[str, str], tape: str) -> list[Line]:
        """Write the chunks around the iterations of a parallel loop, where it needs them.

        Parameters
        ----------
        own : the adjoints of which each chunk has a part, with the name that a part has within it.
        tape : of each chunk.
        """
        lo, hi, step = s.bounds
        records = any(line.mentions(tape) for line in body)
        vectorized = step == 1 and not any(line.text.startswith("for ") for line in every_line(body))
        if not own and not records and not vectorized:  # the ends of what is vectorized must not move
            return [Line(f"for {s.var} in prange({self.naming.range(lo, hi, step)}):", s.line, "adjoint", body)]
        if step != 1:
            raise UnsupportedError(f"{self.kernel.file}:{s.line}: a parallel loop that records has step {step}; use 1")
        before, start, end, after = list[Line](), list[Line](), list[Line](), list[Line]()
        if records:
            start.append(Line(f"{tape}, {tape}_top = np.empty(1024), 0"))
        for name, part in own.items():
            d = self.naming.adjoint(name)
            if name in self.kernel.arrays:
                before.append(self.allocate_parts(name))
                start += nest(d, self.kernel.arrays[name], f"{d}_parts[chunk, {{i}}] = ZERO")
                after += self.gather(name)
            else:
                before.append(Line(f"{d}_parts = np.zeros(CHUNKS)"))
                start.append(Line(f"{part} = ZERO"))
                end.append(Line(f"{d}_parts[chunk] = {part}"))
                after.append(Line("for chunk in range(CHUNKS):", body=[Line(f"{d} += {d}_parts[chunk]")]))
        ends = [text(e) for e in self.chunk_bounds(lo, hi)]
        unsigned = self.only_indexes(s) and all(map(self.plan.facts.nonnegative, (lo, hi)))
        if vectorized and unsigned:  # an unsigned index needs no test for negative ones
            ends = [f"np.uint64({e})" for e in ends]
        loop = Line(f"for {s.var} in range({', '.join(ends)}):", s.line, "adjoint", body)
        return [*before, Line("for chunk in prange(CHUNKS):", s.line, "adjoint", [*start, loop, *end]), *after]

    def allocate_parts(self, name: str) -> Line:
        """Give each chunk an array for its part of an adjoint."""
        d = self.naming.adjoint(name)
        shape = ", ".join(["CHUNKS", *(f"{d}.shape[{k}]" for k in range(self.kernel.arrays[name]))])
        if self.face.own_memory:
            return Line(f"{d}_parts = np.empty(({shape}), {d}.dtype)")
        self.face.scratch[f"{d}_memory"] = (CHUNKS, name)
        return Line(f"{d}_parts = {d}_memory[:CHUNKS * {d}.size].reshape({shape})")

    def chunk_bounds(self, lo: ast.expr, hi: ast.expr) -> tuple[ast.expr, ast.expr]:
        """The range of a chunk of a loop."""
        a, b = self.naming.show(lo), self.naming.show(hi)
        if a == "0":
            return parse(f"({b}) * chunk // CHUNKS"), parse(f"({b}) * (chunk + 1) // CHUNKS")
        start, size = f"({a}) + ", f"(({b}) - ({a}))"
        return parse(f"{start}{size} * chunk // CHUNKS"), parse(f"{start}{size} * (chunk + 1) // CHUNKS")

    def only_indexes(self, s: For) -> bool:
        """Whether a loop's variable is used as a bare index and in no other way."""
        uses = [n for x in flat(s.body) for e in reads(x) for n in ast.walk(e) if isinstance(n, ast.Name)]
        bare = {id(i) for x in flat(s.body) for e in reads(x) for y in elements(e) for i in index(y)}
        targets = [x.target for x in flat(s.body) if isinstance(x, Assign) and isinstance(x.target, ast.Subscript)]
        bare |= {id(i) for y in targets for i in index(y)}
        return all(id(n) in bare for n in uses if n.id == s.var)

    def gather(self, name: str) -> list[Line]:
        """Sum the chunks' parts in their order."""
        d = self.naming.adjoint(name)
        flag = self.face.flag(d) if self.zeros.only_loop(name) else None

        def inner(i: str) -> list[Line]:
            new = f"{d}[{i}] = {d}[{i}] + part if {flag} else part" if flag else f"{d}[{i}] += part"
            return [
                Line("part = ZERO"),
                Line("for chunk in range(CHUNKS):", body=[Line(f"part += {d}_parts[chunk, {i}]")]),
                Line(new),
            ]

        return nest(d, self.kernel.arrays[name], inner, parallel=True)

    def by_chunks_of(self, s: For, inner: For) -> list[Line]:
        """Write a parallel nest so that each chunk has a part of an inner loop's range, and all of the outer one."""
        start, end = self.chunk_bounds(*inner.bounds[:2])
        part = For(inner.line, inner.var, (start, end, 1), inner.body)
        kept: set[Stmt] = set()
        self.plan.sweep(s.body, set(), True, kept)
        forward = self.forward([x for x in s.body if x is not inner], kept, push=False)
        head = f"for {inner.var} in range({self.naming.range(*part.bounds)}):"
        nested = Line(head, inner.line, "adjoint", self.iteration(inner))
        head = f"for {s.var} in range({self.naming.range(*s.bounds)}):"
        outer = Line(head, s.line, "adjoint", [*forward, nested])
        zero = self.zeros.in_loop(s, inner, part)
        return [Line("for chunk in prange(CHUNKS):", s.line, "adjoint", [*zero, outer])]
