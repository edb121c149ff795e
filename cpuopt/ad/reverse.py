"""From a kernel and its plan to the lines of its backward, each with the forward line that it stands for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .normal import rule
from .plan import Plan
from .rules import DERIVATIVE
from .subset import (
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
    names,
    parse,
    text,
)

CHUNKS = 32
"""Parts of a parallel loop that sum by themselves: fixed, so that the number of threads changes no bit."""


@dataclass
class Line:
    """A line of the backward.

    Attributes
    ----------
    source : the line of the forward that it inverts or repeats; 0 for none.
    role : ``repeat``, ``invert``, ``record``, or ``frame`` for what holds the others together.
    """

    text: str
    source: int = 0
    role: str = "frame"
    body: list[Line] | None = None

    def mentions(self, name: str) -> bool:
        """Whether a name occurs in it or below it."""
        return bool(re.search(rf"\b{name}\b", self.text)) or any(line.mentions(name) for line in self.body or [])


@dataclass
class Interface:
    """The arguments of the backward.

    Attributes
    ----------
    params : in call order; the flag of a gradient is its name and ``_add``.
    given : forward parameters among them, as before the call or (saved outputs) after it.
    sizes : for arrays, the size of each axis as text that two arrays share where they must agree.
    optional : gradients that may be absent, of length zero.
    own_memory : whether the backward allocates what it needs; else it is passed, and named in `scratch`.
    scratch : name, factor and array: working memory of so many times the array's size.
    """

    params: list[str]
    sizes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    own_memory: bool = True
    scratch: dict[str, tuple[int, str]] = field(default_factory=dict)

    def flag(self, name: str) -> str | None:
        """The flag that tells whether a gradient is added to."""
        return f"{name}_add" if f"{name}_add" in self.params else None


class Reverse:
    """Writes the backward of one plan."""

    def __init__(self, plan: Plan, interface: Interface) -> None:
        self.plan, self.kernel, self.task, self.face = plan, plan.kernel, plan.task, interface
        self.taken = {*self.kernel.params, *self.kernel.views, *assigned(self.kernel.body), *self.kernel.names}
        self.adjoints: dict[str, str] = {}
        self.copied = [n for n in self.task.outs if n in plan.active and not plan.unconsumed(n)]
        for name in self.kernel.arrays:
            if name in plan.active:
                if f"d{name}" in self.taken:
                    raise UnsupportedError(
                        f"{self.kernel.file}: the kernel uses the name 'd{name}', which its backward needs for the "
                        f"adjoint of '{name}'; give it another name"
                    )
                self.adjoints[name] = f"d{name}_copy" if name in self.copied else f"d{name}"
        self.taken |= set(self.adjoints.values()) | set(interface.params)
        self.depth = 0
        self.tapes = ["tape"]
        self.parts: dict[str, str] = {}
        self.splits: dict[For, For] = {}
        self.homes = self.find_homes()
        self.work: dict[str, str] = {}
        self.zeroed: set[str] = set()
        self.once = {name for name in self.task.wrt if self.written_once(name)}

    # Names -----------------------------------------------------------------------------------------------------------

    def adjoint(self, name: str) -> str:
        """The name of a value's adjoint."""
        if name not in self.adjoints:
            new = f"d{name}"
            while new in self.taken:
                new += "_"
            self.taken.add(new)
            self.adjoints[name] = new
        return self.adjoints[name]

    def fresh(self, name: str) -> str:
        """A name that is not taken."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def show(self, e: ast.expr) -> str:
        """An expression of the forward as text of the backward."""
        outer = self

        class Available(ast.NodeTransformer):
            def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
                if node.attr == "shape" and isinstance(node.value, ast.Name):
                    return ast.Attribute(ast.Name(outer.shaped(node.value.id), ast.Load()), "shape", ast.Load())
                return node

        plain = text(e)
        return text(Available().visit(parse(plain))) if ".shape" in plain else plain

    def shaped(self, name: str) -> str:
        """An argument of the backward that has a forward array's shape."""
        if name in self.face.params or name in self.kernel.views:
            return name
        if f"d{name}" in self.face.params:
            return f"d{name}"
        for other, sizes in self.face.sizes.items():
            if sizes == self.face.sizes.get(name) and (other in self.face.params or f"d{other}" in self.face.params):
                return other if other in self.face.params else f"d{other}"
        raise UnsupportedError(
            f"{self.kernel.file}: the backward is given neither '{name}' nor 'd{name}', whose shape it needs; "
            "read the size from another array"
        )

    def target(self, e: ast.expr, new: str) -> str:
        """The adjoint of a name or of an element."""
        if isinstance(e, ast.Name):
            return new
        assert isinstance(e, ast.Subscript)
        first = "" if new not in self.parts else f"{self.parts[new]}, "
        return f"{self.parted(new)}[{first}{', '.join(self.show(i) for i in index(e))}]"

    def parted(self, new: str) -> str:
        """The name under which chunks hold their parts of an adjoint."""
        return f"{new}_parts" if new in self.parts else new

    def of(self, e: ast.expr) -> str:
        """The adjoint of an expression that is a name or an element."""
        return self.target(e, self.adjoint(base(e)))

    def find_homes(self) -> dict[str, dict[Stmt, For | None]]:
        """For each local and each statement that mentions it, the innermost loop that it does not outlive."""
        homes: dict[str, dict[Stmt, For | None]] = {}
        for s in flat(self.kernel.body):
            mentioned = {n for e in self.plan.reads(s) for n in names(e)} | (
                {base(s.target)} if isinstance(s, Assign) else set()
            )
            if isinstance(s, LogSumExp):
                mentioned |= names(s.term)
            loops = [p for p in self.plan.parent[s] if isinstance(p, For)]
            for name in mentioned:
                inner = [p for p in loops if name in self.plan.locals[p]]
                homes.setdefault(name, {})[s] = inner[-1] if inner else None
        return homes

    # The whole -------------------------------------------------------------------------------------------------------

    def write(self) -> list[Line]:
        """Write the body of the backward."""
        forward = self.forward(self.kernel.body, self.plan.kept, push=True)
        backward = self.backward(self.kernel.body, None)
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
        body = [*self.copies(), *self.late_zeros(), *start, *forward, *backward]
        self.check_available(body)
        return [*self.allocations(), *body]

    def check_available(self, body: list[Line]) -> None:
        """Find hidden outputs that are read: they become working memory; a hidden input that is read is refused."""
        for name in sorted(self.task.hidden):
            uses = [line for line in _lines(body) if re.search(rf"\b{name}\b(?!\.shape)", line.text)]
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
            self.work[name] = name

    def allocations(self) -> list[Line]:
        """Make or shape the working memory."""
        lines = []
        for name, like in self.work.items():
            axes = self.kernel.arrays[like]
            if axes == 1 and not self.face.own_memory:
                self.face.scratch[name] = (1, like)
                continue
            source = like if like in self.face.params else self.shaped(like)
            if self.face.own_memory:
                lines.append(Line(f"{name} = np.zeros({source}.shape, {source}.dtype)"))
            else:
                self.face.scratch[f"{name}_memory"] = (1, like)
                lines.append(Line(f"{name} = {name}_memory[:{source}.size].reshape({source}.shape)"))
        return lines

    def copies(self) -> list[Line]:
        """Copy the given adjoints that the reverse consumes."""
        lines = []
        for name in self.copied:
            d = self.adjoint(name)
            self.work[d] = name
            lines += self.nest(d, name, f"{d}[{{i}}] = {d.removesuffix('_copy')}[{{i}}]", parallel=True)
        return lines

    # Forward ---------------------------------------------------------------------------------------------------------

    def forward(self, block: Iterable[Stmt], kept: set[Stmt], push: bool) -> list[Line]:
        """Write the forward sweep of a block: what is kept of it, with records where the reverse needs them."""
        lines: list[Line] = []
        for s in block:
            if isinstance(s, View):
                shape = ", ".join(map(self.show, s.shape))
                lines.append(Line(f"{s.name} = {s.base}.reshape({shape})", s.line, "view"))
                if s.base in self.plan.active:
                    d = self.adjoint(s.base)
                    self.adjoints[s.name] = self.fresh(f"d{s.name}")
                    lines.append(Line(f"{self.adjoints[s.name]} = {d}.reshape({shape})", s.line, "view"))
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
            test = self.show(s.test)
            if record:
                name = self.fresh("taken")
                head, test = [Line(f"{name} = {test}", s.line, "repeat")], name
            lines = [*head, Line(f"if {test}:", s.line, "repeat", body)]
            lines += [Line("else:", s.line, "repeat", orelse)] if orelse else []
            return lines + (self.push(f"ONE if {test} else ZERO", s.line) if record else [])
        if isinstance(s, For):
            inner = push and s not in self.plan.fused
            lo, hi, step = s.bounds
            word = "prange" if s.parallel and self.may_run_parallel(s) else "range"
            loop = f"for {s.var} in {word}({self.range(lo, hi, step)}):"
            return [Line(loop, s.line, "repeat", self.forward(s.body, kept, inner) or [Line("pass")])]
        assert isinstance(s, Assign)
        if self.kernel.root(base(s.target)) in self.task.saved:
            return [Line(f"{self.show(s.value)} = {self.show(s.target)}", s.line, "repeat")]
        op = "+=" if type(s) is Accum else "="
        line = Line(f"{self.show(s.target)} {op} {self.show(s.value)}", s.line, "repeat")
        if type(s) is Accum and isinstance(s.value, ast.UnaryOp) and isinstance(s.value.op, ast.USub):
            line.text = f"{self.show(s.target)} -= {self.show(s.value.operand)}"
        return [*(self.push(self.show(s.target), s.line) if record else []), line]

    def may_run_parallel(self, loop: For) -> bool:
        """Whether a repeated loop may be parallel: no sum runs through its iterations."""
        if loop not in self.plan.fused or any(p.parallel for p in self.plan.parent[loop] if isinstance(p, For)):
            return False
        return all(
            n in self.plan.locals[loop] or (self.kernel.root(n) in self.kernel.arrays)
            for n in assigned(loop.body) - {x.var for x in flat(loop.body) if isinstance(x, For)}
        )

    def range(self, lo: ast.expr, hi: ast.expr, step: int) -> str:
        """The arguments of a range."""
        parts = [] if text(lo) == "0" and step == 1 else [self.show(lo)]
        return ", ".join([*parts, self.show(hi), *([str(step)] if step != 1 else [])])

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

    # Reverse ---------------------------------------------------------------------------------------------------------

    def backward(self, block: Sequence[Stmt], home: For | None) -> list[Line]:
        """Write the reverse of a block."""
        lines: list[Line] = []
        for s in reversed(block):
            if isinstance(s, If):
                lines += self.backward_if(s, home)
            elif isinstance(s, For):
                lines += self.backward_for(s)
            elif isinstance(s, LogSumExp):
                lines += self.backward_sum(s)
            elif isinstance(s, Assign):
                lines += self.backward_assign(s)
        return lines

    def backward_if(self, s: If, home: For | None) -> list[Line]:
        """Write the reverse of a branch."""
        test, lines = self.show(s.test), list[Line]()
        body, orelse = self.backward(s.body, home), self.backward(s.orelse, home)
        if s in self.plan.recorded:
            name = self.fresh("took")
            lines += self.pop(name, s.line)
            test = f"{name} != ZERO"
        if body:
            lines.append(Line(f"if {test}:", s.line, "invert", body))
            lines += [Line("else:", s.line, "invert", orelse)] if orelse else []
        elif orelse:
            lines.append(Line(f"if not ({test}):", s.line, "invert", orelse))
        return lines

    def backward_assign(self, s: Assign) -> list[Line]:
        """Write the reverse of an assignment, and the reading of its record on the right side of it."""
        pop: list[Line] = []
        if s in self.plan.recorded:
            pop = self.pop(self.show(s.target), s.line, base(s.target) in self.kernel.ints)
        if not self.plan.has_adjoint(s):
            return pop
        lines = self.pullback(s)
        return [*lines, *pop] if self.plan.result(s) else [*pop, *lines]

    def pullback(self, s: Assign) -> list[Line]:
        """The adjoint of one assignment: what its target's adjoint adds to those of its operands."""
        own, lines = self.of(s.target), list[Line]()
        seed: ast.expr = parse(own)
        leaves: dict[str, tuple[ast.expr, list[ast.expr]]] = {}
        found = self.leaves(s.value, seed, s)
        root = self.kernel.root(base(s.target))
        same = [e for e, _ in found if self.kernel.root(base(e)) == root and text(e) != text(s.target)]
        mine = [e for e, _ in found if text(e) == text(s.target)]
        if same or (type(s) is Accum and mine):
            name = self.fresh("seed")
            lines.append(Line(f"{name} = {own}", s.line, "invert"))
            if type(s) is not Accum:
                lines.append(Line(f"{own} = ZERO", s.line, "invert"))
            found = self.leaves(s.value, parse(name), s)
            for e, d in found:
                leaves.setdefault(text(e), (e, []))[1].append(d)
            return lines + [self.add(s, e, total(ds)) for e, ds in leaves.values()]
        if isinstance(s.target, ast.Subscript) and len(found) > 1 and not mine:
            name = self.fresh("seed")  # read once: the compiler cannot know that no line below writes to it
            lines.append(Line(f"{name} = {own}", s.line, "invert"))
            found = self.leaves(s.value, parse(name), s)
        for e, d in found:
            leaves.setdefault(text(e), (e, []))[1].append(d)
        kept = leaves.pop(text(s.target), None)
        lines += [self.add(s, e, total(ds)) for e, ds in leaves.values()]
        if type(s) is not Accum and not self.plan.unconsumed(root):
            if kept:
                new = text(total(kept[1]))
                lines += [Line(f"{own} = {new}", s.line, "invert")] if new != own else []
            elif not self.is_first(s) and not (root in self.kernel.arrays and self.plan.assigned_once(root)):
                lines.append(Line(f"{own} = ZERO", s.line, "invert"))
        return lines

    def is_first(self, s: Assign) -> bool:
        """Whether a local is first touched here in its home, so that its adjoint is not read again."""
        name = base(s.target)
        if not isinstance(s.target, ast.Name):
            return False
        homes = self.homes[name]
        home = homes[s]
        every = set(homes.values())
        if len(every) > 1 and any(
            a is not b and (a is None or (b is not None and a in self.plan.parent[b])) for a in every for b in every
        ):
            return False
        block = home.body if home else self.kernel.body
        here: Stmt = s
        while True:
            inside = self.plan.block_of[here]
            before = set(flat(inside[: inside.index(here)]))
            if any(other in before for other in homes):
                return False
            if inside is block:
                return True
            here = self.plan.parent[here][-1]
            if not isinstance(here, If) or here in homes:
                return False

    def add(self, s: Stmt, e: ast.expr, d: ast.expr) -> Line:
        """Add to the adjoint of a name or an element."""
        own, root = self.of(e), self.kernel.root(base(e))
        if root in self.once and (flag := self.face.flag(f"d{root}")):
            return Line(f"{own} = {own} + {text(d)} if {flag} else {text(d)}", s.line, "invert")
        if isinstance(d, ast.UnaryOp) and isinstance(d.op, ast.USub):
            return Line(f"{own} -= {text(d.operand)}", s.line, "invert")
        return Line(f"{own} += {text(d)}", s.line, "invert")

    def leaves(self, e: ast.expr, seed: ast.expr, s: Assign) -> list[tuple[ast.expr, ast.expr]]:
        """The names and elements that an expression reads, each with the derivative times `seed`."""
        if not self.plan.is_active(e):
            return []
        if isinstance(e, ast.Name | ast.Subscript):
            return [(e, seed)]
        if one := rule(self.kernel, e):
            x, y = one[1], s.target
            d = substitute(parse(DERIVATIVE[one[0]]), self.value(x), self.value(y))
            return self.leaves(x, times(seed, d), s)
        match e:
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return self.leaves(x, negative(seed), s)
            case ast.UnaryOp(operand=x):
                return self.leaves(x, seed, s)
            case ast.BinOp(left=x, op=ast.Add(), right=y):
                return self.leaves(x, seed, s) + self.leaves(y, seed, s)
            case ast.BinOp(left=x, op=ast.Sub(), right=y):
                return self.leaves(x, seed, s) + self.leaves(y, negative(seed), s)
            case ast.BinOp(left=x, op=ast.Mult(), right=y):
                return self.leaves(x, times(seed, self.value(y)), s) + self.leaves(y, times(seed, self.value(x)), s)
            case ast.BinOp(left=x, op=ast.Div(), right=y):
                over = ast.BinOp(seed, ast.Div(), self.value(y))
                down = negative(ast.BinOp(times(over, self.value(x)), ast.Div(), self.value(y)))
                return self.leaves(x, over, s) + (self.leaves(y, down, s) if self.plan.is_active(y) else [])
            case ast.BinOp(left=x, op=ast.Pow(), right=y):
                return self.leaves(x, times(seed, power(self.value(x), y)), s)
            case ast.Call(args=[x]):
                return self.leaves(x, seed, s)
        raise AssertionError(text(e))

    def value(self, e: ast.expr) -> ast.expr:
        """An expression of the forward as an expression of the backward."""
        return parse(self.show(e))  # type: ignore[no-any-return]

    def backward_sum(self, s: LogSumExp) -> list[Line]:
        """The adjoint of a log of a sum of exponentials: each term has its share, exp(term - lse)."""
        pop = self.pop(self.show(s.target), s.line) if s in self.plan.recorded else []
        if not self.plan.has_adjoint(s):
            return pop
        own = self.of(s.target)
        found = self.leaves(s.term, times(parse(own), self.value(s.weight)), s)
        body = [self.add(s, e, d) for e, d in found]
        lines = [Line(f"for {s.loop.var} in range({self.range(*s.loop.bounds)}):", s.line, "invert", body)]
        if not self.is_first(s):
            lines.append(Line(f"{own} = ZERO", s.line, "invert"))
        return [*lines, *pop]

    # Loops -----------------------------------------------------------------------------------------------------------

    def backward_for(self, s: For) -> list[Line]:
        """Write the reverse of a loop."""
        plan = self.plan
        if not plan.has_adjoint(s) and not any(x in plan.recorded for x in flat(s.body)):
            return []
        if s in plan.fused and s.parallel and s not in getattr(plan, "one_thread", set()):
            return self.parallel(s)
        if s in plan.fused:
            body = self.iteration(s)
        else:
            again = [x for x in s.body if x in plan.again]
            kept = set(flat(again))
            body = self.initialize(self.initial(s), self.backward(s.body, s))
            body = [*self.forward(again, kept, push=False), *body]
        if not body:
            return []
        return [Line(f"for {s.var} in {self.order(s)}:", s.line, "invert", body)]

    def iteration(self, s: For) -> list[Line]:
        """One iteration of a fused loop: the forward again, then its reverse."""
        kept: set[Stmt] = set()
        self.plan.keep(s.body, set(), True, kept)
        forward = self.forward(s.body, kept, push=True)
        return [*forward, *self.initialize(self.initial(s), self.backward(s.body, s))]

    def order(self, s: For) -> str:
        """The range of a loop, upwards or downwards."""
        lo, hi, step = s.bounds
        a, b = self.show(lo), self.show(hi)
        if s in self.plan.ascending:
            return f"range({self.range(lo, hi, step)})"
        if step == 1:
            return f"range({b} - 1, {text(parse(f'({a}) - 1'))}, -1)"
        return f"range({a} + (len(range({a}, {b}, {step})) - 1) * {step}, {text(parse(f'({a}) - {step}'))}, {-step})"

    def initial(self, home: For | None) -> list[str]:
        """The locals whose adjoints start from zero in a loop, or in the kernel."""
        return sorted(
            name
            for name, where in self.homes.items()
            if name in self.plan.active and name not in self.kernel.arrays and home in where.values()
        )

    def initialize(self, scalars: list[str], lines: list[Line]) -> list[Line]:
        """Start adjoints from zero, or from what is added first."""
        start = []
        for name in scalars:
            d = self.adjoint(name)
            first = next((line for line in lines if line.mentions(d)), None)
            if first is None:
                continue
            rest = first.text.removeprefix(f"{d} ")
            if first.body is None and rest[:2] in ("+=", "-=") and not re.search(rf"\b{d}\b", rest):
                first.text = f"{d} = {rest[3:]}" if rest[0] == "+" else f"{d} = {text(negative(parse(rest[3:])))}"
            else:
                start.append(Line(f"{d} = ZERO"))
        return [*start, *lines]

    def parallel(self, s: For) -> list[Line]:
        """Write a parallel loop: free of races, by chunks where iterations add to one adjoint or record."""
        plan = self.plan
        if inner := plan.split.get(s):
            return self.by_chunks_of(s, inner)
        tape = f"tape{len(self.tapes) + 1}"
        parts = plan.partial.get(s, [])
        scalars = [n for n in parts if n not in self.kernel.arrays]
        for name in parts:
            if name in self.kernel.arrays:
                self.parts[self.adjoint(name)] = "chunk"
        renamed = {n: self.adjoint(n) for n in scalars}
        for n in scalars:
            self.adjoints[n] = self.fresh(f"{renamed[n]}_part")
        self.tapes.append(tape)
        body = self.zero_slices(s) + self.iteration(s)
        self.tapes.pop()
        locals_ = {n: self.adjoints[n] for n in scalars}
        self.adjoints |= renamed
        arrays = [self.adjoint(n) for n in parts if n in self.kernel.arrays]
        for d in arrays:
            del self.parts[d]
        lo, hi, step = s.bounds
        records = any(line.mentions(tape) for line in body)
        flat_body = not any(line.text.startswith("for ") for line in _lines(body))  # may be vectorized: fix its ends
        if not parts and not records and not (flat_body and step == 1):
            return [Line(f"for {s.var} in prange({self.range(lo, hi, step)}):", s.line, "invert", body)]
        lines, inside, after = [], list[Line](), list[Line]()
        if records:
            inside.append(Line(f"{tape}, {tape}_top = np.empty(1024), 0"))
        for name in parts:
            d = self.adjoint(name)
            if name in scalars:
                lines.append(Line(f"{d}_parts = np.zeros(CHUNKS)"))
                inside.append(Line(f"{locals_[name]} = ZERO"))
                after.append(Line("for chunk in range(CHUNKS):", body=[Line(f"{d} += {d}_parts[chunk]")]))
            else:
                shape = ", ".join(["CHUNKS", *(f"{d}.shape[{k}]" for k in range(self.kernel.arrays[name]))])
                if self.face.own_memory:
                    lines.append(Line(f"{d}_parts = np.empty(({shape}), {d}.dtype)"))
                else:
                    self.face.scratch[f"{d}_memory"] = (CHUNKS, name)
                    lines.append(Line(f"{d}_parts = {d}_memory[:CHUNKS * {d}.size].reshape({shape})"))
                inside += self.nest(d, name, f"{d}_parts[chunk, {{i}}] = ZERO")
                after += self.gather(name)
        a, b = self.show(lo), self.show(hi)
        if a == "0":
            bounds = f"({b}) * chunk // CHUNKS, ({b}) * (chunk + 1) // CHUNKS"
        else:
            bounds = f"{a} + ({b} - {a}) * chunk // CHUNKS, {a} + ({b} - {a}) * (chunk + 1) // CHUNKS"
        if step != 1:
            raise UnsupportedError(f"{self.kernel.file}:{s.line}: a parallel loop that records has step {step}; use 1")
        parts_of = [text(parse(x)) for x in bounds.split(", ")]
        if flat_body and self.only_indexes(s):  # an unsigned index needs no test for negative ones, and is vectorized
            parts_of = [f"np.uint64({x})" for x in parts_of]
        bounds = ", ".join(parts_of)
        inside.append(Line(f"for {s.var} in range({bounds}):", s.line, "invert", body))
        inside += [Line(f"{self.adjoint(n)}_parts[chunk] = {locals_[n]}") for n in scalars]
        lines.append(Line("for chunk in prange(CHUNKS):", s.line, "invert", inside))
        return lines + after

    def only_indexes(self, s: For) -> bool:
        """Whether a loop's variable is used as a bare index and in no other way."""
        uses = [n for x in flat(s.body) for e in self.plan.reads(x) for n in ast.walk(e) if isinstance(n, ast.Name)]
        bare = {id(i) for x in flat(s.body) for e in self.plan.reads(x) for y in elements(e) for i in index(y)}
        targets = [x.target for x in flat(s.body) if isinstance(x, Assign) and isinstance(x.target, ast.Subscript)]
        bare |= {id(i) for y in targets for i in index(y)}
        return all(id(n) in bare for n in uses if n.id == s.var)

    def gather(self, name: str) -> list[Line]:
        """Sum the chunks' parts in their order."""
        d = self.adjoint(name)
        flag = self.face.flag(d) if self.added_in_one_loop(name) else None

        def inner(i: str) -> list[Line]:
            new = f"{d}[{i}] = {d}[{i}] + part if {flag} else part" if flag else f"{d}[{i}] += part"
            return [
                Line("part = ZERO"),
                Line("for chunk in range(CHUNKS):", body=[Line(f"part += {d}_parts[chunk, {i}]")]),
                Line(new),
            ]

        return self.nest(d, name, inner, parallel=True)

    def nest(self, d: str, name: str, make: str | Callable[[str], list[Line]], parallel: bool = False) -> list[Line]:
        """Write loops over all elements of an array."""
        axes = self.kernel.arrays[name]
        variables = [f"j{k}" for k in range(axes)]
        every = ", ".join(variables)
        body = [Line(make.replace("{i}", every))] if isinstance(make, str) else make(every)
        for k in reversed(range(axes)):
            word = "prange" if parallel and k == 0 else "range"
            body = [Line(f"for j{k} in {word}({d}.shape[{k}]):", body=body)]
        return body

    def by_chunks_of(self, s: For, inner: For) -> list[Line]:
        """Write a parallel nest so that each chunk has a part of an inner loop's range, and all of the outer one."""
        lo, hi, _ = inner.bounds
        a, b = self.show(lo), self.show(hi)
        part = For(
            inner.line, inner.var,
            (parse(f"({b}) * chunk // CHUNKS"), parse(f"({b}) * (chunk + 1) // CHUNKS"), 1), inner.body, False,
        ) if a == "0" else For(
            inner.line, inner.var,
            (parse(f"{a} + ({b} - {a}) * chunk // CHUNKS"), parse(f"{a} + ({b} - {a}) * (chunk + 1) // CHUNKS"), 1),
            inner.body, False,
        )  # fmt: skip
        self.splits[inner] = part
        kept: set[Stmt] = set()
        self.plan.keep(s.body, set(), True, kept)
        forward = self.forward([x for x in s.body if x is not inner], kept, push=False)
        nest = Line(
            f"for {inner.var} in range({self.range(*part.bounds)}):", inner.line, "invert", self.iteration(inner)
        )
        lo, hi, step = s.bounds
        outer = Line(f"for {s.var} in range({self.range(lo, hi, step)}):", s.line, "invert", [*forward, nest])
        zero = self.zero_split(s, inner, part)
        return [Line("for chunk in prange(CHUNKS):", s.line, "invert", [*zero, outer])]

    # Zeros -----------------------------------------------------------------------------------------------------------

    def added_in_one_loop(self, name: str) -> For | None:
        """The one outermost loop in which an adjoint is added to, if there is one."""
        from .normal import sources

        tops: set[Stmt] = set()
        for s in flat(self.kernel.body):
            if isinstance(s, Assign) and self.plan.has_adjoint(s):
                if name in sources(self.kernel, s) or self.kernel.root(base(s.target)) == name:
                    tops.add([*self.plan.parent[s], s][0])
        top = next(iter(tops)) if len(tops) == 1 else None
        return top if isinstance(top, For) else None

    def needs_zero(self) -> list[str]:
        """Adjoint arrays that start from zero: those that the caller may want overwritten, those in own memory."""
        flagged = [n for n in self.task.wrt if n in self.plan.active and self.face.flag(f"d{n}")]
        own = [n for n in self.kernel.arrays if n in self.plan.active and f"d{n}" not in self.face.params]
        own = [n for n in own if n not in self.copied]
        return [*flagged, *own]

    def zero_slices(self, s: For) -> list[Line]:
        """Zero what an iteration owns."""
        return self.zero(s, s)

    def zero_split(self, s: For, inner: For, part: For) -> list[Line]:
        """Zero what a chunk owns."""
        return self.zero(s, inner, part)

    def zero(self, top: For, loop: For, part: For | None = None) -> list[Line]:
        """Zero, in one iteration or chunk, the slices that it owns of the adjoints that only this loop adds to."""
        lines = []
        for name in self.needs_zero():
            if self.added_in_one_loop(name) is not top or name in self.once or name in self.plan.partial.get(top, []):
                continue
            keys = [self.plan.keys(loop, e) for st, e in self.plan.accesses
                    if self.kernel.root(base(e)) == name and top in self.plan.parent[st]]  # fmt: skip
            key = next(iter(sorted(set.intersection(*keys))), None) if keys else None
            if key is None or not self.covers(loop, name, key):
                continue
            seen, axes = key[0], [int(k) for k in key[1]]
            d = self.adjoint(seen)
            count = len(self.kernel.views[seen].shape) if seen in self.kernel.views else self.kernel.arrays[seen]
            fixed = dict(zip(axes, [loop.var] if len(axes) == 1 else list(self.halves(loop, seen, axes)), strict=True))
            chosen = [fixed.get(k, f"j{k}") for k in range(count)]
            body = [Line(f"{d}[{', '.join(chosen)}] = ZERO")]
            for k in reversed([k for k in range(count) if k not in fixed]):
                body = [Line(f"for j{k} in range({d}.shape[{k}]):", body=body)]
            if part and len(axes) == 1:
                lo, hi, step = part.bounds
                body = [Line(f"for {loop.var} in range({self.range(lo, hi, step)}):", body=body)]
                if axes[0] != 0 and count == 2:  # along the rows
                    body = [Line(f"for j0 in range({d}.shape[0]):", body=[
                        Line(f"for {loop.var} in range({self.range(lo, hi, step)}):", body=[
                            Line(f"{d}[j0, {loop.var}] = ZERO")])])]  # fmt: skip
            if flag := self.face.flag(f"d{name}"):
                there = f" and d{name}.size > 0" if f"d{name}" in self.face.optional else ""
                body = [Line(f"if not {flag}{there}:", body=body)]
            lines += body
            self.zeroed.add(name)
        return lines

    def halves(self, loop: For, seen: str, axes: list[int]) -> tuple[str, str]:
        """The quotient and the remainder by which a loop owns slices, written out: they may not be computed yet."""
        for q, r in self.plan.halves(loop):
            for s, e in self.plan.accesses:
                parts = [text(i) for i in index(e)]
                if base(e) == seen and parts[axes[0]] == q and parts[axes[1]] == r and loop in self.plan.parent[s]:
                    made = {base(x.target): text(x.value) for x in loop.body if type(x) is Assign}
                    return made[q], made[r]
        raise AssertionError(seen)

    def covers(self, loop: For, name: str, key: tuple[str, tuple[str, ...]]) -> bool:
        """Whether a loop's range is all of the axes that it owns."""
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
        """Replace a local that is assigned once, outside loops, by what it is assigned."""
        if isinstance(e, ast.BinOp):
            return ast.BinOp(self.resolve(e.left), e.op, self.resolve(e.right))
        if isinstance(e, ast.Name):
            sites = [s for s in flat(self.kernel.body) if e.id in assigned([s])]
            if len(sites) == 1 and type(sites[0]) is Assign and not self.plan.parent[sites[0]]:
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
        """Whether every element of a gradient is added to exactly once, in a loop over all of it."""
        from .normal import sources

        sites = [s for s in flat(self.kernel.body) if isinstance(s, Assign) and self.plan.has_adjoint(s)
                 and (name in sources(self.kernel, s) or self.kernel.root(base(s.target)) == name)]  # fmt: skip
        if len(sites) != 1 or isinstance(sites[0], LogSumExp) or self.kernel.root(base(sites[0].target)) == name:
            return False
        s, loops = sites[0], self.plan.parent[sites[0]]
        found = {text(e): e for e, _ in self.plan_leaves(s) if self.kernel.root(base(e)) == name}
        if len(found) != 1 or any(isinstance(p, If) for p in loops):
            return False
        (e,) = found.values()
        if base(e) != name or len(loops) != self.kernel.arrays[name]:
            return False
        return all(
            any(self.covers(p, name, key) for key in self.plan.keys(p, e) if len(key[1]) == 1)
            for p in loops
            if isinstance(p, For)
        ) and name not in {n for parts in self.plan.partial.values() for n in parts}

    def plan_leaves(self, s: Assign) -> list[tuple[Any, ast.expr]]:
        """The leaves of a statement, whatever the seed."""
        return self.leaves(s.value, parse("ONE"), s)

    def late_zeros(self) -> list[Line]:
        """Zero at the start what no loop zeroes by itself."""
        lines = []
        for name in self.needs_zero():
            d = self.adjoint(name)
            if f"d{name}" not in self.face.params:
                self.work[d] = name
                if self.face.own_memory:
                    continue  # np.zeros
            if name in self.zeroed or name in self.once:
                continue
            top = self.added_in_one_loop(name)
            if top and name in self.plan.partial.get(top, []):
                continue
            body = self.nest(d, name, f"{d}[{{i}}] = ZERO", parallel=True)
            flag = self.face.flag(d)
            lines += [Line(f"if not {flag}:", body=body)] if flag else body
        return lines


def _lines(body: Iterable[Line]) -> Iterable[Line]:
    for line in body:
        yield line
        yield from _lines(line.body or [])


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
    number = n.value if isinstance(n, ast.Constant) and isinstance(n.value, int | float) else None
    if number == 2:
        return ast.BinOp(ast.Name("TWO", ast.Load()), ast.Mult(), x)
    if number == 1:
        return ast.Name("ONE", ast.Load())
    less = ast.Constant(number - 1) if number is not None else ast.BinOp(n, ast.Sub(), parse("ONE"))
    return ast.BinOp(n, ast.Mult(), ast.BinOp(x, ast.Pow(), less))


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
