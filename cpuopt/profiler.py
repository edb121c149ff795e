"""The clock of the loop: times every call of a training step.

`Profiler` gives the loop a function that reads the clock once between two calls, so kernels contain no timing. A call's
time runs from the end of the one before it and includes its dispatch, about 2 µs of Python. What is left of a step is
time that no kernel accounts for: copying the batch, the sum of the norm, the way from one phase to the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from inspect import signature
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import UserError
from .machine import Others, commits_of, describe, forget_peak, origin, peak_rss_bytes
from .measure.profile import Array, Profile, StepTimes, Sums, passed, refuted
from .measure.quartile import LEAST, lower_quartile
from .measure.roofline import PEAKS, Roofs, fits
from .wording import count, nearest

if TYPE_CHECKING:
    from .building import Bound
    from .engine import Engine
    from .kernels.compile.sampling import ThreadSampler
    from .kernels.registry import Choice
    from .measure.lines import OpLines


class Profiler:
    """Timer of every call of the steps inside ``with profiler.time_step()``; other runs of the engine are not timed.

    Parameters
    ----------
    engine : the engine whose runner is replaced until `remove`.
    clock : in ns.
    keep : the number of steps to remember; of a longer run, the newest.
    regions : what ``toolkit.regions.watch`` returned before the kernels were loaded, to learn how even the threads are.
    sampler : samples the threads, which then learns which call runs.

    Attributes
    ----------
    sampled : the calls by the number that a sample has.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], int] = time.perf_counter_ns,
        keep: int = 1000,
        regions: Array | None = None,
        sampler: ThreadSampler | None = None,
    ) -> None:
        self.engine, self.clock, self.regions, self.sampler = engine, clock, regions, sampler
        self.sampled: list[Bound] = []
        self._numbers: dict[int, int] = {}
        self.steps: deque[StepTimes] = deque(maxlen=keep)
        self._count = 0
        self._runs: list[tuple[Sequence[Bound], Array]] | None = None
        self._readings: list[Array] = []
        self._work: list[Array] = []
        self._replaced = engine.runner
        engine.runner = self.run_calls

    def remove(self) -> None:
        """Restore the engine's own loop; the measurements stay."""
        if self.engine.runner == self.run_calls:
            self.engine.runner = self._replaced

    def run_calls(self, calls: Iterable[Bound]) -> None:
        """Run bound calls in order, with one reading of the clock between two."""
        if self._runs is None:
            self._replaced(calls)
            return
        from .building import run_calls  # numba is imported late

        calls, clock = tuple(calls), self.clock
        marks: list[int] = []
        mark = marks.append
        readings: list[bytes] = []
        reading, totals = readings.append, bytes if self.regions is None else self.regions.tobytes

        def tick() -> None:
            reading(totals())
            mark(clock())

        marked = self._marked(tick, calls)
        marked()
        run_calls(calls, marked)
        if self.regions is not None:
            self._readings.append(np.frombuffer(b"".join(readings), np.int64).reshape(-1, 3))
        self._runs.append((calls, np.array(marks, dtype=np.int64)))
        self._work.append(asked(calls))

    def _marked(self, tick: Callable[[], None], calls: Sequence[Bound]) -> Callable[[], None]:
        """Let a reading of the clock mark the call that comes next, for the sampler."""
        if self.sampler is None:
            return tick
        for bound in calls:
            if id(bound) not in self._numbers:
                self._numbers[id(bound)] = len(self.sampled)
                self.sampled.append(bound)
        mark, numbers = self.sampler.mark, iter([*(self._numbers[id(b)] for b in calls), -1])

        def marked() -> None:
            tick()
            mark[0] = next(numbers)

        return marked

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Time a whole step; one that raises is not counted."""
        runs: list[tuple[Sequence[Bound], Array]] = []
        self._runs, self._readings, self._work = runs, [], []
        try:
            start = self.clock()
            yield
            self.steps.append(StepTimes(self._count, start, self.clock(), runs, self._readings, self._work))
            self._count += 1
        finally:
            self._runs = None
            if self.sampler:
                self.sampler.mark[0] = -1

    def profile(
        self,
        *,
        model: str,
        B: int,
        T: int,
        choice: Choice,
        warmup: int = 1,
        checked: Sequence[dict[str, Any]] = (),
        int8: Sequence[dict[str, Any]] = (),
        roofs: Roofs | None = None,
        doubts: Sequence[str] = (),
        lines: Sequence[OpLines] = (),
    ) -> Profile:
        """Compute a profile from the steps so far.

        Parameters
        ----------
        warmup : the number of first steps to drop; the last step always counts.
        checked : the results of the checks of this run.
        int8 : the errors of products in int8.
        roofs : the machine's roofs on the engine's threads; what a call passes is raised.
        doubts : warnings about the figures.
        lines : see `Profile`.

        Raises
        ------
        UserError
            If no step was measured.
        """
        if not self.steps:
            raise UserError("profile: no step was measured; run at least one inside 'with profiler.time_step()'")
        warmup = min(warmup, self._count - 1)
        steps = [s for s in self.steps if s.number >= warmup]
        step_ms, peak_rss_mb = [(s.end - s.start) / 1e6 for s in steps], peak_rss_bytes() / 1e6
        sums = Sums(steps, roofs)
        if roofs:
            from .measure import rates  # numba is imported late

            sums.roofs, said = rates.raised(roofs, sums.declared())
            doubts = [*doubts, *said]
        ops = sums.op_rows()
        mfu = 100 * sums.least_ns / sums.step_ns if roofs and not PEAKS.keys() & refuted(ops) else None
        return Profile(
            model=model,
            B=B,
            T=T,
            threads=self.engine.threads,
            ranks=self.engine.comm.size,
            threading_layer=_threading_layer(),
            variant=choice.variant,
            swaps=[str(r) for r in choice.swaps],
            steps=len(steps),
            warmup=warmup,
            step_ms={
                "quiet": sums.step_ns / 1e6,
                "median": median(step_ms),
                "min": min(step_ms),
                "max": max(step_ms),
                "mean": fmean(step_ms),
            },
            tokens_per_s=B * T / (sums.step_ns / 1e9),
            peak_rss_mb=peak_rss_mb,
            planned_peak_mb=self.engine.predicted_peak_bytes / 1e6,
            ops=ops,
            layers=sums.layer_rows(),
            unaccounted_ms=sums.between_ns / 1e6,
            profiler_overhead_ms=self.overhead_ms(),
            step_ms_values=step_ms,
            checked=list(checked),
            versions=describe()["versions"],
            origin=origin(),
            raw=steps,
            roofs=sums.roofs,
            mfu=mfu if fits(mfu) else None,
            doubts=[*doubts, *passed(ops)],
            hashes=hashes(self.engine),
            commits=commits_of({k.name: k.file for k in self.engine.kernels}),
            codes=codes(self.engine),
            lines=list(lines),
            int8=list(int8),
        )

    def overhead_ms(self, rounds: int = 21) -> float:
        """Measure the cost of profiling a step, on calls that do nothing: this loop against the one that it replaced.

        The clock's readings, the lists and the arrays are in it.

        Parameters
        ----------
        rounds : how often both run, alternating.
        """
        idle = copy(self.engine)
        idle.runner = self._replaced
        calls = [replace(b, kernel=replace(b.kernel, function=_nothing)) for b in self.engine.calls]
        probe = Profiler(idle, self.clock, keep=1, regions=self.regions)
        plain, timed = [], []
        for _ in range(rounds):
            before = self.clock()
            self._replaced(calls)
            between = self.clock()
            with probe.time_step():
                probe.run_calls(calls)
            plain.append(between - before)
            timed.append(self.clock() - between)
        return max(0.0, lower_quartile(timed) - lower_quartile(plain)) / 1e6


def asked(calls: Sequence[Bound]) -> Array:
    """Return the share of its FLOPs that the data of each call ask for; calls of the same arrays are counted once."""
    known: dict[Any, float] = {}
    shares = np.ones(len(calls))
    for i, bound in enumerate(calls):
        op = bound.call.op
        if op.asked:
            given = dict(zip(op.params, bound.args, strict=False))  # scratch comes behind them
            of = [x if np.isscalar(x) else id(x) for x in (given[n] for n in signature(op.asked).parameters)]
            key = op.asked, op.fixed, *of
            shares[i] = known[key] if key in known else known.setdefault(key, bound.call.asked(given))
    return shares


class Trainable(Protocol):
    """A job whose steps are measured or judged."""

    engine: Engine
    done: int

    def take_step(self, within: Callable[[], AbstractContextManager[object]]) -> Any:
        """Train on the next batch; return what has the ``loss``."""


class Profiled(Trainable, Protocol):
    """The part of a job that `profile` uses."""

    name: str
    settings: Any
    checked: list[dict[str, Any]]
    int8: list[dict[str, Any]]


def profile(
    job: Profiled,
    *,
    warmup: int = 1,
    tick: Callable[[], None] = lambda: None,
    roofs: Roofs | None = None,
    regions: Array | None = None,
    enough_s: float = float("inf"),
    lines: str | None = None,
) -> Profile:
    """Train for a job's steps and some before them, and profile the last, as ``cpuopt profile`` does.

    Parameters
    ----------
    warmup : the steps that come before and are dropped.
    tick : called after each step.
    roofs : the machine's roofs, from `measure.rates.roofs`; measured again at the end, to notice a slower machine.
    regions : see `Profiler`.
    enough_s : the time after which `LEAST` steps or more are enough. Ranks must all take as many steps.
    lines : an op, a glob or a family such as ``matmul``, whose lines are sampled; ``*``: all ops with a share.
    """
    from .kernels.compile.sampling import ThreadSampler  # numba is imported late
    from .kernels.registry import op_matches
    from .kernels.toolkit.regions import PartLog
    from .measure import rates
    from .measure.lines import Slowest, by_line

    there = {b.call.op.name for b in job.engine.calls}
    if lines is not None and not any(op_matches(op, lines) for op in there):
        raise UserError(f"lines of {lines!r}: the step has no such op; {nearest(lines, there)}")
    forget_peak()  # measuring roofs takes more memory than a small model
    s, others = job.settings, Others()
    taken, samples, slowest, parts = 0, list[Array](), Slowest(), None if regions is None else PartLog()
    sampling: AbstractContextManager[ThreadSampler | None] = nullcontext() if lines is None else ThreadSampler()
    with sampling as sampler:
        profiler = Profiler(job.engine, regions=regions, sampler=sampler)
        try:
            for i in range(warmup + s.steps):
                job.take_step(profiler.time_step)
                tick()
                if sampler:
                    sampler.follow()
                    seen, ran = sampler.take(), parts.take() if parts else np.zeros((0, 3), np.int64)
                    if i >= warmup:
                        samples.append(seen)
                        ran[:, 0] = sampler.number(ran[:, 0])
                        slowest.add(i, profiler.steps[-1].runs, seen, ran)
                if i >= warmup:
                    taken += profiler.steps[-1].end - profiler.steps[-1].start
                if i + 1 - warmup >= LEAST and taken >= enough_s * 1e9:
                    break
        finally:
            profiler.remove()
    doubts = [*(others.warnings() if job.engine.comm.size == 1 else ()), *(rates.lower_now(roofs) if roofs else ())]
    how: dict[str, Any] = {"model": job.name, "B": s.B * s.micro_batches, "T": s.T, "choice": job.engine.options.choice}
    how |= {"warmup": warmup, "checked": job.checked, "int8": job.int8, "doubts": doubts, "roofs": roofs}
    if lines is not None:
        wanted = None if lines == "*" else lambda op: op_matches(op, lines)
        how["lines"] = by_line(np.concatenate(samples), profiler.sampled, job.engine.kernels, wanted, slowest)
        if sampler and sampler.lost:
            doubts.append(f"{count(sampler.lost, 'sample')} of lines were lost: more came in a step than are kept")
    return profiler.profile(**how)


def hashes(engine: Engine) -> dict[str, str]:
    """Return the hash of the sources of each kernel of an engine, for `Profile.hashes`."""
    from .kernels.compile.cache import digest  # numba is imported late

    return {k.name: digest(k.function) for k in dict.fromkeys(engine.kernels)}


def codes(engine: Engine) -> dict[str, str]:
    """Return the hash of the machine code of each kernel of an engine, for `Profile.codes`."""
    from .kernels.compile.jit import code_digest  # numba is imported late

    return {k.name: code_digest(k) for k in dict.fromkeys(engine.kernels)}


def _nothing(*args: object) -> None:
    """Do nothing, in place of a kernel."""


def _threading_layer() -> str:
    from .kernels.toolkit.threads import threading_layer  # numba is imported late

    return threading_layer()
