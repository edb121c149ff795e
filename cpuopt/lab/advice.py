"""Numbered advice on a kernel: what its machine code and its text show, what that costs, and what to try.

A rule is a function that `rule` registers. It says only what follows from `KernelFacts`: the instructions of innermost
loops, LLVM's reasons, the kernel's text, and the shapes and the time of a call if they are known. Lines are of the
kernel's file.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any, ClassVar

import numpy as np

from ..ad.trees import last_name
from ..check.cases import Case
from ..files.reading import from_json
from ..kernels.doubles import INT, Doubles
from ..kernels.toolkit.simd import LANES
from ..measure.roofline import Roofs
from ..ops.declaration import Op
from ..ops.storage import WIDE
from .asm import Instruction, Loop

LEAST = 1.1
"""The gain below which nothing is said."""
PAGE, COLUMN = 4096, 3
"""Bytes after which addresses share a set of the first-level cache; how many times as long the second level takes."""
LINE_BYTES, CALLED = 64, 100.0
"""The bytes of a cache line, and the least ns of a call from Python."""
ISSUED, PIPES, LATENCY = 4, 16, 4
"""What a core starts in a cycle: instructions, and floats to load and to compute; the cycles of an addition."""
LATENCIES = {"div": 11, "sqr": 14, "and": 1, "or": 1, "orp": 1, "xor": 1}
"""Those of other instructions, by how they begin."""
VECTOR = re.compile(r"%[xyz]mm(\d+)")
DIVIDE = {16: 10.0, 8: 5.0, 4: 3.0, 2: 3.0, 1: 3.0}
"""Cycles of a division by the floats of a vector, about the same on Zen 4 and on Intel's cores since Ice Lake."""
INLINED = 72.0
"""The FLOPs that take as long as an inlined tanh: 26 multiply-adds, and a division, which takes as long as ten."""
FEW_TRIPS, SHORT = 8, 20
"""The rounds up to which a loop is too short for advice, and how many times as long as its start a call must take."""
SLOW = 0.25
"""The share of the roof that one thread is taken to reach, when it is compared with the start of all."""
SPILLED, UNEVEN = 0.1, 1.25
"""From which on there is advice: the share of spills in a loop, and the busiest thread's rounds over the mean."""
SLICED = "take a slice before the loop, as in x = inp[c0:c1], and read x[i]"
LIBM = re.compile(r"(exp2?|expm1|log(2|10|1p)?|pow|sin|cos|tan|a?(sin|cos|tan)h?|erfc?|cbrt|fmod|hypot|[lt]gamma)f?$")
OWN = ("exp", "exp2", "tanh")
"""Functions of the toolkit."""
SINGLE_TYPE = np.dtype(WIDE).type
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub}
OPERATORS |= {ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Mod: operator.mod}
NUMBER: dict[type, Callable[[Any], Any]] = {int: int, float: float, SINGLE_TYPE: SINGLE_TYPE}
MOST = 1 << 53
"""The types of the operands that are evaluated in a text, and the largest result."""
FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "int": int, WIDE: SINGLE_TYPE}
FUNCTIONS |= {"int64": int, "float": float, "float64": float, "sqrt": np.sqrt, "log": np.log}

ARITHMETIC = r"v?(add|sub|mul|div|sqrt|max|min|fn?m(add|sub))\w*[ps]s$"
DEPENDENT = r"unsafe dependent memory|identify array bounds|[Mm]emory"
INNERMOST = "make a loop over independent elements the innermost one"
REASONS = (
    (
        r"identified as reduction|phi",
        "a round needs the value of the round before it",
        f"{INNERMOST}, or keep a vector of results with cpuopt.kernels.toolkit.lanes",
    ),
    (
        r"number of loop iterations|control flow|early exit|loop exit",
        "the number of rounds is not known before it begins",
        "loop over a range without break or while, and test afterwards",
    ),
    (
        r"reorder floating-point",
        "its options forbid another order of the sum",
        "leave fastmath at the default of @kernel",
    ),
    (
        r"cost-model|not beneficial",
        "LLVM expects no gain from vectors",
        "read and write neighbouring elements, or use the vectors of cpuopt.kernels.toolkit.lanes",
    ),
    (
        r"call",
        "it calls a function that has no vector form",
        "inline the function: write it as @helper(forceinline=True)",
    ),
)
"""LLVM's refusals of a loop: a pattern, what it means, what to try."""


