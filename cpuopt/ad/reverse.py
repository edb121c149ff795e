"""From a kernel and its plan to the statements of its backward: the forward sweep, then every statement in reverse."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .kernel import CHUNKS, Accum, Assign, For, If, Interface, LogSumExp, Reshape, Stmt, assigned, flat, mentioned
from .naming import Naming, every, nest
from .plan import BackwardPlan
from .prune import Prune
from .pullback import ZERO, Pullback
from .rules import CHOICES, plus
from .trees import element, elements, function_name, index, names, quote, text
from .zeros import Zeros

NOTHING = Stmt(0)
EVERY_CHUNK = (quote("0"), quote("CHUNKS"), 1)


class Reverse:
    """Writer of the backward of one plan."""

    def __init__(self, plan: BackwardPlan, interface: Interface) -> None:
        self.plan, self.kernel, self.task, self.face = plan, plan.kernel, plan.task, interface
        self.naming = Naming(plan, interface)
        self.show = self.naming.show
        self.pullback = Pullback(plan, self.naming, interface)
        self.zeros = Zeros(plan, self.pullback, self.naming, interface)
        self.tapes = ["tape"]
        self.records: list[list[Stmt]] = [[]]
        self.places: dict[Stmt, ast.expr | None] = {}

    def write(self) -> list[Stmt]:
        """Write the body of the backward."""
        forward = self.forward(self.kernel.body, self.plan.kept, push=True)
        backward = self.backward(self.kernel.body)
        start = [*self.before_records(None), *self.records[0]]
        if "tape" in mentioned([*forward, *backward]):
            start.append(self.new_tape())
        backward = self.initialize(self.initial(None), backward)
        for view in [s for s in reversed(forward) if isinstance(s, Reshape)]:
            if view.name not in mentioned([*(s for s in forward if s is not view), *backward]):
                forward.remove(view)
        body = [*self.copies(), *self.zeros.at_start(), *start, *forward, *backward]
        Prune(body, {self.naming.adjoint(n) for n in self.task.wrt})
        self.check_available(body)
        return [*self.allocations(), *body]

    def before_records(self, home: For | None) -> list[Stmt]:
        """Write a first value of recorded locals: in the parallel loop that they do not outlive, if any."""
        made: list[Stmt] = []
        for name in sorted({s.name for s in self.plan.recorded if isinstance(s, Assign)}):
            around = [p for s in self.plan.recorded if isinstance(s, Assign) and s.name == name
                      for p in self.plan.facts.parent[s] if isinstance(p, For) and p.parallel
                      and p in self.plan.fused and p not in self.plan.serial
                      and name in self.plan.facts.locals[p]]  # fmt: skip
            if name in self.kernel.arrays or name in self.kernel.views or (home not in around if home else around):
                continue
            made.append(Assign(0, ast.Name(name), quote("0") if name in self.kernel.ints else ZERO))
        return made

    def check_available(self, body: list[Stmt]) -> None:
        """Find hidden outputs that are read: they become working memory; a hidden input that is read is refused."""
        written = self.kernel.roots(assigned(self.kernel.body))
        for name in sorted(self.task.hidden):
            uses = [s.line for s in flat(body) if name in {n for e in s.trees for n in names(e)}
                    or (isinstance(s, Reshape) and s.base == name)]  # fmt: skip
            if uses and name not in written:
                line = next(filter(None, uses), 0)
                why = f"its adjoint reads '{name}', which the declared backward is not given"
                self.kernel.refuse(line, why, "add it to the declaration of the backward")
            if uses:
                self.zeros.work[name] = name

    def allocations(self) -> list[Stmt]:
        """Make or shape the working memory."""
        made: list[Stmt] = []
        for name, like in self.zeros.work.items():
            if local := self.kernel.local.get(like):
                shape = [self.show(e) for e in local.shape]
                parts = {"shape": ast.Tuple(shape) if len(shape) > 1 else shape[0], "dtype": local.dtype or ZERO}
                code = f"np.zeros(shape{', dtype' if local.dtype else ''})"
                made.append(Assign(0, ast.Name(name), self.show(quote(code, **parts))))
                continue
            if self.kernel.arrays[like] == 1 and not self.face.own_memory:
                self.face.scratch[name] = (1, like)
                continue
            code, sizes = "np.zeros(x.shape, x.dtype)", list[ast.expr]()
            if not self.face.own_memory:
                self.face.scratch[f"{name}_memory"] = (1, like)
                code = "memory[:x.size].reshape(x.shape)"
                if not self.naming.shaped(like):
                    sizes = self.naming.extents(like)
                    size = functools.reduce(lambda a, b: ast.BinOp(a, ast.Mult(), b), sizes)
                    code = f"memory[:{text(size)}].reshape({', '.join(map(text, sizes))})"
            x = ast.Name(like if like in self.face.params else self.naming.shaped(like))
            made.append(Assign(0, ast.Name(name), quote(code, x=x, memory=ast.Name(f"{name}_memory"))))
        return made

    def copies(self) -> list[Stmt]:
        """Copy the given adjoints that the reverse consumes."""
        made: list[Stmt] = []
        for name in self.naming.copied:
            d = self.naming.adjoint(name)
            self.zeros.work[d] = name
            axes = self.kernel.arrays[name]
            copy = Assign(0, element(d, every(axes)), element(f"d{name}", every(axes)))
            made += nest(d, axes, [copy], parallel=True)
        return made

    # The forward sweep -----------------------------------------------------------------------------------------------

    def forward(self, block: Iterable[Stmt], kept: set[Stmt], push: bool) -> list[Stmt]:
        """Write the forward sweep of a block: the kept statements, with records where the reverse needs them."""
        made: list[Stmt] = []
        for s in block:
            if isinstance(s, Reshape):
                view = Reshape(s.line, s.name, s.base, [self.show(e) for e in s.shape])
                made.append(view)
                if s.base in self.plan.activity.active:
                    d = self.naming.adjoint(s.base)
                    self.naming.adjoints[s.name] = self.naming.fresh(f"d{s.name}")
                    made.append(replace(view, name=self.naming.adjoints[s.name], base=d))
            elif s in kept:
                made += self.forward_one(s, kept, push)
        return made

    def forward_one(self, s: Stmt, kept: set[Stmt], push: bool) -> list[Stmt]:
        """Write one statement of the forward sweep."""
        record = push and s in self.plan.recorded
        if isinstance(s, If):
            body = self.forward(s.body, kept, push) or [NOTHING]
            orelse = self.forward(s.orelse, kept, push)
            test = self.show(s.test)
            if not record:
                return [If(s.line, test, body, orelse, role="primal")]
            place = self.place(s)
            name = place or ast.Name(self.naming.fresh("taken"))
            value = test if isinstance(test, ast.Compare) else quote("True if test else False", test=test)
            branch = If(s.line, name, body, orelse, role="primal")
            after = [] if place else self.push(quote("ONE if taken else ZERO", taken=name), s.line)
            return [Assign(s.line, name, value, role="record" if place else "primal"), branch, *after]
        if isinstance(s, For):
            body = self.forward(s.body, kept, push and s not in self.plan.fused) or [NOTHING]
            loop = self.naming.loop(s, body, s.parallel and self.may_run_parallel(s))
            return [replace(loop, role="primal")]
        assert isinstance(s, Assign)
        target, value = self.show(s.target), self.show(s.value)
        if self.kernel.written(s) in self.task.saved:
            return [Assign(s.line, value, target, role="primal")]
        kind = Accum if type(s) is Accum else Assign
        pushes: list[Stmt] = []
        if record:
            place = self.place(s)
            pushes = [Assign(s.line, place, target, role="record")] if place else self.push(target, s.line)
        return [*pushes, kind(s.line, target, value, role="primal")]

    def may_run_parallel(self, loop: For) -> bool:
        """Return whether a repeated loop may be parallel: no sum runs through its iterations."""
        if loop not in self.plan.fused or any(p.parallel for p in self.plan.facts.parent[loop] if isinstance(p, For)):
            return False
        return all(
            n in self.plan.facts.locals[loop] or (self.kernel.root(n) in self.kernel.arrays)
            for n in assigned(loop.body) - {x.var for x in flat(loop.body) if isinstance(x, For)}
        )

    # Records ---------------------------------------------------------------------------------------------------------

    def place(self, s: Stmt) -> ast.expr | None:
        """The place of a record: a name, or an element for each iteration of the loops around it.

        None if a size is not known before the loops; the record is then pushed.
        """
        if s not in self.places:
            loops: list[For] = []
            for p in self.plan.facts.parent[s]:
                if isinstance(p, For):
                    loops = [] if p in self.plan.fused else [*loops, p]
            sizes = [size for p in loops if (size := self.most(p)) is not None]
            self.places[s] = None
            if len(sizes) == len(loops):
                word = f"{s.name}_was" if isinstance(s, Assign) else "taken"
                name = self.naming.fresh(word)
                self.places[s] = element(name, [ast.Name(p.var) for p in loops]) if loops else ast.Name(name)
                kind = "np.float64" if isinstance(s, Assign) else "np.bool_"
                kind = "np.int64" if isinstance(s, Assign) and s.name in self.kernel.ints else kind
                if loops:
                    shape = ast.Tuple([self.show(e) for e in sizes]) if len(sizes) > 1 else self.show(sizes[0])
                    made = Assign(0, ast.Name(name), quote("np.empty(shape, kind)", shape=shape, kind=quote(kind)))
                    self.records[-1].append(made)
        return self.places[s]

    def most(self, loop: For) -> ast.expr | None:
        """One more than the largest value of a loop's variable, in what is known at the top of the kernel, if it is."""
        if not self.plan.facts.counts_from_zero(loop):
            return None
        lo, hi, step = loop.bounds
        found = self.upper(hi if step > 0 else plus(lo, 1), {*self.plan.facts.parent[loop]})
        sub = found and any(isinstance(n, ast.Sub) for n in ast.walk(found))
        return quote("max(size, 0)", size=found) if sub and found else found

    def upper(self, e: ast.expr, around: set[Stmt]) -> ast.expr | None:
        """A bound from above of an integer, in what is known at the top of the kernel; None if there is none."""
        e = self.zeros.resolve(e)
        match e:
            case ast.Constant(value=int()):
                return e
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return e
            case ast.Name(id=name) if name in self.kernel.names or (
                name in self.kernel.params and name not in self.kernel.arrays and name in self.face.params
            ):
                return e
            case ast.Name(id=name):
                loop = next((p for p in around if isinstance(p, For) and p.var == name), None)
                most = loop and self.most(loop)
                return plus(most, -1) if most else None
            case ast.BinOp(left=x, op=ast.Add(), right=y):
                parts = self.upper(x, around), self.upper(y, around)
                if parts[0] is None or parts[1] is None:
                    return None
                match parts[1]:
                    case ast.Constant(value=int() as n):
                        return plus(parts[0], n)
                return ast.BinOp(parts[0], ast.Add(), parts[1])
            case ast.BinOp(left=x, op=ast.Sub(), right=ast.Constant(value=int() as n)):
                found = self.upper(x, around)
                return found and plus(found, -n)
            case ast.BinOp(left=x, op=ast.FloorDiv(), right=ast.Constant(value=int() as n)) if n > 0:
                found = self.upper(x, around)
                return found and ast.BinOp(found, ast.FloorDiv(), ast.Constant(n))
            case ast.BinOp(left=x, op=ast.Mult(), right=y):
                if all(map(self.plan.facts.nonnegative, (x, y))):
                    parts = self.upper(x, around), self.upper(y, around)
                    return ast.BinOp(parts[0], ast.Mult(), parts[1]) if parts[0] and parts[1] else None
            case ast.Call(args=args) if function_name(e) in CHOICES and CHOICES[function_name(e)] == "<":
                return next(filter(None, (self.upper(x, around) for x in args)), None)
        return None

    def new_tape(self) -> Assign:
        """Make a record that holds nothing yet."""
        return Assign(0, self.tape("tape, top"), quote("np.empty(1024), 0"))

    def tape(self, code: str, **parts: ast.expr) -> ast.expr:
        """An expression of the record in use, and of how many values it holds."""
        t = self.tapes[-1]
        return quote(code, tape=ast.Name(t), top=ast.Name(f"{t}_top"), **parts)  # type: ignore[no-any-return]

    def push(self, value: ast.expr, line: int) -> list[Stmt]:
        """Write a record."""
        pushed = self.tape("push(tape, top, value)", value=value)
        return [Assign(line, self.tape("tape, top"), pushed, role="record")]

    def pop(self, target: ast.expr, line: int, integer: bool = False) -> list[Stmt]:
        """Write the reading of a record."""
        value = self.tape("int(tape[top])" if integer else "tape[top]")
        down = Accum(line, self.tape("top"), quote("-1"), role="record")
        return [down, Assign(line, target, value, role="record")]

    # The reverse -----------------------------------------------------------------------------------------------------

    def backward(self, block: Sequence[Stmt]) -> list[Stmt]:
        """Write the reverse of a block."""
        made: list[Stmt] = []
        for s in reversed(block):
            if isinstance(s, If):
                made += self.backward_if(s)
            elif isinstance(s, For):
                made += self.backward_for(s)
            elif isinstance(s, Assign):
                made += self.backward_assign(s)
        return made

    def backward_if(self, s: If) -> list[Stmt]:
        """Write the reverse of a branch."""
        test, made = self.show(s.test), list[Stmt]()
        body, orelse = self.backward(s.body), self.backward(s.orelse)
        if s in self.plan.recorded and (place := self.place(s)):
            test = place
        elif s in self.plan.recorded:
            name = ast.Name(self.naming.fresh("took"))
            made += self.pop(name, s.line)
            test = quote("took != ZERO", took=name)
        return [*made, If(s.line, test, body, orelse)] if body or orelse else made

    def backward_assign(self, s: Assign) -> list[Stmt]:
        """Write the reverse of an assignment, and the reading of its record on the right side of it."""
        pop: list[Stmt] = []
        if s in self.plan.recorded and (place := self.place(s)):
            pop = [Assign(s.line, self.show(s.target), place, role="record")]
        elif s in self.plan.recorded:
            pop = self.pop(self.show(s.target), s.line, s.name in self.kernel.ints)
        if not self.plan.activity.has_adjoint(s):
            return pop
        made = self.pullback.log_sum_exp(s) if isinstance(s, LogSumExp) else self.pullback.assignment(s)
        return [*made, *pop] if self.plan.activity.result[s] else [*pop, *made]

    def backward_for(self, s: For) -> list[Stmt]:
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
            used = mentioned(body)
            for x in reversed(again):
                name = self.plan.choice(x)[0].name
                if name in used:
                    used |= mentioned([x])
                else:
                    kept -= set(flat([x]))
            body = [*self.forward(again, kept, push=False), *body]
        if not body:
            return []
        up = s in plan.ascending
        return [self.naming.loop(s, body) if up else For(s.line, s.var, self.downwards(s), body, full=True)]

    def iteration(self, s: For) -> list[Stmt]:
        """One iteration of a fused loop: the forward again, then its reverse."""
        kept: set[Stmt] = set()
        self.plan.sweep(s.body, set(), True, kept)
        forward = self.forward(s.body, kept, push=True)
        return [*forward, *self.initialize(self.initial(s), self.backward(s.body))]

    def downwards(self, s: For) -> tuple[ast.expr, ast.expr, int]:
        """The range of a loop in reverse."""
        lo, hi, step = self.show(s.bounds[0]), self.show(s.bounds[1]), s.bounds[2]
        last = plus(hi, -step)
        if abs(step) > 1:
            last = quote("a + (len(range(a, b, step)) - 1) * step", a=lo, b=hi, step=quote(str(step)))
        return last, plus(lo, -step), -step

    def initial(self, home: For | None) -> list[str]:
        """The locals whose adjoints start from zero in a loop, or in the kernel."""
        return sorted(
            name
            for name, where in self.pullback.homes.items()
            if name in self.plan.activity.active and name not in self.kernel.arrays and home in where.values()
        )

    def initialize(self, scalars: list[str], block: list[Stmt]) -> list[Stmt]:
        """Start adjoints from zero, or from what is added first."""
        start, block, said = list[Stmt](), list(block), [mentioned([s]) for s in block if scalars]
        for name in scalars:
            d = self.naming.adjoint(name)
            k = next((k for k, found in enumerate(said) if d in found), None)
            if k is None:
                continue
            first = block[k]
            if isinstance(first, Accum) and text(first.target) == d and d not in names(first.value):
                block[k] = Assign(first.line, first.target, first.value)
            else:
                start.append(Assign(0, ast.Name(d), ZERO))
        return [*start, *block]

    # Parallel loops --------------------------------------------------------------------------------------------------

    def parallel(self, s: For) -> list[Stmt]:
        """Write a parallel loop: free of races, by chunks if iterations add to one adjoint or record."""
        if inner := self.plan.split.get(s):
            return self.by_chunks_of(s, inner)
        parts = self.plan.partial.get(s, [])
        whole = {name: self.naming.adjoint(name) for name in parts}
        outer = set(self.naming.parts)
        for name, d in whole.items():
            if name in self.kernel.arrays:
                self.naming.parts.add(d)
            else:
                self.naming.adjoints[name] = self.naming.fresh(f"{d}_part")
        self.tapes.append(f"tape{len(self.tapes) + 1}")
        self.records.append([])
        body = [*self.before_records(s), *self.zeros.in_loop(s, s), *self.iteration(s)]
        own = {name: self.naming.adjoint(name) for name in parts}
        self.naming.adjoints |= whole
        self.naming.parts = outer
        made = self.in_chunks(s, body, own) if body or own else []
        self.tapes.pop()
        self.records.pop()
        return made

    def in_chunks(self, s: For, body: list[Stmt], own: dict[str, str]) -> list[Stmt]:
        """Write the chunks around the iterations of a parallel loop, if it needs them.

        Parameters
        ----------
        own : the adjoints of which each chunk has a part, with the name that a part has within it.
        """
        lo, hi, step = s.bounds
        pushes = self.tapes[-1] in mentioned(body)
        records = pushes or bool(self.records[-1])
        vectorized = step == 1 and not any(isinstance(x, For) for x in flat(body))
        if not own and not records and not vectorized:  # the ends of what is vectorized must not move
            return [self.naming.loop(s, body, parallel=True)]
        if step != 1:
            self.kernel.refuse(s.line, f"a parallel loop that records has step {step}", "use 1")
        before, start, end, after = list[Stmt](), list[Stmt](), list[Stmt](), list[Stmt]()
        start += self.records[-1]
        if pushes:
            start.append(self.new_tape())
        for name, part in own.items():
            d = self.naming.adjoint(name)
            parts = f"{d}_parts"
            if name in self.kernel.arrays:
                before.append(self.allocate_parts(name))
                axes = self.kernel.arrays[name]
                start += nest(d, axes, [Assign(0, element(parts, [quote("chunk"), *every(axes)]), ZERO)])
                after += self.gather(name)
            else:
                mine = element(parts, [quote("chunk")])
                before.append(Assign(0, ast.Name(parts), quote("np.zeros(CHUNKS)")))
                start.append(Assign(0, ast.Name(part), ZERO))
                end.append(Assign(0, mine, ast.Name(part)))
                after.append(For(0, "chunk", EVERY_CHUNK, [Accum(0, ast.Name(d), mine)]))
        first, last = self.chunk_bounds(lo, hi)
        unsigned = self.only_indexes(s) and all(map(self.plan.facts.nonnegative, (lo, hi)))
        if vectorized and unsigned:  # an unsigned index needs no test for negative ones
            first, last = (quote("np.uint64(e)", e=e) for e in (first, last))
        loop = For(s.line, s.var, (first, last, 1), body)
        return [*before, For(s.line, "chunk", EVERY_CHUNK, [*start, loop, *end], parallel=True), *after]

    def allocate_parts(self, name: str) -> Stmt:
        """Allocate for each chunk an array for its part of an adjoint."""
        d = self.naming.adjoint(name)
        x, memory = ast.Name(d), ast.Name(f"{d}_memory")
        sizes = [quote("x.shape[k]", x=x, k=ast.Constant(k)) for k in range(self.kernel.arrays[name])]
        shape = ast.Tuple([quote("CHUNKS"), *sizes])
        made = quote("np.empty(shape, x.dtype)", x=x, shape=shape)
        if not self.face.own_memory and name not in self.kernel.local:
            self.face.scratch[memory.id] = (CHUNKS, name)
            made = ast.Call(quote("memory[:CHUNKS * x.size].reshape", x=x, memory=memory), shape.elts, [])
        return Assign(0, ast.Name(f"{d}_parts"), made)

    def chunk_bounds(self, lo: ast.expr, hi: ast.expr) -> tuple[ast.expr, ast.expr]:
        """The range of a chunk of a loop."""
        a, b = self.show(lo), self.show(hi)
        code = "b * chunk // CHUNKS" if text(a) == "0" else "a + (b - a) * chunk // CHUNKS"
        return quote(code, a=a, b=b), quote(code, a=a, b=b, chunk=quote("chunk + 1"))

    def only_indexes(self, s: For) -> bool:
        """Return whether a loop's variable is used as a bare index and in no other way."""
        trees = [e for x in flat(s.body) for e in x.trees]
        bare = {id(i) for e in trees for y in elements(e) for i in index(y)}
        return all(id(n) in bare for e in trees for n in ast.walk(e) if isinstance(n, ast.Name) and n.id == s.var)

    def gather(self, name: str) -> list[Stmt]:
        """Sum the chunks' parts in their order."""
        d, part, axes = self.naming.adjoint(name), quote("part"), self.kernel.arrays[name]
        whole = element(d, every(axes))
        add = Accum(0, part, element(f"{d}_parts", [quote("chunk"), *every(axes)]))
        new: Stmt = Accum(0, whole, part)
        if self.zeros.only_loop(name) and (flag := self.face.flag(d)):
            new = Assign(0, whole, quote("d + part if flag else part", d=whole, flag=ast.Name(flag)))
        return nest(d, axes, [Assign(0, part, ZERO), For(0, "chunk", EVERY_CHUNK, [add]), new], parallel=True)

    def by_chunks_of(self, s: For, inner: For) -> list[Stmt]:
        """Write a parallel nest so that each chunk has a part of an inner loop's range, and all of the outer one."""
        part = replace(inner, bounds=(*self.chunk_bounds(*inner.bounds[:2]), 1))
        kept: set[Stmt] = set()
        self.plan.sweep(s.body, set(), True, kept)
        forward = self.forward([x for x in s.body if x is not inner], kept, push=False)
        outer = self.naming.loop(s, [*forward, self.naming.loop(part, self.iteration(inner))])
        zero = self.zeros.in_loop(s, inner, part)
        return [For(s.line, "chunk", EVERY_CHUNK, [*zero, outer], parallel=True)]
