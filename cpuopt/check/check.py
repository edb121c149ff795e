"""The check of a kernel on small awkward cases, in every mixture of adding and overwriting.

`judge` compares its results with the op's float64 reference. A kernel also fails if it raises, changes an input, writes
outside its arrays, or leaves numba with another number of threads.

The same arguments are given several times: with poison and with what `Filling` has in outputs and scratch; with NaN,
1e30 and -1e30 around the arrays; on each number of threads, with scratch for as many and for all; before and after
other numbers were in the same arrays.
All of these must give the same bits, so a kernel fails if it keeps state, reads outside its arrays, or
varies from call to call. One that does not promise identical bits is compared with the reference each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import RefusedError
from ..isolate.serve import doing
from ..kernels.registry import Kernel
from ..ops.declaration import Op, Spec, sparing
from ..ops.storage import is_float
from ..wording import count
from .cases import (
    FEW,
    NOT_FINITE,
    Arguments,
    Array,
    Case,
    altered,
    arguments,
    elements,
    modes,
    quick_cases,
    scalars,
)
from .fit import usual
from .judge import (
    Wanted,
    beside_usual,
    called,
    counts_up_to,
    expected,
    flags,
    keeping_threads,
    noted,
    prepare,
)
from .memory import (
    FILL,
    HUGE,
    OUTSIDE,
    SCRATCH,
    Filling,
    Memory,
    absent_as_empty,
    bits,
    call_args,
    fill,
)
from .race import shared
from .result import Result, worst
from .sized import NUDGES, at_size, drawn_at_size

Tried = Sequence[tuple[Arguments, Wanted]]
"""Arguments with the wanted results; then, if they are tried, other arguments with theirs."""
REPEATS = 8
"""Calls that are compared to find that a kernel varies from one to the other."""
MOST_VARIED = 1 << 17
"""Elements up to which a case is repeated with other inputs in the same arrays, for which the reference runs too."""


def check_quick(kernels: Iterable[Kernel], *, threads: Sequence[int] = (1, 2)) -> list[Result]:
    """Check kernels on the quick cases of their ops."""
    every = [(k, case) for k in kernels for case in quick_cases(k.op, k.types, k.skips) if k.takes_all(case.types)]
    return [check(k, case, threads=threads) for k, case in every]


Fences = Callable[[Kernel, Case, Sequence[int], int], str]
"""A function of kernel, case, threads and seed to what a kernel does wrong between inaccessible pages, or ""."""


def check(
    kernel: Kernel,
    case: Case | Mapping[str, int],
    *,
    threads: Sequence[int] = (1, 2),
    seed: int = 0,
    given: Arguments | None = None,
    fences: Fences | None = None,
) -> Result:
    """Judge one kernel on one case. An error of the kernel is in the result; nothing is raised for it.

    One that is farther off than rounding explains is compared with the package's kernels on the same numbers. This is
    the one way in which a kernel is judged, whoever asks; a kernel of another process is a function that calls it.

    Parameters
    ----------
    case : or its sizes alone, by symbol.
    threads : numbers of threads to run on; numbers above numba's own are left out. At its size, the largest counts.
    seed : the random seed of the arguments, the same for all variants of an op.
    given : of a case at its size the arguments, and scratch, by name, which are copied; by default drawn.
    fences : asked once a kernel is right, as far as it has been called.
    """
    case, start = case if isinstance(case, Case) else Case(case), perf_counter()

    def run(k: Kernel) -> Result:
        mine = given
        if given and k is not kernel:  # whose scratch is another
            mine = {a.name: given[a.name] for a in k.op.args}
        return _checked(k.of(case.types), case, threads, seed, mine)

    result = beside_usual(kernel, run(kernel), run)
    if fences and not (case.sized or result.refused) and (wrong := fences(kernel.of(case.types), case, threads, seed)):
        result = replace(result, ratio=inf, reason=wrong)
    return replace(result, seconds=perf_counter() - start)


def _checked(kernel: Kernel, case: Case, threads: Sequence[int], seed: int, real: Arguments | None) -> Result:
    op, given = kernel.op, Arguments()
    with keeping_threads() as most:
        counts = counts_up_to(most, threads)
        try:
            scratch = prepare(kernel, case.sizes)
            if case.sized:
                for nudges in (0, NUDGES):
                    given = drawn_at_size(op, case, seed) if real is None else dict(real)
                    result = at_size(kernel, case, given, scratch, max(counts), real is not None, nudges)
                    if not result.refused or result.ratio == inf:
                        break
            else:
                tried, rng = asked(op, case, seed)
                given, flags = tried[0][0], modes(op) if case.adds is None else [case.adds]
                cuts = {n: prepare(kernel, case.sizes, n) for n in counts} | {most: scratch}
                result = worst([Calls(kernel, tried, on, cuts, rng).run(counts) for on in flags])
            asks = sum(n for (n,), _ in scratch.values())
            result = replace(result, scratch=asks / max(1, elements(op, case)))
        except RefusedError as e:
            result = Result(kernel.name, case, inf, **e.witness, reason=str(e), fault=e.word)
    return noted(result, given, bool((op.inverts or op).inputs))


def asked(op: Op, case: Case, seed: int) -> tuple[Tried, np.random.Generator]:
    """Return the arguments of a case with the wanted results, and the generator that drew them.

    Unless they are large, they are kept until others are asked for: an op's variants are checked one after another.
    """
    key = op, op.reference, str(case), seed
    if key not in _last:
        doing(f"the reference of {op.name}")
        _last.clear()
        rng = np.random.default_rng(seed)
        found = _asked(op, case, seed, rng), rng
        if elements(op, case) > FEW:
            return found
        _last[key] = found
    tried, rng = _last[key]
    return tried, deepcopy(rng)


_last: dict[Any, tuple[Tried, np.random.Generator]] = {}


def _asked(op: Op, case: Case, seed: int, rng: np.random.Generator) -> Tried:
    known = scalars(op, case, rng)
    given = arguments(op, case, rng, given_scalars=known)
    tried = [(given, expected(op, case, given, rng))]
    if case.kind in NOT_FINITE:
        finite = arguments(op, replace(case, kind="three"), np.random.default_rng(seed), given_scalars=known)
        fewer = [finite]
        for n, x in given.items():
            if is_float(x):
                fewer.append({**given, n: np.where(np.isfinite(x), x, finite[n])})
        spared = [expected(op, case, without, rng) for without in fewer]
        marks: list[bool] = []

        def left_out(x: Array, hidden: Array) -> Array:
            marks.append(True)
            return np.where(hidden, 0, x)

        with sparing(left_out):
            first = expected(op, case, given, rng)
            spared += [first, *(expected(op, case, without, rng) for without in fewer[1:])] if marks else []
        tried[0][1].spared = {
            n: [(s.values[n], s.whole_scale(op.by_name[n])) for s in spared] for n in spared[0].values
        }
    if case.kind == "normal" and sum(x.size for x in given.values() if isinstance(x, np.ndarray)) <= MOST_VARIED:
        other = arguments(op, case, np.random.default_rng(seed), altered(rng), scalars(op, case, rng))
        tried.append((other, expected(op, case, other, rng)))
    return tried


def differing(got: Mapping[str, Array], first: Mapping[str, Array]) -> str:
    """Return the name of the first array with other bits than in another call; or ""."""
    return next((name for name, x in got.items() if not np.array_equal(bits(x), bits(first[name]))), "")


class Calls:
    """A kernel on one case in one mode: several calls in the same arrays."""

    def __init__(
        self,
        kernel: Kernel,
        tried: Tried,
        adds: Mapping[str, bool],
        cuts: Mapping[int, Mapping[str, Spec]],
        rng: np.random.Generator,
    ) -> None:
        self.kernel, self.adds, self.rng, self.filling = kernel, adds, rng, Filling()
        self.cuts = {n: {name: length for name, ((length,), _) in scratch.items()} for n, scratch in cuts.items()}
        """The lengths of scratch, by the number of threads that the kernel cuts its work for."""
        self.most = max(cuts)
        scratch = {
            name: ((max(lengths[name] for lengths in self.cuts.values()),), dtype)
            for name, (_, dtype) in cuts[self.most].items()
        }
        self.sides = [self.side(*w) for w in tried]
        """Two sides, one for each arguments."""
        wanted, contents = self.sides[0], self.sides[0].contents
        self.written = [a.name for a in kernel.op.written if a.name in wanted.values]
        self.fresh = [n for n in self.written if kernel.op.by_name[n].kind != "state" and not adds.get(n)]
        """The arrays whose content the call must not use."""
        self.scratch = list(scratch)
        self.poison = {n: np.empty_like(contents[n]) for n in self.fresh}
        self.poison |= {name: np.empty(*spec) for name, spec in scratch.items()}
        for name, x in self.poison.items():
            fill(x, SCRATCH if name in scratch else FILL)
        self.memory = Memory({**contents, **self.poison}, [a.name for a in kernel.op.arrays if a.kind == "index"])
        self.args = [call_args(kernel.op, self.memory.arrays, given, adds) for given, _ in tried]
        """The arguments of each side, scratch aside: the same arrays with other numbers."""

    def side(self, given: Arguments, wanted: Wanted) -> Wanted:
        """Fill gradients that are added to with numbers as large as the terms; return what is wanted then."""
        starts = {}
        for name in (n for n, on in self.adds.items() if on and n in wanted.values):
            finite = wanted.values[name][usual(wanted.values[name])]
            size = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
            x = (size or 1.0) * self.rng.standard_normal(given[name].shape)
            if wanted.case.kind == "zeros":  # as in a first micro-batch
                x.flat[::2] = 0
            starts[name] = x.astype(given[name].dtype)
        found = wanted.added_to(starts, self.adds)
        return replace(found, contents=absent_as_empty(self.kernel, given) | starts)

    def run(self, counts: Sequence[int]) -> Result:
        """Call a kernel in all circumstances; of one that fails, say whether two equal calls differ on several threads.

        Raises
        ------
        RefusedError
            For a kernel that fails whatever the tolerance.
        """
        try:
            result = self._run(counts)
            return replace(result, reason=result.reason + self.race(counts[-1])) if result.refused else result
        except RefusedError as e:
            if not (e.witness and (said := self.race(counts[-1]))):
                raise
            raise RefusedError(f"{e}{said}", e.word, e.witness) from e

    def race(self, n: int) -> str:
        """Return that equal calls differ on n threads, and not on one, with the line that shows it; or ""."""
        with suppress(RefusedError):
            if n > 1 and self.varies(n) and not self.varies(1):
                said = f"; two calls with equal inputs differ: a race? {shared(self.kernel.function)}"
                return said.rstrip()
        return ""

    def varies(self, n: int) -> bool:
        """Return whether calls in the same circumstances give other bits."""
        first, *others = (self.call(n) for _ in range(REPEATS))
        return any(differing(got, first) for got in others)

    def _run(self, counts: Sequence[int]) -> Result:
        """Call with each number of threads and in every circumstance; judge the first call, and compare the others."""
        one, most = counts[0], counts[-1]
        self.one = one
        first = self.call(one)
        results = [self.judged(first, one)]
        each = counts if len(counts) > 1 else [*counts, *counts]
        circumstances = [*zip(each, cycle(self.filling.kinds())), (most, "almost")]
        if not self.kernel.same_bits:  # then poison shows what some number of threads leaves out
            circumstances = [*((n, "poison") for n in counts[1:]), *circumstances]
        for i, (n, kind) in enumerate(circumstances):
            results += self.compared(first, n, self.filled(kind, first), HUGE[i % 2])
        if len(self.sides) > 1:
            then = "once other numbers were put into the same arrays, and what it wrote was left"
            left = {n: self.memory.arrays[n].copy() for n in self.poison}
            results.append(self.judged(self.call(most, left, other=1), most, f", {then}", other=1))
            left = self.filled("almost", first) | {n: self.memory.arrays[n].copy() for n in self.scratch}
            results += self.require_same(
                first, self.call(most, left), most, lambda: "in a second call" if self.varies(most) else then
            )
        return next((r for r in results if r.refused), worst(results))  # the first says it most plainly

    def filled(self, kind: str, first: Mapping[str, Array]) -> dict[str, Array]:
        """Return what outputs and scratch hold before a call; `first` has the right results."""
        if kind == "poison":
            return self.poison
        made = {n: np.empty_like(x) for n, x in self.poison.items()}
        for n, x in made.items():
            self.filling.put(x, kind, first.get(n))
        return made

    def compared(self, first: Mapping[str, Array], n: int, before: Mapping[str, Array], around: int) -> list[Result]:
        """Call with the first call's arguments in other circumstances, with scratch for n threads."""

        def differs(n: int, **more: Any) -> bool:
            return bool(differing(self.call(n, **more), first))

        def why() -> str:
            """Change one circumstance after the other."""
            if any(differs(self.one) for _ in range(2)):
                return "in a second call"
            if self.varies(n):
                return f"in a second call on {n} threads"
            if n != self.one and differs(n):
                return f"with {n} threads instead of {self.one}"
            if differs(n, cut=n):
                return f"with scratch for {count(n, 'thread')} instead of {self.most}"
            if differs(n, around=around, cut=n):
                return "when other numbers lie around its arrays: it reads outside them"
            return f"when other numbers are in its outputs and scratch before the call: it relies on them{self.filling}"

        return self.require_same(first, self.call(n, before, around, cut=n), n, why)

    def require_same(
        self, first: Mapping[str, Array], got: Mapping[str, Array], n: int, why: Callable[[], str]
    ) -> list[Result]:
        """Require the bits of the first call or, of a kernel that does not promise them, right values."""
        if not self.kernel.same_bits:
            return [self.judged(got, n)]
        if name := differing(got, first):
            changed = bits(got[name]) != bits(first[name])
            at = tuple(map(int, np.unravel_index(int(changed.argmax()), changed.shape)))
            where = {"argument": name, "index": at, "got": float(got[name][at])}
            where["want"] = float(self.sides[0].values[name][at])
            raise RefusedError(f"'{name}' has other bits {why()}{flags(self.adds)}", witness=where)
        return []

    def call(
        self,
        n: int,
        before: Mapping[str, Array] | None = None,
        around: int = OUTSIDE,
        other: int = 0,
        cut: int | None = None,
    ) -> dict[str, Array]:
        """Call once, and return the arrays that were written.

        Parameters
        ----------
        before : the content of outputs and scratch before the call; poison by default.
        other : 1 for the other arguments.
        cut : the number of threads that scratch has the size for; None: all.
        """
        contents, memory = self.sides[other].contents, self.memory
        memory.surround(around)
        memory.put({**contents, **(self.poison if before is None else before)})
        work = [memory.arrays[name][:length] for name, length in self.cuts[cut or self.most].items()]
        called(self.kernel, self.args[other] + work, n, flags(self.adds))
        memory.require_whole()
        memory.require_same({name: x for name, x in contents.items() if name not in self.written})
        return {name: memory.arrays[name].copy() for name in self.written}

    def judged(self, got: Mapping[str, Array], n: int, then: str = "", other: int = 0) -> Result:
        """Compare the results of a call with the wanted ones."""
        on = f", {n} threads" if not self.kernel.same_bits else ""
        result = self.sides[other].judge(self.kernel, got, on + then)
        if result.ratio == inf:
            where = {k: getattr(result, k) for k in ("argument", "index", "got", "want")}
            raise RefusedError(result.reason, witness=where)
        return result
