"""Strong scaling of a training step: each call on 1, 2, 4, ... threads, and on one thread cut for more.

A kernel cuts its work by the threads that its scratch is sized for, so every number of threads has calls of its own on
the same arrays. All take turns, step by step, in an order that reverses each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..kernels.toolkit import regions, threads
from ..kernels.toolkit.micro.blocking import LINE
from ..kernels.toolkit.queue import QUEUE
from ..measure.quartile import lower_quartile
from ..measure.rates import monotone
from ..measure.roofline import Raise, Roofs, TimedCall
from ..measure.scaling import CallTimes, Model, Row, Starts, Timed, row, start_of
from ..ops import DECLARED

if TYPE_CHECKING:
    from ..building import Bound
    from ..program.program import Program, Value
    from ..train.job import Job

BETWEEN = "(between calls)"
"""The row for the time of a step that no kernel accounts for."""
WARMUP = 1
"""Rounds that are not counted."""
Side = tuple[int, int]
"""The threads that calls are cut for, and those that run."""


@dataclass(frozen=True)
class InTurn:
    """Arrays that calls of several ops write in a step: a cache takes their lines from another, unless shares agree."""

    arrays: list[str]
    ops: list[str]
    nbytes: int


def in_turn(program: Program) -> list[InTurn]:
    """List the arrays that calls of several ops write, the largest first."""
    writers: dict[Value, dict[str, None]] = {}
    for call in program.calls:
        for v in call.writes:
            writers.setdefault(v, {})[call.op.name] = None
    found: dict[tuple[str, ...], list[Value]] = {}
    for v, ops in writers.items():
        if len(ops) > 1:
            found.setdefault(tuple(ops), []).append(v)
    made = [InTurn([v.name for v in values], [*ops], sum(v.nbytes for v in values)) for ops, values in found.items()]
    return sorted(made, key=lambda one: -one.nbytes)


@dataclass(frozen=True)
class Scaling:
    """The scaling of a step.

    Attributes
    ----------
    threads, projected : the numbers of threads that ran, and those that are predicted.
    gbs : the bandwidth of memory by number of threads that predictions take.
    start_us : the time in which threads start and end, measured and predicted.
    caches, nodes : the last-level caches and the memory nodes that predictions are for.
    assumptions : those of the predictions.
    in_turn : the arrays that calls of several ops write.
    pool_bytes : the bytes that hold one value after the other.
    """

    model: str
    B: int
    T: int
    variant: str
    steps: int
    threads: list[int]
    projected: list[int]
    step: Row
    ops: list[Row]
    layers: list[Row]
    start_us: dict[int, float]
    gbs: dict[int, float]
    caches: int
    nodes: int
    assumptions: list[str]
    in_turn: list[InTurn]
    pool_bytes: int
    doubts: list[str]


def usual_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and all."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


class Stopwatch:
    """The engine's loop with a clock: times calls, and their regions, on bindings of its own.

    Its own work, which is done between calls, is no part of a step: what that takes is taken off.

    Parameters
    ----------
    bindings : for each number of threads that calls are cut for, every call's by the id of the engine's.
    clock : in ns.
    """

    def __init__(self, bindings: Mapping[int, Mapping[int, Bound]], log: regions.Log, clock: Callable[[], int]) -> None:
        self.bindings, self.log, self.clock = bindings, log, clock
        self.found: dict[Side, list[tuple[float, list[tuple[Bound, Timed]]]]] = {}
        self._cut, self._calls, self._own = 1, list[tuple["Bound", Timed]](), 0

    def run(self, calls: Iterable[Bound]) -> None:
        """Run bound calls in order."""
        for bound in calls:
            before = self.clock()
            mine = self.bindings[self._cut][id(bound)]
            self.log.follow(queue(mine))
            self.log.regions()
            start = self.clock()
            mine.kernel.function(*mine.args)
            end = self.clock()
            self._calls.append((bound, Timed(end - start, self.log.regions())))
            self._own += start - before + self.clock() - end
        before = self.clock()
        self.log.follow(None)
        self._own += self.clock() - before

    @contextmanager
    def time_step(self, side: Side) -> Iterator[None]:
        """Time a whole step."""
        self._cut, self._calls, self._own = side[0], [], 0
        start = self.clock()
        yield
        between = self.clock() - start - self._own - sum(t.wall for _, t in self._calls)
        self.found.setdefault(side, []).append((between, self._calls))

    def calls(self, holds: Callable[[float], bool]) -> list[CallTimes]:
        """Return the lower quartile of each call of a step, and of what is between them.

        Parameters
        ----------
        holds : returns whether caches hold so many bytes.
        """
        every = {side: found[WARMUP:] for side, found in self.found.items()}
        found = []
        for i, (bound, _) in enumerate(every[1, 1][0][1]):
            times = {side: _quartile(calls[i][1] for _, calls in steps) for side, steps in every.items()}
            c, updates = bound.call, any(a.kind == "state" for a in bound.call.op.args)
            found.append(CallTimes(c.op.name, c.layer, *_sides(times), c.bytes, holds(c.bytes), updates))
        times = {side: _quartile(Timed(between) for between, _ in steps) for side, steps in every.items()}
        return [*found, CallTimes(BETWEEN, BETWEEN, *_sides(times))]


def _quartile(rounds: Iterable[Timed]) -> Timed:
    return lower_quartile(rounds, lambda t: t.wall)


def _sides(times: Mapping[Side, Timed]) -> tuple[dict[int, Timed], dict[int, Timed]]:
    """Return the times of calls cut for the threads that ran, and those of one thread."""
    return {n: t for (cut, n), t in times.items() if cut == n}, {cut: t for (cut, n), t in times.items() if n == 1}


def queue(bound: Bound) -> Any:
    """Return the queue of a call's chunks; None if it has none."""
    scratch = bound.args[len(bound.call.op.params) :]
    names = (s.name for s in bound.kernel.scratch)
    found = (x for name, x in zip(names, scratch, strict=True) if name == QUEUE[0])
    return next((x for x in found if x.dtype == "int32" and x.size >= 2 * LINE), None)


