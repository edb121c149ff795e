"""The speed of kernels over sizes: each is judged on the arrays of a size, then timed with warm and with cold caches.

The kernels of a size take turns. A variant that is wrong at one size has no figures at any. One that cannot finish in
time has those of the other sizes.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import numpy as np

from .. import models
from ..check.cases import Case
from ..errors import UNCHECKED, UserError
from ..files.reading import to_json
from ..kernels.registry import Kernel
from ..kernels.toolkit import threads as numba_threads
from ..machine import Counted, Others, available_bytes
from ..measure.comparison import judge, schedule
from ..measure.quartile import lower_quartile
from ..measure.roofline import Raise, Roofs, TimedCall
from ..ops import DECLARED
from ..ops.declaration import Op
from ..ops.storage import WIDE
from ..train.job import Settings
from ..wording import nearest, text_of
from .ab import Alone, calls_of, case_at, cost, require_possible

Array = np.ndarray[Any, Any]
Progress = Callable[[str, float, float], None]
"""Called with what is measured, the work done and the whole work."""
ROUNDS, LEAST = 7, 3
"""Rounds of a size, and the least of them if they take longer than `BUDGET_S`."""
BUDGET_S = 2.0
MOST = 400
"""The most sizes of a sweep."""
DIGITS = 12
"""The most digits of a size."""
PAUSE = 0.15
"""Seconds after which the threads of another library, which spin for a while, have gone to sleep."""
CALLS = 60
"""Calls in the rounds, checks and fillings of a size, about; only the time that remains depends on it."""
COPIES = 12
"""Bytes that a check needs for each byte of a call, about: references in float64, and two sets of inputs."""


def parse_over(text: str) -> tuple[str, list[int]]:
    """Read ``C=128..2048``, which doubles from the first number to the last, or ``C=128,256,384``.

    Raises
    ------
    UserError
        For anything else.
    """
    number = "[1-9][0-9]*"
    found = re.fullmatch(rf"([A-Za-z_]\w*)=({number})(?:\.\.({number})|((?:,{number})*))", text.strip())
    if not found:
        raise UserError(
            f"--over {text!r}: expected SYMBOL=FIRST..LAST, which doubles, or SYMBOL=N,N,...; as C=128..2048"
        )
    if large := next((n for n in re.findall(number, text.partition("=")[2]) if len(n) > DIGITS), ""):
        raise UserError(f"--over: {large[:40]} is too large; expected sizes of up to {DIGITS} digits")
    first = int(found[2])
    if found[3] and int(found[3]) < first:
        raise UserError(f"--over {text!r}: the last size, {found[3]}, is below the first, {first}; swap them")
    if not found[3]:
        return found[1], sorted({first, *(int(n) for n in found[4].split(",") if n)})
    last = int(found[3])
    doubled = itertools.takewhile(lambda n: n < last, (first << i for i in itertools.count()))
    return found[1], [*doubled, last]


def parse_all(texts: Collection[str]) -> dict[str, list[int]]:
    """Read several of `parse_over`, each of another symbol."""
    found = dict(map(parse_over, texts))
    if not texts:
        raise UserError("--over is missing: name a size symbol and its sizes, as in --over C=128..2048")
    if len(found) < len(texts):
        raise UserError(f"--over {' --over '.join(texts)}: expected each symbol once")
    return found


@dataclass(frozen=True)
class Grid:
    """The sizes of a sweep.

    Attributes
    ----------
    over : the sizes of each symbol that varies.
    fixed : the sizes of the other symbols.
    source : where those that nobody gave come from.
    shapes : the shape of each size.
    costs : the FLOPs and bytes of each shape, as `ab.cost` returns them.
    skipped : sizes that make no call, each with the reason.
    """

    over: dict[str, list[int]]
    fixed: dict[str, int]
    source: str
    shapes: list[Case]
    costs: list[dict[str, Any]]
    skipped: list[str]


def plan(
    op: Op, over: Mapping[str, Sequence[int]], given: Mapping[str, int], settings: Settings, layer: str = "*"
) -> Grid:
    """List the sizes of a sweep.

    Parameters
    ----------
    given : sizes of symbols that do not vary. A symbol without any has that of the op's first call in the model of
        `settings`, which then also decides which arguments are absent, their types, and what is added to gradients.

    Raises
    ------
    UserError
        For a symbol that the op does not have or that is named twice, too many sizes, or a model without such a call.
    """
    asked = [*over, *given]
    if unknown := [s for s in asked if s not in (*op.symbols, *op.counted)]:
        raise UserError(f"--over {unknown[0]}: {op.name} has the symbols {', '.join(op.symbols)}")
    if twice := [s for s in over if s in given]:
        raise UserError(f"--over {twice[0]} with --sizes {twice[0]}: one of the two sets its size")
    if (count := prod(map(len, over.values()))) > MOST:
        raise UserError(f"--over: {count:,} sizes; expected up to {MOST}")
    left = [s for s in op.symbols if s not in asked]
    if left or settings.dtype != WIDE:
        try:
            first = calls_of(op, settings, layer)[0]
        except UserError as e:
            why = f"--sizes lacks {', '.join(left)}" if left else f"--dtype {settings.dtype} takes types from a call"
            raise UserError(f"{e}; it is asked because {why}") from e
        like, source = Case.of(first), f"{settings.model or models.DEFAULT} {settings.B}x{settings.T}, {first.layer}"
    else:
        like, source = case_at(op, {**dict.fromkeys(over, 1), **given}), ""
    known, names = {**like.sizes, **given}, (*op.symbols, *op.counted)
    fixed = {s: known[s] for s in names if s in known and s not in over}
    points = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    shapes, skipped = [], []
    for point in points:
        sizes = {s: {**fixed, **point}[s] for s in names if s in known or s in over}
        shape = replace(like, sizes=sizes, layers=("given sizes",))
        if why := impossible(op, shape):
            skipped.append(f"{text_of(point)}: {why}")
        else:
            shapes.append(shape)
    if not shapes:
        raise UserError(f"--over: no size makes a call; {skipped[0]}")
    return Grid(
        {s: [*n] for s, n in over.items()}, fixed, source, shapes, [cost(op, shape) for shape in shapes], skipped
    )


def impossible(op: Op, shape: Case) -> str:
    """Return why a size makes no call: heads that do not divide the channels, or more memory than there is."""
    sizes = shape.sizes
    if {"C", "NH"} <= sizes.keys() and sizes["C"] % sizes["NH"]:
        return f"NH={sizes['NH']} does not divide C={sizes['C']}"
    needs = COPIES * cost(op, shape)["bytes"]
    if needs > (there := available_bytes()):
        return f"its check needs about {needs / 1e9:.1f} GB, and {there / 1e9:.1f} GB are available"
    return ""


def measure(
    kernels: Sequence[Kernel],
    shape: Case,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[dict[str, Any]]:
    """Judge kernels on the arrays of one shape, time them in turns, and judge them again.

    Returns
    -------
    Of each kernel ``warm_ns`` and ``cold_ns``, the time of a call in each round, ``calls``, how many calls on arrays
    of their own a sample of warm caches has, and ``check``, its worst result.

    Raises
    ------
    UserError
        For a kernel that is wrong, or faster than any machine.
    """
    pair = Alone(kernels, shape, seed, clock=clock)
    n, mixed = numba_threads.get_threads(), len({hasattr(k.function, "py_func") for k in kernels}) > 1
    times = {side: (list[float](), list[float]()) for side in pair.sides}
    start = clock()
    for done, order in enumerate(itertools.islice(schedule(pair.sides, np.random.default_rng(seed)), rounds)):
        if done >= LEAST and clock() - start > BUDGET_S * 1e9 * len(kernels):
            break
        for side in order:
            if mixed and n > 1:
                time.sleep(PAUSE)
            pair.sample(side)
            for ns, cold in zip(times[side], (False, True), strict=True):
                ns.append(pair.trial(side, cold))
    checks, figures = pair.finish(), cost(kernels[0].op, shape)
    for kernel, (warm, _) in zip(kernels, times.values(), strict=True):
        median = float(np.median(warm))
        require_possible([kernel.name] * 2, {**to_json(shape), **figures, "a_ns": median, "b_ns": median}, n)
    return [
        {"warm_ns": warm, "cold_ns": cold, "calls": pair.lengths[side][0], "check": checks[i].describe()}
        for i, (side, (warm, cold)) in enumerate(times.items())
    ]


Ask = Callable[[Sequence[str], Case], Sequence[Mapping[str, Any]]]
"""What `measure` returns, for the variants of these names."""


def asking(do: Callable[..., dict[str, Any]], op: str, more: Mapping[str, Any]) -> Ask:
    """Make the function that asks `lab.worker` by `do`; `more` has ``threads``, ``seed`` and ``rounds``."""

    def ask(variants: Sequence[str], shape: Case) -> Sequence[Mapping[str, Any]]:
        found: list[dict[str, Any]] = do("sweep", op=op, variants=[*variants], shape=to_json(shape), **more)["found"]
        return found

    return ask


class Sweep:
    """The measurements of a sweep, by size; those that are there stay if it is interrupted.

    Attributes
    ----------
    refused : the reason for each variant that is wrong at a size.
    late : sizes at which a variant did not finish in time.
    """

    def __init__(self, op: str, variants: Sequence[str], planned: Grid, roofs: Roofs) -> None:
        self.op, self.variants, self.plan, self.roofs = op, list(variants), planned, roofs
        self.found: list[tuple[Case, dict[str, Mapping[str, Any]]]] = []
        self.refused: dict[str, str] = {}
        self.late: list[str] = []
        self.finished = False
        self.doubts: list[str] = []

    def run(
        self, ask: Ask, progress: Progress = lambda text, done, whole: None, workers: Iterable[Counted] = ()
    ) -> None:
        """Measure all sizes, until Ctrl-C; `workers` are the processes that `ask` asks."""
        others, work = Others(workers), [self._work(figures) for figures in self.plan.costs]
        try:
            for i, shape in enumerate(self.plan.shapes):
                at = text_of({s: shape.sizes[s] for s in self.plan.over})
                progress(f"{at}: {i + 1} of {len(work)}", sum(work[:i]), sum(work))
                left = [v for v in self.variants if v not in self.refused]
                self.found.append((shape, dict(self._asked(ask, left, shape)) if left else {}))
            self.finished = True
        except KeyboardInterrupt:
            self.doubts.append(f"interrupted: {len(self.found)} of {len(work)} sizes are measured")
        self.doubts += others.warnings()

    def _work(self, figures: Mapping[str, Any]) -> float:
        """Return about the seconds that a size takes."""
        return 1 + CALLS * len(self.variants) * self.roofs.bound(figures["flops"], figures["bytes"])[0] / 1e9

    def _asked(self, ask: Ask, left: Sequence[str], shape: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Measure variants together; if there is an error, each by itself, to find whose it is."""
        try:
            yield from zip(left, ask(left, shape), strict=True)
        except UserError as e:
            if len(left) > 1:
                for variant in left:
                    yield from self._asked(ask, [variant], shape)
            elif getattr(e, "word", "") == UNCHECKED:
                self.late.append(f"{left[0]} at {text_of(shape.sizes)}: {e}")
            else:
                self.refused[left[0]] = str(e)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the figures of each size and variant, without variants that are wrong somewhere."""
        for (shape, found), figures in zip(self.found, self.plan.costs, strict=False):
            known = {v: r for v, r in found.items() if v not in self.refused}
            base = next(iter(known.values()), None)
            for variant, r in known.items():
                row = {"sizes": dict(shape.sizes), "variant": variant, **figures, "calls": r["calls"]}
                row["check"] = r["check"]
                for caches, held in ("warm", figures["bytes"] * r["calls"]), ("cold", inf):
                    row[caches] = self._placed(figures, r[f"{caches}_ns"], held)
                if base and r is not base:
                    pairs = zip(r["warm_ns"], base["warm_ns"], strict=False)
                    row["ratio"] = judge([[b / a for b, a in pairs]]).to_json()
                yield row

    def _placed(self, figures: Mapping[str, Any], ns: Sequence[float], held: float) -> dict[str, Any]:
        """Return the time of the lower quartile, its rates, and its place under the roof."""
        low = lower_quartile(ns)
        least, roof = self.roofs.bound(figures["flops"], figures["bytes"], figures["operands"], held)
        rates = {"gflops": figures["flops"] / low, "gbs": figures["bytes"] / low}
        return {"ns": low, **rates, "roof": roof, "roof_ns": least, "of_roof": 100 * least / low, "ns_values": ns}

    def record(self, raise_roofs: Raise = lambda roofs, calls: (roofs, []), **more: Any) -> dict[str, Any]:
        """Return all figures.

        Parameters
        ----------
        raise_roofs : raises roofs that some of the calls have passed, as `rates.raised` does.
        more : what the record says besides.
        """
        rows = [*self._rows()] if self.op in DECLARED else []
        calls = [
            TimedCall(self.op, r[caches]["ns"], r["flops"], r["bytes"], r["operands"], held)
            for r in rows
            for caches, held in (("warm", r["bytes"] * r["calls"]), ("cold", inf))
        ]
        self.roofs, said = raise_roofs(self.roofs, calls)
        self.doubts += said
        rows = [*self._rows()]
        asked = {"op": self.op, "variants": self.variants, "threads": self.roofs.threads, **more}
        sizes = {"over": self.plan.over, "fixed": self.plan.fixed, "source": self.plan.source}
        result = {"rows": rows, "refused": self.refused, "late": self.late, "skipped": self.plan.skipped}
        whole = {**asked, **sizes, **result, "roofs": self.roofs, "finished": self.finished, "doubts": self.doubts}
        found: dict[str, Any] = to_json(whole)
        return found


def default_variants(op: str, given: str, added: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the variants to measure: those of a list such as ``a,b``; else `added` ones and the optimized one.

    Raises
    ------
    UserError
        For one that the op does not have.
    """
    names = [v.strip() for v in given.split(",") if v.strip()]
    if unknown := [v for v in names if v not in known]:
        raise UserError(f"--variants {given!r}: {op} has no variant {unknown[0]!r}; {nearest(unknown[0], known)}")
    usual = ["optimized"] if "optimized" in known else [*known][:1]
    return list(dict.fromkeys(names or [*usual, *added]))


def csv(record: Mapping[str, Any]) -> str:
    """Return the figures as lines of comma-separated values, one for each size and variant."""
    symbols = [*record["over"], *record["fixed"]]
    columns = ("ns", "gflops", "gbs", "roof", "roof_ns", "of_roof")
    head = [*symbols, "variant", "check", "flops", "bytes"]
    head += [f"{caches}_{name}" for caches in ("warm", "cold") for name in columns] + ["ratio", "low", "high"]
    lines = [head]
    for r in record["rows"]:
        ratio = r.get("ratio", {}).get("ratio", {})
        cells = [*(r["sizes"][s] for s in symbols), r["variant"], r["check"]["status"], r["flops"], r["bytes"]]
        cells += [r[caches][name] for caches in ("warm", "cold") for name in columns]
        lines.append([*cells, *(ratio.get(k, "") for k in ("median", "low", "high"))])
    return "".join(",".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in line) + "\n" for line in lines)


USUAL: Mapping[str, Any] = {"model": models.DEFAULT, "B": 4, "T": 64}
"""The job whose calls give the sizes that nobody named."""