@dataclass(frozen=True)
class CallTime:
    """The shapes of a call, and its time.

    Attributes
    ----------
    shapes : of the arguments, by name.
    ns, least_ns, start_ns : its time, that of the roof, and that of the start of a parallel loop.
    gflops : of multiply-adds at the roof.
    level : the smallest level of memory that holds its arrays.
    nearest : the bytes of the first-level cache.
    """

    shapes: Mapping[str, tuple[int, ...]]
    threads: int
    ns: float
    least_ns: float = 0.0
    start_ns: float = inf
    level: str = ""
    gflops: float = 0.0
    nearest: float = 0.0

    @classmethod
    def of(cls, op: Op | None, timed: Mapping[str, Any], ns: float, threads: int, roofs: Roofs | None) -> CallTime:
        """Return it for a case of `lab.ab.alone`."""
        case: Case = from_json(Case, timed)
        given = [a for a in op.arrays if a.name not in case.absent] if op else []
        shapes = {a.name: tuple(d(case.sizes) for d in a.shape) for a in given}
        if roofs is None:
            return cls(shapes, threads, ns)
        least = roofs.bound(timed["flops"], timed["bytes"], timed.get("operands", WIDE))[0]
        level, nearest = roofs.level(timed["bytes"]), roofs.levels[0].holds(1)
        return cls(shapes, threads, ns, least, 1e3 * roofs.launch_us, level, roofs.gflops, nearest)


@dataclass(frozen=True)
class Finding:
    """What a rule has found; `tries` is empty if it is the rule's."""

    line: int
    seen: str
    gain: float | None = None
    tries: str = ""


@dataclass(frozen=True)
class Advice:
    """A line of advice.

    Attributes
    ----------
    line, text : of the kernel's file.
    seen : the evidence.
    gain : how many times as fast the call can become; None if that is not known, or not about time.
    """

    JSON: ClassVar = ("rule", "line", "text", "seen", "gain", "tries", "said")
    rule: str
    line: int
    text: str
    seen: str
    gain: float | None
    tries: str

    @property
    def said(self) -> str:
        """All in one line."""
        most = "" if self.gain is None else f" (up to {float(f'{self.gain:.2g}'):g} times as fast)"
        return f"{self.rule} line {self.line} {self.seen}; {self.tries}{most}"