def measure(
    job: Job,
    counts: Sequence[int],
    projected: Sequence[int] = (),
    *,
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Stopwatch:
    """Train for a job's steps on each number of threads.

    Parameters
    ----------
    counts : numbers of threads, 1 among them.
    projected : numbers of threads to predict; one thread runs what is cut for them.
    tick : called after each step.

    Raises
    ------
    UserError
        If regions cannot be watched, or there is too little memory.
    """
    engine = job.engine
    if max(len(calls) for calls in engine.phases.values()) > regions.ROWS:
        raise UserError("scale: a phase of this model has too many calls to be watched")
    bindings = {}
    for n in sorted({*counts, *projected}):
        with threads.planned_for(n):
            bindings[n] = engine.rescratched()
    sides = [*((n, n) for n in counts), *((n, 1) for n in sorted({*counts, *projected}) if n > 1)]
    watch, before = Stopwatch(bindings, regions.Log(), clock), (engine.runner, engine.threads)
    engine.runner = watch.run
    try:
        for i in range(WARMUP + job.settings.steps):
            for side in sides[:: -1 if i % 2 else 1]:
                engine.threads = side[1]
                job.take_step(lambda side=side: watch.time_step(side))  # type: ignore[misc]
                tick()
    finally:
        engine.runner, engine.threads = before
    return watch


def scaling(
    job: Job,
    watch: Stopwatch,
    counts: Sequence[int],
    projected: Sequence[int],
    roofs: Mapping[int, Roofs],
    bandwidth: float | None = None,
    caches: int = 1,
    nodes: int = 1,
    doubts: Sequence[str] = (),
    raise_roofs: Raise = lambda roofs, calls: (roofs, []),
) -> Scaling:
    """Analyse what was measured.

    Parameters
    ----------
    roofs : the machine's, for each number of threads that ran.
    raise_roofs : raises roofs that some of the calls have passed, as `rates.raised` does.
    bandwidth : of memory in GB/s, for predictions beyond the threads that ran; None: that of all threads here.
    caches, nodes : the last-level caches and the memory nodes that predictions are for.
    """
    most = roofs[max(counts)]
    last = next(v.name for v in most.levels if v.nbytes is None)

    def holds(nbytes: float) -> bool:
        return most.level(nbytes) != last

    calls, known, doubts = watch.calls(holds), dict[int, Roofs](), list(doubts)
    for n in sorted(counts):
        out = [c for c in calls if not c.held and c.op in DECLARED]
        moved = [TimedCall(c.op, c.measured[n].wall, 0.0, c.nbytes) for c in out]
        known[n], said = raise_roofs(roofs[n], moved)
        doubts += said
    known = monotone(known)
    measured = {n: start_of(c.measured[n] for c in calls) for n in counts}
    starts = Starts(measured)
    there = known[max(counts)].bandwidth(last)
    gbs = {n: known[n].bandwidth(last) for n in counts if n > 1} | dict.fromkeys(projected, bandwidth or there)
    model = Model(starts, gbs, caches, nodes).fitted(calls)
    s = job.settings
    return Scaling(
        model=job.name,
        B=s.B,
        T=s.T,
        variant=job.engine.options.choice.variant,
        steps=s.steps,
        threads=list(counts),
        projected=list(projected),
        step=row("step", calls, model),
        ops=_rows(calls, lambda c: c.op, model),
        layers=_rows(calls, lambda c: c.layer, model),
        start_us={n: starts(n) / 1e3 for n in sorted({*counts, *projected})},
        gbs=gbs,
        caches=caches,
        nodes=nodes,
        assumptions=model.assumptions(projected[-1], bandwidth is None) if projected else [],
        in_turn=in_turn(job.engine.program),
        pool_bytes=job.engine.plan.pool_bytes,
        doubts=doubts,
    )


def _rows(calls: Sequence[CallTimes], name: Callable[[CallTimes], str], model: Model) -> list[Row]:
    groups: dict[str, list[CallTimes]] = {}
    for c in calls:
        groups.setdefault(name(c), []).append(c)
    return [row(of, group, model) for of, group in groups.items()]
