"""The share of each line of source in the time of an op, from samples of running machine code.

A share has a 95 % interval of the binomial distribution (Wilson 1927), as if samples were independent. A line under
`LEAST` samples has no row: it counts in `OpLines.rest`.
"""

from __future__ import annotations

import ast
import linecache
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from ..building import Bound
    from ..kernels.registry import Kernel

    Array = np.ndarray[Any, Any]

Rows = list[tuple[int, int, int]]
"""Threads with two numbers each: the time and the address of a sample, or the start and the end of a part."""
LEAST = 5
"""Samples of the rarest line that has a row."""
SMALL = 1.0
"""Percent of all samples that an op needs to be shown without being asked for."""
LINES_S, MOST_STEPS = 5.0, 1000
"""The time of the steps whose lines are sampled, and their number, if none is given."""
Z = NormalDist().inv_cdf(0.975)
WAITS = "waiting"
"""How the names of rows begin in which threads wait for work."""
SLOWEST = 3
"""The slowest calls of an op, of which each thread is shown."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Samples of one line, or of code that is in no kernel.

    Attributes
    ----------
    file, line, function, text : of the source; empty and 0 for other code, whose name is `function`.
    chain : the calls that were inlined around it, as ``file:line function``, the outermost last.
    share, low, high : percent of the op's samples, and its 95 % interval.
    threads : the samples of each thread of `OpLines.threads`.
    """

    file: str = ""
    line: int = 0
    function: str
    text: str = ""
    chain: list[str] = field(default_factory=list)
    samples: int
    share: float
    low: float
    high: float
    threads: list[int]


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """What a thread did in a call, in us from the call's start.

    Attributes
    ----------
    thread : its number among those of the op; 0 is the main thread, -1 are those that had no tick of CPU time yet.
    parts : when its part of each parallel region began and ended.
    samples : the time of each sample, and the index of its place in `SlowCall.places`.
    """

    thread: int
    parts: list[tuple[float, float]]
    samples: list[tuple[float, int]]


@dataclass(frozen=True, kw_only=True)
class SlowCall:
    """One of the slowest calls of an op.

    Attributes
    ----------
    places : of samples: ``file:line function``, or the name of code that is in no kernel.
    """

    layer: str
    step: int
    us: float
    places: list[str]
    threads: list[ThreadTimes]


@dataclass(frozen=True, kw_only=True)
class OpLines:
    """The lines of an op.

    Attributes
    ----------
    kernels, codes : the kernels that ran, and the digests of their machine code.
    share : percent of all samples in calls.
    threads : samples of each thread that has any, the main thread first.
    rows : lines and other code, by samples.
    functions : the same by function: samples of its lines and of what was inlined into it.
    rest : samples of lines under `LEAST`.
    slowest : its slowest calls, if they were kept.
    """

    op: str
    kernels: list[str]
    codes: list[str]
    samples: int
    share: float
    threads: list[int]
    rows: list[Sampled]
    functions: list[Sampled]
    rest: int
    slowest: list[SlowCall] = field(default_factory=list)