class KernelFacts:
    """What is known of a kernel.

    Parameters
    ----------
    op : None for one that is not known in this process.
    text, first : of the kernel's file, and the line in it where the function or its decorators begin.
    refusals : LLVM's reasons not to vectorize, by file and line.
    parallel : whether the machine code starts threads.
    """

    def __init__(
        self,
        op: Op | None,
        text: str,
        first: int,
        loops: Sequence[Loop],
        refusals: Mapping[tuple[str, int], str],
        parallel: bool,
        call: CallTime | None = None,
    ) -> None:
        self.lines, self.refusals = re.split("\r\n?|\n", text), refusals
        self.parallel, self.call = parallel, call
        self.loops = [v for v in loops if v.lines]
        self.tree = tree = ast.Module([], [])
        with suppress(SyntaxError):  # of a file that was saved again
            self.tree = tree = ast.parse(text)
        found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        self.node = next((n for n in found if first in (n.lineno, *(d.lineno for d in n.decorator_list))), None)
        self.names: dict[str, Any] = {}
        scopes = [n for n in found if self.node and n is not self.node and self.node in ast.walk(n)]
        outer, inner = bindings(tree), [bindings(n) for n in (*scopes, *([self.node] if self.node else []))]
        self._assign(tree.body, [name for name, n in outer.items() if n == 1 and not any(name in b for b in inner)])
        shapes = call.shapes if call else {}
        self.types = {a.name: INT if a.dtype.startswith("int") else a.dtype for a in (op.args if op else ())}
        self.types |= {f"{name}_add": INT for name in self.types}
        self.constants = dict(self.names)
        self.names |= {name: np.broadcast_to(SINGLE_TYPE(0), shape) for name, shape in shapes.items()}
        if self.node:
            self.names = {name: x for name, x in self.names.items() if inner[-1][name] < 2}
            self._assign(self.node.body, [name for name, n in inner[-1].items() if n == 1])
        self.params = {a.arg for a in self.node.args.args} if self.node else set[str]()
        self.fors = [n for n in ast.walk(self.node) if isinstance(n, ast.For)] if self.node else []
        self.every = [n for n in ast.walk(tree) if isinstance(n, ast.For)]
        self.helpers = {n.name: n for n in found if n is not self.node and outer[n.name] == 1}

    @cached_property
    def doubles(self) -> Doubles | None:
        """The types in the kernel, and in the functions of its file that it calls."""
        names = {**self.constants, "np": np}
        return Doubles(self.types, names, self.node, self.helpers) if self.node else None

    def _assign(self, body: Sequence[ast.stmt], only: Sequence[str]) -> None:
        """Evaluate those assignments of a block to some names that can be evaluated."""
        for s in body:
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name | ast.Tuple):
                target, x = s.targets[0], self.value(s.value)
                pairs: list[tuple[ast.expr, Any]] = [(target, x)]
                if isinstance(target, ast.Tuple):
                    values = x if isinstance(x, tuple) else [None] * len(target.elts)
                    pairs = [*zip(target.elts, values, strict=False)]
                for name, value in pairs:
                    if isinstance(name, ast.Name) and value is not None and name.id in only:
                        self.names[name.id] = value

    def value(self, e: ast.expr) -> Any:
        """Evaluate an expression of constants and shapes; None if it is something else."""
        with suppress(ArithmeticError, TypeError, LookupError, ValueError, RecursionError):
            match e:
                case ast.Constant(value=int() | float()):
                    return e.value
                case ast.Name(id=name):
                    return self.names.get(name)
                case ast.Tuple(elts=parts):
                    return tuple(map(self.value, parts))
                case ast.UnaryOp(op=ast.USub(), operand=x):
                    return -self.value(x)
                case ast.BinOp(left=x, op=op, right=y) if type(op) in OPERATORS:
                    result = OPERATORS[type(op)](*(NUMBER[type(v)](v) for v in map(self.value, (x, y))))
                    return result if abs(result) < MOST else None
                case ast.Attribute(value=x, attr="shape" | "size" as name) if self.value(x) is not None:
                    return getattr(self.value(x), name, None)
                case ast.Subscript(value=ast.Attribute(attr="shape") as x, slice=k):
                    return self.value(x)[self.value(k)]
                case ast.Call(func=f, args=args, keywords=[]) if (name := last_name(f)) in FUNCTIONS:
                    found = [self.value(a) for a in args]
                    return FUNCTIONS[name](*found) if None not in [x for x in found if np.ndim(x) == 0] else None
        return None

    def extent(self, loop: ast.For) -> int | None:
        """Return the rounds of a loop over a range that begins at 0; None if they are not known."""
        args = loop.iter.args if isinstance(loop.iter, ast.Call) else []
        found = self.value(args[0]) if len(args) == 1 else None
        return found if isinstance(found, int) else None

    @property
    def parallel_loops(self) -> list[ast.For]:
        """The loops whose rounds threads share."""
        found = [n for n in self.fors if isinstance(n.iter, ast.Call) and last_name(n.iter.func) == "prange"]
        return [n for n in found if not any(n is not m and inside(n, m) for m in found)]

    @property
    def innermost(self) -> list[ast.For]:
        """The loops of the text that have no other loop inside."""
        return [n for n in self.fors if not any(isinstance(m, ast.For | ast.While) and m is not n for m in ast.walk(n))]

    def around(self, loop: Loop) -> ast.For | None:
        """Return the innermost loop of the text that has a line of a loop of the machine code."""
        holding = [n for n in self.every if any(n.lineno <= x <= (n.end_lineno or 0) for x in loop.lines)]
        return max(holding, key=lambda n: n.lineno, default=None)

    def refusal(self, loop: Loop) -> str:
        """Return LLVM's reason not to vectorize a loop; empty if it is not known."""
        found = {self.refusals[p] for p in loop.places if p in self.refusals}
        return found.pop() if len(found) == 1 else min(found, key=lambda x: not re.search(DEPENDENT, x), default="")


def bindings(scope: ast.AST) -> Counter[str]:
    """Count how often each name is bound in a module or a function, with its parameters, without functions in it."""
    found, left = Counter[str](), [*ast.iter_child_nodes(scope)]
    while left:
        match n := left.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] += 1
                continue
            case ast.Lambda():
                continue
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                found[name] += 1
            case ast.alias(name=name, asname=other):
                found[(other or name).partition(".")[0]] += 1
        left += ast.iter_child_nodes(n)
    return found