def interval(k: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of which `k` of `n` samples were seen, in percent (Wilson)."""
    p, z = k / n, Z
    middle, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return 100 * max(0.0, (middle - half) / (1 + z * z / n)), 100 * min(1.0, (middle + half) / (1 + z * z / n))


class Slowest:
    """The slowest calls of each op, with what their threads did."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[int, str, int, Rows, Rows]]] = defaultdict(list)

    def add(self, step: int, runs: Sequence[tuple[Sequence[Bound], Array]], samples: Array, parts: Array) -> None:
        """Keep the calls of a step that are slower than those so far.

        Parameters
        ----------
        step, runs : its number, and its calls with the readings of the clock, as in `profile.StepTimes`.
        samples : those of the step, as `by_line` takes them.
        parts : int64 (n, 3): the parts of threads in the step's regions: thread, start and end.
        """
        for calls, marks in runs:
            for bound, start, end in zip(calls, marks.tolist(), marks.tolist()[1:], strict=False):
                kept = self.found[bound.call.op.name]
                if len(kept) < SLOWEST or end - start > kept[-1][0]:
                    seen = samples[(samples[:, 3] >= start) & (samples[:, 3] < end)][:, [1, 3, 0]] - [0, start, 0]
                    ran = parts[(parts[:, 1] >= start) & (parts[:, 1] < end)] - [0, start, start]
                    kept.append((end - start, bound.call.layer, step, seen.tolist(), ran.tolist()))
                    kept.sort(key=lambda call: -call[0])
                    del kept[SLOWEST:]

    def calls(self, op: str, place: Callable[[int], str]) -> list[SlowCall]:
        """Return those of an op, the slowest first; `place` names the place of an address."""
        made, kept = [], self.found.get(op, [])
        known = sorted({0, *(t for *_, seen, ran in kept for t, *_ in (*seen, *ran) if t > 0)})
        for ns, layer, step, seen, ran in kept:
            at = {address: place(address) for _, _, address in seen}
            places = [*dict.fromkeys(at.values())]
            threads = [
                ThreadTimes(
                    thread=i,
                    parts=[(a / 1e3, b / 1e3) for thread, a, b in ran if thread == t],
                    samples=[(when / 1e3, places.index(at[x])) for thread, when, x in seen if thread == t],
                )
                for i, t in (*enumerate(known), (-1, -1))
            ]
            threads = [t for t in threads if t.parts or t.samples]
            made.append(SlowCall(layer=layer, step=step, us=ns / 1e3, places=places, threads=threads))
        return made


def by_line(
    samples: Array,
    calls: Sequence[Bound],
    kernels: Sequence[Kernel],
    wanted: Callable[[str], bool] | None = None,
    slowest: Slowest | None = None,
) -> list[OpLines]:
    """Find the lines of samples, by op.

    Parameters
    ----------
    samples : int64 (n, 4): address, thread, the number of the call that ran, and the time in ns.
    calls : the calls by number.
    kernels : the kernels with their machine code, before they were bound.
    wanted : the ops to show, by name; by default those with `SMALL` percent of the samples or more.
    slowest : the slowest calls of all ops.
    """
    from ..kernels.compile import jit  # numba is imported late
    from ..kernels.compile.places import KernelCode, LineTable, library, line_tables

    samples = samples[samples[:, 2] >= 0]
    ops = [b.call.op.name for b in calls]
    groups: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for (address, thread, call), n in Counter(map(tuple, samples[:, :3].tolist())).items():
        groups[ops[call]][address, thread] += n
    shown = {op for op, g in groups.items() if (wanted(op) if wanted else 100 * g.total() >= SMALL * len(samples))}
    code = KernelCode(kernels)
    used = {p.kernel for op in shown for address, _ in groups[op] if (p := code.find(address))}
    tables = line_tables([k for k in dict.fromkeys(kernels) if k in used])

    def place_at(address: int) -> tuple[Any, ...]:
        if part := code.find(address):
            return tables.get(part.kernel, LineTable({})).find(part, address) or (f"{part.name} (lines unknown)",)
        return (library(address),)

    made = []
    for op in (op for op in dict.fromkeys(ops) if op in shown):
        places: dict[tuple[Any, ...], Counter[int]] = defaultdict(Counter)
        for (address, thread), n in groups[op].items():
            places[place_at(address)][thread] += n
        total = groups[op].total()
        of_thread = sum(places.values(), Counter[int]())
        threads = sorted(of_thread)
        rows = sorted((_row(at, c, threads, total) for at, c in places.items()), key=lambda r: -r.samples)
        ran = list(dict.fromkeys(b.kernel.name for b in calls if b.call.op.name == op))
        made.append(
            OpLines(
                op=op,
                kernels=ran,
                codes=[jit.code_digest(k) for k in dict.fromkeys(kernels) if k.name in ran],
                samples=total,
                share=100 * total / len(samples),
                threads=[of_thread[t] for t in threads],
                rows=[r for r in rows if r.samples >= LEAST],
                functions=_functions(places, threads, total),
                rest=sum(r.samples for r in rows if r.samples < LEAST),
                slowest=slowest.calls(op, lambda address: said(place_at(address)[0])) if slowest else [],
            )
        )
    return made


def _row(at: tuple[Any, ...], by_thread: Counter[int], threads: Sequence[int], total: int) -> Sampled:
    """Make a row of a chain of places, or of the name of other code."""
    n = by_thread.total()
    low, high = interval(n, total)
    figures: dict[str, Any] = {"samples": n, "share": 100 * n / total, "low": low, "high": high}
    figures["threads"] = [by_thread[t] for t in threads]
    if isinstance(at[0], str):
        return Sampled(function=at[0], **figures)
    (file, line), *calls = at
    chain = [said(place) for place in calls]
    text = linecache.getline(file, line).strip()
    return Sampled(file=file, line=line, function=function_at(file, line), text=text, chain=chain, **figures)


def said(place: tuple[str, int] | str) -> str:
    """Write a line as ``file:line function``; the name of other code stays."""
    return place if isinstance(place, str) else f"{place[0]}:{place[1]} {function_at(*place)}"


def _functions(places: dict[tuple[Any, ...], Counter[int]], threads: Sequence[int], total: int) -> list[Sampled]:
    """Sum the samples of each function with what was inlined into it, the largest first."""
    sums: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for at, by_thread in places.items():
        names = [(at[0], "")] if isinstance(at[0], str) else [(function_at(*p), p[0]) for p in at]
        for name in dict.fromkeys(names):
            sums[name].update(by_thread)
    rows = [replace(_row((name,), c, threads, total), file=file) for (name, file), c in sums.items()]
    return sorted((r for r in rows if r.samples >= LEAST), key=lambda r: -r.samples)


def function_at(file: str, line: int) -> str:
    """Return the name of the innermost function that holds a line; empty if there is none."""
    return next((name for first, last, name in definitions(file) if first <= line <= last), "")


def definitions(file: str) -> list[tuple[int, int, str]]:
    """List the functions of a file by first line, which a decorator may have, and last one; inner ones come first."""
    linecache.checkcache(file)
    return _definitions("".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _definitions(text: str) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    with suppress(SyntaxError, ValueError):
        for n in ast.walk(ast.parse(text)):
            if isinstance(n, ast.FunctionDef):
                first = min([n.lineno, *(d.lineno for d in n.decorator_list)])
                found.append((first, n.end_lineno or first, n.name))
    return sorted(found, key=lambda f: f[1] - f[0])