def inside(n: ast.For, m: ast.For) -> bool:
    """Return whether a loop is inside another one."""
    return m.lineno <= n.lineno and (n.end_lineno or 0) <= (m.end_lineno or 0)


def accesses(loop: ast.AST, kind: type[ast.expr_context] | None = None) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and the index of each element that a loop reads or writes."""
    for n in ast.walk(loop):
        match s := n.target if isinstance(n, ast.AugAssign) else n:
            case ast.Subscript(value=ast.Name(id=name), slice=index, ctx=ctx) if not isinstance(index, ast.Slice):
                if kind is None or isinstance(ctx, kind) or s is not n:
                    yield name, index


def mentions(e: ast.AST, name: str) -> bool:
    """Return whether an expression has a name in it."""
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(e))


def variable(loop: ast.For) -> str:
    """Return the name of a loop's variable; empty if it has several."""
    return loop.target.id if isinstance(loop.target, ast.Name) else ""


Find = Callable[[KernelFacts], Iterator[Finding]]
RULES: dict[str, tuple[Find, str]] = {}
"""By its name, what yields the findings of a rule, and what to try."""


def rule(name: str, tries: str) -> Callable[[Find], Find]:
    """Register a rule; docs/lines.md says what it finds, and where its gain comes from."""

    def registered(find: Find) -> Find:
        RULES[name] = find, tries
        return find

    return registered


# The machine code -----------------------------------------------------------------------------------------------------


@rule("C01", "what the reason asks for: a local array, a local variable, another innermost loop")
def scalar(f: KernelFacts) -> Iterator[Finding]:
    """Find innermost loops that LLVM refused to vectorize."""
    for loop in f.loops:
        computes = any(re.match(ARITHMETIC, i.opcode) for i in loop.code)
        if loop.width != 1 or not computes or loop.remainder or loop.calls or not (why := f.refusal(loop)):
            continue
        node = f.around(loop)
        if re.search(DEPENDENT, why):
            seen, tries = dependent(node)
        else:
            seen, tries = next(((s, t) for p, s, t in REASONS if re.search(p, why)), ("", ""))
            if not seen:  # a reason that is not known says nothing
                continue
        gain = LANES * max(1.0, chain(loop.code)[0] / busy(loop))
        yield Finding(node.lineno if node else loop.lines[0], f"is not vectorized: {seen}", gain, tries)


def dependent(loop: ast.For | None) -> tuple[str, str]:
    """Say which array keeps a loop from being vectorized, and what helps."""
    written, read = (list(accesses(loop, kind)) if loop else [] for kind in (ast.Store, ast.Load))
    both = sorted({n for n, _ in written} & {n for n, _ in read})
    if not loop or not both:
        return "arrays that it reads and writes may overlap", "write to a local array, and copy it afterwards"
    v = variable(loop)
    seen = f"{' and '.join(both)} {'is' if len(both) == 1 else 'are'} read and written"
    if not any(mentions(i, v) for n, i in written if n in both):
        return seen, "sum in a local variable, and store it after the loop"
    parts = [(n, p) for n, i in (*written, *read) if n in both for p in getattr(i, "elts", [i])]
    if len({(n, ast.unparse(p)) for n, p in parts if mentions(p, v)}) > len(both):
        return f"{seen}, and a round needs the round before it", INNERMOST
    return seen, "keep the state in a local array"


@rule("C02", "give a round more neighbouring elements and no 64-bit numbers, or use cpuopt.kernels.toolkit.lanes")
def narrow(f: KernelFacts) -> Iterator[Finding]:
    """Find vectors that are narrower than the machine's."""
    for loop in f.loops:
        computes = any(re.match(ARITHMETIC, i.opcode) for i in loop.code)
        if 1 < loop.width < LANES and computes and not (loop.remainder or loop.branches or loop.calls or loop.doubles):
            seen = f"computes {loop.width} floats at a time; the machine's vectors hold {LANES}"
            yield Finding(loop.lines[0], seen, LANES / loop.width)


@rule("C03", "use fewer local variables at once: a smaller tile, or two loops")
def spilled(f: KernelFacts) -> Iterator[Finding]:
    """Find innermost loops that move much between registers and the stack."""
    for loop in f.loops:
        if loop.spills >= SPILLED * loop.instructions and not (loop.branches or loop.calls):
            line = next((i.line for i in loop.code if i.spill and i.line), loop.lines[0])
            seen = f"has too few registers: {loop.spills} of {loop.instructions} instructions of the loop are spills"
            yield Finding(line, seen, loop.instructions / (loop.instructions - loop.spills))


@rule("C04", "run the innermost loop along the last axis, or copy what it reads to a contiguous buffer first")
def gathered(f: KernelFacts) -> Iterator[Finding]:
    """Find vectors that are collected element by element."""
    for loop in f.loops:
        found = [i for i in loop.code if i.line and re.match(r"vp?gather", i.opcode)]
        single = [i for i in loop.code if i.line and i.load and i.opcode in ("vinsertps", "insertps", "vpinsrd")]
        if found or (
            len(single) >= FEW_TRIPS and not loop.calls
        ):  # results of a call for each element are collected too
            line = (found or single)[0].line
            if wraps := shifted(f.around(loop), line):
                seen, tries = (
                    f"reads {wraps} element by element, since an index below 0 would count from the end",
                    SLICED,
                )
            else:
                seen, tries = "reads elements that are not neighbours into a vector", ""
            yield Finding(line, seen, LANES, tries)


def shifted(loop: ast.For | None, line: int) -> str:
    """Return what a line reads at indices that may be below 0 for the compiler; empty if it reads anything else."""
    v = variable(loop) if loop else ""
    if not loop or not v:
        return ""
    begins_at_0 = isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 1
    read = [n for n in ast.walk(loop) if isinstance(n, ast.Subscript) and n.lineno == line and mentions(n.slice, v)]
    for n in read:
        match getattr(n.slice, "elts", [n.slice])[-1]:
            case ast.Name(id=name) if name == v and not begins_at_0:
                continue
            case ast.BinOp(left=x, op=ast.Add() | ast.Sub(), right=y) if v in (ast.unparse(x), ast.unparse(y)):
                if not (mentions(x, v) and mentions(y, v)):
                    continue
        return ""
    return ", ".join(dict.fromkeys(map(ast.unparse, read)))


@rule("C05", "divide once: put terms over a common denominator, and multiply by a reciprocal")
def divided(f: KernelFacts) -> Iterator[Finding]:
    """Find loops that divide, or take roots, several times for each result, and mostly wait for that."""
    for loop in f.loops:
        slow = [i for i in loop.code if re.match(r"v?(div|sqrt)[ps]s$", i.opcode)]
        stores = sum(i.store for i in loop.code)
        cycles, others = sum(DIVIDE[i.width] for i in slow), (loop.instructions - len(slow)) / ISSUED
        if stores and len(slow) >= 2 * stores and cycles > others and slow[0].line:
            each = len(slow) / stores
            seen = f"divides or takes roots {each:.2g} times for each result, in about {cycles:.0f} of "
            seen += f"{max(cycles, others):.0f} cycles"
            yield Finding(slow[0].line, seen, cycles / max(cycles / each, others))


@rule("C06", "write a polynomial without branches, which LLVM vectorizes")
def called(f: KernelFacts) -> Iterator[Finding]:
    """Find calls of libm for each element."""
    for loop in f.loops:
        for name in () if loop.branches else sorted({c for c in loop.calls if LIBM.match(c)}):
            plain, node = name.removesuffix("f"), f.around(loop) or f.node
            calls = [n for n in (*ast.walk(node or f.tree), *ast.walk(f.tree)) if isinstance(n, ast.Call)]
            line = next((n.lineno for n in calls if last_name(n.func) == plain), loop.lines[-1])
            tries = f"use cpuopt.kernels.toolkit.fastmath.{plain}, which is inlined" if plain in OWN else ""
            elements = max(map(prod, f.call.shapes.values()), default=0) if f.call else 0
            gain = f.call.ns / (elements * INLINED / f.call.gflops) if f.call and elements and f.call.gflops else None
            yield Finding(line, f"calls {name} of libm for each element", gain, tries)


@rule("C07", "work on several independent sums or rows at once")
def waiting(f: KernelFacts) -> Iterator[Finding]:
    """Find loops whose rounds wait for a result of the round before them."""
    for loop in f.loops:
        if loop.branches or loop.calls or loop.remainder or (loop.width == 1 and f.refusal(loop)):
            continue
        cycles, line = chain(loop.code)
        if line and cycles > 2 * (least := busy(loop)):
            seen = f"waits for its last round: {cycles:.0f} cycles a round, in which {least:.2g} would do"
            yield Finding(line, seen, cycles / least)


def busy(loop: Loop) -> float:
    """Return the cycles of a round that waits for nothing."""
    computed = sum(max(i.width, PIPES // 2) for i in loop.code if i.width)
    loaded = sum(PIPES if "%zmm" in i.text else PIPES // 2 for i in loop.code if i.load)
    return max(loop.instructions / ISSUED, computed / PIPES, loaded / PIPES)


def chain(code: Sequence[Instruction]) -> tuple[float, int]:
    """Return the cycles of a round that only waits for earlier results, and the line of the last of them."""
    ready: dict[str, float] = {}
    ends, line = [0.0], 0
    moved = {i.operands[-1] for i in code if i.operands}  # an address of other registers is the same in each round
    for _ in range(4):
        for i in code:
            *sources, target = i.operands or [""]
            into = VECTOR.match(target)
            if not into and not i.store:
                continue
            names = [] if "xor" in i.opcode and len(set(i.operands)) == 1 else VECTOR.findall(" ".join(sources))
            names += [x for x in sources if "(" in x and not moved & set(re.findall(r"%\w+", x))]
            if into and (i.fma or ("{%k" in target and "{z}" not in target) or not i.opcode.startswith(("v", "mov"))):
                names.append(into[1])
            start = max((ready.get(r, 0.0) for r in names), default=0.0)
            took = LATENCY if i.store else LATENCIES.get(i.opcode.strip("v")[:3], LATENCY) if i.width else 1
            ready[into[1] if into else target] = start + took
        ends.append(max(ready.values(), default=0.0))
    for i in code:
        into = VECTOR.match((i.operands or [""])[-1])
        line = i.line if into and i.width and ready[into[1]] == ends[-1] else line
    return ends[-1] - ends[-2], line


# Memory ---------------------------------------------------------------------------------------------------------------


def columns(f: KernelFacts) -> Iterator[tuple[int, str, int | None, float]]:
    """Yield innermost loops that walk down a column: line, access, bytes from row to row, gain by the sizes.

    A vector holds no more floats than there are columns. The next column finds its lines in the first-level cache, or,
    if all rows are too many for it, in the second. Without sizes the bytes are None and the gain is 0.
    """
    for loop in f.innermost:
        v, n = variable(loop), f.extent(loop)
        if not v or (n is not None and n <= FEW_TRIPS):
            continue
        for name, index in accesses(loop):
            if name not in f.params or not isinstance(index, ast.Tuple):
                continue
            *rows, last = index.elts
            shape = f.call.shapes.get(name) if f.call else None
            whole = any(
                isinstance(e, ast.Slice) or (isinstance(e, ast.Constant) and e.value is ...) for e in index.elts
            )
            if whole or (shape and len(shape) > len(index.elts)):  # rows
                continue
            if mentions(last, v) or not any(isinstance(e, ast.Name) and e.id == v for e in rows):
                continue
            at = next(k for k, e in enumerate(rows) if isinstance(e, ast.Name) and e.id == v)
            access = f"{name}[{ast.unparse(index).strip('()')}]"
            if not f.call or not shape:
                yield loop.lineno, access, None, 0.0
                continue
            stride = prod(shape[at + 1 :]) * 4
            lost = (n or shape[at]) * min(stride, LINE_BYTES) > f.call.nearest
            yield loop.lineno, access, stride, min(LANES, shape[-1]) * (COLUMN if lost else 1)


@rule("M01", "walk along rows, or pad the rows of a buffer of your own by 64 bytes")
def aliased(f: KernelFacts) -> Iterator[Finding]:
    """Find columns whose elements share the sets of the first-level cache."""
    for line, access, stride, _ in columns(f):
        if stride and stride % PAGE == 0:
            yield Finding(line, f"walks down a column, {access}, in steps of {stride:,} bytes, a multiple of {PAGE:,}")


@rule("M02", "do both in one loop, chunk by chunk")
def reread(f: KernelFacts) -> Iterator[Finding]:
    """Find whole loops, one after the other, that each read the same elements of arrays that the caches lose."""
    if not f.call or f.call.level in ("", "L1", "L2") or not f.node:
        return
    each = []
    for s in f.node.body:
        if isinstance(s, ast.For):
            v = variable(s)
            touched = {n for n, i in accesses(s) if n in f.call.shapes and v and mentions(i, v)}
            each.append((s, ast.dump(s.iter), {n: prod(f.call.shapes[n]) for n in touched}))
    for k, (s, over, now) in enumerate(each):
        again = [n for _, other, before in each[:k] if other == over for n in before if n in now]
        if again:
            total = sum(sum(t.values()) for _, _, t in each)
            once = sum({n: x for _, _, t in each for n, x in t.items()}.values())
            seen = f"reads {' and '.join(dict.fromkeys(again))} again after a loop over all of it, from {f.call.level}"
            yield Finding(s.lineno, seen, total / once)


@rule("M05", "exchange the loops inside of prange, so that the innermost one runs along the last axis")
def strided(f: KernelFacts) -> Iterator[Finding]:
    """Find other columns."""
    for line, access, stride, gain in columns(f):
        if not stride:
            seen = f"walks down a column, {access}, one element of each row; the gain depends on the sizes of a call"
            yield Finding(line, seen)
        elif stride % PAGE:
            yield Finding(line, f"walks down a column, {access}, in steps of {stride:,} bytes", gain)


# Threads --------------------------------------------------------------------------------------------------------------


@rule("T01", "share more and smaller chunks: at least four a thread")
def unshared(f: KernelFacts) -> Iterator[Finding]:
    """Find parallel loops with too few rounds for the threads, and long calls without any."""
    if not f.call or f.call.threads == 1 or not f.node:
        return
    n = f.call.threads
    if not f.parallel and f.fors and f.call.ns > SHORT * f.call.start_ns:
        yield Finding(f.fors[0].lineno, f"runs on 1 of {n} threads", n)
    for loop in f.parallel_loops if f.parallel else ():
        if (chunks := f.extent(loop)) and (gain := n * -(-chunks // n) / chunks) >= UNEVEN:
            yield Finding(loop.lineno, f"has {chunks} rounds for {n} threads", gain)


@rule("T03", "use range() for such sizes, or do more in one parallel loop")
def started(f: KernelFacts) -> Iterator[Finding]:
    """Find calls that would be faster on one thread."""
    if not f.call or f.call.threads == 1 or not f.parallel or f.call.start_ns == inf:
        return
    top, alone = f.parallel_loops, f.call.least_ns * f.call.threads / SLOW
    if f.node and top and all(n in f.node.body for n in top) and 0 < alone < f.call.start_ns / 2:
        seen = f"starts {f.call.threads} threads, which takes {f.call.start_ns / 1e3:.2g} us, for work that takes one "
        seen += f"thread {alone / 1e3:.2g} us at a quarter of the roof"
        yield Finding(top[0].lineno, seen, f.call.ns / max(alone, f.call.ns - f.call.start_ns, CALLED))


# Numbers --------------------------------------------------------------------------------------------------------------


@rule("N01", "sum chunks of fixed size into an array, and add these in order")
def ordered(f: KernelFacts) -> Iterator[Finding]:
    """Find sums that numba splits by threads."""
    known = f.doubles.types if f.doubles else {}
    for loop in f.parallel_loops if f.parallel else ():
        sums = [n for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)]
        own = {id(n.target) for n in sums}
        names = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and id(n) not in own]
        within = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        for n in sums:
            name = ast.unparse(n.target)
            if name not in within and known.get(name) != INT:
                yield Finding(n.lineno, f"sums {name} in an order that depends on the number of threads")


@rule("N02", "write np.float32(...) around its numbers, outside of the function, and around such results")
def widened(f: KernelFacts) -> Iterator[Finding]:
    """Find where an innermost loop turns float32 to float64."""
    inner = {i.line for loop in f.loops for i in loop.code if i.double and i.line}
    if inner and f.doubles and (found := sorted(inner.intersection(f.doubles.made))):
        yield Finding(found[0], "computes in float64, since a number or a result in it is one", 2.0)


def advise(f: KernelFacts) -> list[Advice]:
    """Return the advice on a kernel, the largest gain first; once for each rule and line."""
    found: dict[tuple[str, int], Advice] = {}
    for name, (find, tries) in RULES.items():
        for x in find(f):
            gain = x.gain
            if f.call and f.call.least_ns and name != "N01":
                gain = min(gain or inf, max(1.0, f.call.ns / f.call.least_ns))
            if gain is None or gain >= LEAST:
                text = f.lines[x.line - 1].strip() if 0 < x.line <= len(f.lines) else ""
                found.setdefault((name, x.line), Advice(name, x.line, text, x.seen, gain, x.tries or tries))
    return sorted(found.values(), key=lambda a: -(a.gain or inf))
