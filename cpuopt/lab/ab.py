"""The comparison of two kernels of one op: alone, on the shapes that a model has, or inside its real training steps.

Both get the very same arrays, scratch too, so that no address favours one; they are judged on these by `check.timed`. A
trial alone is as many samples as fill `TRIAL_S`, of one call each, or of several if a call is short; its lower
quartile counts, which a process that takes the core away now and then does not move. A trial in the step is one
training step with the op's calls going to one kernel.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from math import inf
from string import ascii_uppercase
from typing import Any

import numpy as np

from .. import models, ops
from ..building import Bound
from ..check.cases import Case, case
from ..check.result import Result, refuse
from ..check.timed import AFTER, AFTERWARDS, BEFORE, OUTS, SELDOM, WHILE, WORK, TimedKernels
from ..errors import CHEATING, RefusedError, UserError
from ..files.reading import from_json, to_json
from ..isolate.process import Worker
from ..isolate.serve import doing
from ..kernels import roofs
from ..kernels.registry import KERNELS, Kernel
from ..kernels.toolkit import threads as numba_threads
from ..machine import Others
from ..measure import rates as machine
from ..measure.comparison import ANALYSES, CHECKED_STEPS, Comparison, Trial, compare, disagreement, judge
from ..measure.quartile import lower_quartile
from ..measure.roofline import Roofs
from ..ops.declaration import Op
from ..ops.storage import WIDE
from ..profiler import Profiler, Trainable
from ..program.program import Call
from ..train.first import judged as on_step
from ..train.job import Settings, build_only, prepare
from ..wording import nearest, spread, text_of

TRIAL_S, SAMPLE_S = 8e-3, 2e-5
"""The length of a trial, and the shortest time that one pair of clock readings measures well enough."""
FAR = 4
"""The largest ratio of both times with which both sides are sampled equally often."""
FILLED = 4
"""How much longer than a trial it may take to fill its arrays; a trial that would take more has fewer samples."""
MOST_CALLS, POOL = 64, 4 << 20
"""The largest number of calls in a sample, and the bytes that their arrays may take together."""
GAINS = "the whole step gains"
"""The first words of the warning that a step gained more than its op."""
SLACK = 0.005
"""The share of a step that other ops may gain from a changed one, for example by data left in the caches."""
MOST_GFLOPS, MOST_GBS = 400.0, 1200.0
"""What no thread of any machine reaches: two FMAs of 16 floats, and three vectors of 64 bytes moved, in each cycle of
6 GHz. Of bfloat16, twice as many multiply-adds."""
IMPOSSIBLE = 4.0
"""The factor by which a time must be below a measured roof to be refused; less is a warning, for roofs are measured
while other processes run."""
COLD_SAMPLES = 3
"""Samples of a trial with flushed caches."""
BESIDE_ROUNDS = 3
"""Rounds, of two trials a side, in the state of the caches that the verdict is not about."""
Say = Callable[[str], None]


def op_named(name: str) -> Op:
    """Return the op of a name; raise a `UserError` if there is none."""
    if name not in ops.ALL:
        raise UserError(f"{name!r}: no such op; {nearest(name, ops.ALL)}; 'cpuopt kernels' lists all")
    return ops.ALL[name]


def calls_of(op: Op, settings: Settings, layer: str = "*") -> list[Call]:
    """List the calls of an op in a model without rewrites; for an op that only rewrites call, with rewrites.

    Raises
    ------
    UserError
        If the model does not call it in such a layer; the error has a flag with which there is something to measure.
    """
    for fuse in ("none", "all"):
        calls = [c for c in build_only(replace(settings, fuse=fuse)).program.calls if c.op is op]
        if calls:
            break
    found, model = [c for c in calls if fnmatchcase(c.layer, layer)], settings.model or models.DEFAULT
    if not found:
        if layers := dict.fromkeys(c.layer for c in calls):
            raise UserError(f"{op.name}: {model} does not call it in a layer {layer!r}; {nearest(layer, layers)}")
        raise UserError(f"{op.name}: {model} does not call it; add {where_it_runs(op)}")
    return found


def settings_of(request: Mapping[str, Any]) -> Settings:
    """Read the settings of a job from a request."""
    settings: Settings = from_json(Settings, request["settings"])
    return settings.sized()


def where_it_runs(op: Op) -> str:
    """Return the flag with which an op can be measured: a model that calls it, else sizes by symbol."""
    models.load_all()
    tiny = [name for name in models.PRESETS if name.endswith("-tiny")]
    if found := next((name for name in tiny if op.name in ops_of(name)), None):
        usual = models.PRESETS[found].model == models.PRESETS[models.DEFAULT].model
        return f"--model {models.DEFAULT if usual else found}"
    return f"--sizes {shlex.quote(text_of(usual_sizes(op)))}"


def usual_sizes(op: Op, B: int = 4, T: int = 64) -> Mapping[str, int]:
    """Return the sizes of an op, by symbol, at GPT-2's widths."""
    return case(op, {"B": B, "T": T, "C": 768, "NH": 12, "OC": 3072, "V": 50257}).sizes


@cache
def ops_of(model: str) -> set[str]:
    """Return the names of the ops that a model calls, with rewrites and without."""
    built = [build_only(Settings(model=model, B=1, T=8, fuse=fuse)) for fuse in ("none", "all")]
    return {c.op.name for b in built for c in b.program.calls}


def case_at(op: Op, sizes: Mapping[str, int]) -> Case:
    """Return an op's call at sizes by symbol; sizes of symbols that it does not have are left out.

    Raises
    ------
    UserError
        If a symbol of the op has no size.
    """
    if missing := [s for s in op.symbols if s not in sizes]:
        given = f"; {', '.join(sizes)} is given" if sizes else ""
        raise UserError(f"--sizes: {op.name} has the symbols {', '.join(op.symbols)}: add {missing[0]}=...{given}")
    adds = {a.name: False for a in op.args if a.kind == "acc"}
    found = {s: sizes[s] for s in (*op.symbols, *op.counted) if s in sizes}
    return Case(found, adds=adds, layers=("given sizes",))


class Alone(TimedKernels):
    """Kernels on the same arrays of one shape; their results are judged before, during and after the timing.

    Parameters
    ----------
    kernels : A, B and so on.
    flush : whether other data fill the caches before each call, unless a trial says otherwise.
    clock : in ns.
    more : as `TimedKernels` takes it.

    Raises
    ------
    UserError
        For a kernel that is wrong on them, here and from every trial.
    """

    trial_s = TRIAL_S

    def __init__(
        self,
        kernels: Sequence[Kernel],
        shape: Case,
        seed: int,
        flush: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
        **more: Any,
    ) -> None:
        self.sides = ascii_uppercase[: len(kernels)]
        typed = {side: k.typed(shape.types) for side, k in zip(self.sides, kernels, strict=True)}
        super().__init__(typed, shape, seed, **more)
        self.clock, self.cold = clock, flush
        self.lengths = dict.fromkeys(self.sides, (1, 1))
        for side in self.sides:
            self.audit(side, BEFORE, "before it was timed")
        self.functions = {side: k.direct().function for side, k in typed.items()}  # compiled by now, as in a step
        self._choose_lengths()

    def spend(self, side: str, every: Sequence[Sequence[Any]]) -> float:
        """Call a kernel with each of some arguments, and return the ns that all took."""
        function, start = self.functions[side], self.clock()
        for args in every:
            function(*args)
        return self.clock() - start

    def _choose_lengths(self) -> None:
        """Choose the number of calls in a sample and of samples in a trial: for all sides by the fastest one.

        A side that takes `FAR` times as long is sampled by itself, or its trials would have no end.
        """
        took = {side: min(self.sample(side) for _ in range(3)) for side in self.sides}
        quick, room = min(took.values()), max(1, POOL // max(1, self.nbytes))
        for side, ns in took.items():
            call_s = max(ns if ns > FAR * quick else quick, 1) / 1e9
            calls = max(1, min(MOST_CALLS, room, int(SAMPLE_S / call_s)))
            self.lengths[side] = calls, max(1, min(1000, int(self.trial_s / (call_s * calls))))
            if self.cold:
                self.lengths[side] = 1, COLD_SAMPLES
        self.place(max(calls for calls, _ in self.lengths.values()))
        self.swap(0)
        most = int(
            FILLED * self.trial_s * 1e9 / max(1, *(min(self._filling(side) for _ in range(3)) for side in self.sides))
        )
        for side, (calls, samples) in self.lengths.items():
            self.lengths[side] = calls, max(min(samples, COLD_SAMPLES), min(samples, most))

    def _filling(self, side: str) -> float:
        start = self.clock()
        self.fill(side, "almost", "numbers", self.lengths[side][0])
        return self.clock() - start

    @cached_property
    def flush(self) -> Callable[[], object]:
        """A function that fills all caches with other data."""
        return _flusher()

    def sample(self, side: str, outs: str = "nan", scratch: str = "nan", cold: bool | None = None) -> float:
        """Return the ns of a call, in one sample that nobody judges."""
        cold = self.cold if cold is None else cold
        calls = 1 if cold else self.lengths[side][0]
        every = self.args[side][:calls]
        self.fill(side, outs, scratch, calls)
        if cold:
            self.flush()
        return self.spend(side, every) / calls

    @property
    def trials(self) -> tuple[Trial, Trial]:
        """The trials of A and B, for a comparison."""
        return partial(self.trial, "A"), partial(self.trial, "B")

    def trial(self, side: str, cold: bool | None = None) -> float:
        """Return the ns of a call: the lower quartile of the samples, of which one drawn at random is judged.

        Parameters
        ----------
        cold : whether other data fill the caches before each call; None as the object was made.
        """
        cold = self.cold if cold is None else cold
        calls, samples = (1, COLD_SAMPLES) if cold else self.lengths[side]
        which, outs, scratch = self.conditions()
        self.swap(which)
        judged = self.rng.integers(samples) if self.rng.random() < self.chance else -1
        times = []
        for i in range(samples):
            times.append(self.sample(side, outs, scratch, cold))
            if i == judged:
                self.judge(side, calls, WHILE)
            else:
                self.probe(side, calls)
        return lower_quartile(times)

    def conditions(self) -> tuple[int, str, str]:
        """Draw the set of inputs of a trial, and the content of outputs and scratch."""
        which, outs, scratch = (int(self.rng.integers(n)) for n in (2, len(OUTS), len(WORK)))
        return which, OUTS[outs], WORK[scratch]

    def rounds(self, analyses: Sequence[int]) -> Sequence[int]:
        """Return the rounds after which there are analyses."""
        return analyses

    def disturbed(self) -> bool:
        """Return whether the round that ends now does not count."""
        return False

    @property
    def busy(self) -> bool:
        """Whether threads waited for a core in most rounds, as far as that is known."""
        return False

    def finish(self) -> list[Result]:
        """Judge each once more, and return the worst result of each."""
        for side in self.sides:
            self.audit(side, AFTER, AFTERWARDS)
        return list(self.worst.values())


def beside(pair: Alone) -> dict[str, Any]:
    """Time A and B in the other state of the caches: ``caches``, ``warm`` or ``cold``, and ``a_ns`` and ``b_ns``."""
    times: dict[str, list[float]] = {"A": [], "B": []}
    for _ in range(BESIDE_ROUNDS):
        for side in "ABBA":
            times[side].append(pair.trial(side, not pair.cold))
    medians = {f"{side.lower()}_ns": float(np.median(ns)) for side, ns in times.items()}
    return {"caches": "warm" if pair.cold else "cold", **medians}


def _flusher() -> Callable[[], object]:
    """Make a function that fills all caches with other data."""
    largest = max(v.nbytes or 0 for v in machine.levels())
    n = numba_threads.get_threads()
    floats = int(2 * largest // 4 // n // roofs.UNIT + 1) * roofs.UNIT
    x, sums = np.zeros(floats * n, WIDE), np.zeros(n, WIDE)
    return lambda: roofs.update(x, sums, n, floats, 1)


def alone(
    kernels: tuple[Kernel, Kernel],
    shapes: Sequence[Case],
    *,
    flush: bool = False,
    seed: int = 0,
    analyses: Sequence[int] = ANALYSES,
    stop_above: float = inf,
    other: bool = False,
    say: Say = lambda text: None,
    clock: Callable[[], int] = time.perf_counter_ns,
    make: Callable[..., Alone] = Alone,
) -> dict[str, Any]:
    """Compare two kernels on some shapes, on as many threads as are set.

    Parameters
    ----------
    make : what holds the kernels and their arrays, from the arguments of `Alone`.
    other : whether both are also timed in the other state of the caches, for ``beside``; no verdict depends on it.

    Raises
    ------
    UserError
        For a kernel that is wrong on the arrays that are timed.
    """
    others, cases, judged = Others(), [], list[Result]()
    done: list[Comparison] = []
    for i, shape in enumerate(shapes):
        say(at := f"{shape}: {i + 1} of {len(shapes)}")
        pair = make(kernels, shape, seed, flush, clock)
        asked: dict[str, Any] = {"stop_above": stop_above, "tick": rounds_told(say, at), "disturbed": pair.disturbed}
        done.append(compare(*pair.trials, seed=seed + i, analyses=pair.rounds(analyses), **asked))
        more = {"beside": beside(pair)} if other else {}
        judged += pair.finish()
        calls = {side: n for side, (n, _) in pair.lengths.items()}
        samples = {side: n for side, (_, n) in pair.lengths.items()}
        counts = {"calls_per_sample": calls, "samples_per_trial": samples, **cost(kernels[0].op, shape)}
        cases.append({**to_json(shape), **entry(done[-1]), **counts, **more, "busy": pair.busy})
        require_possible([k.name for k in kernels], cases[-1], numba_threads.get_threads())
        del pair
    weights = [len(s.layers) * float(np.median(c.figures("A"))) for s, c in zip(shapes, done, strict=True)]
    whole = judge([c.ratios() for c in done], [c.controls() for c in done], weights)
    a_ms = sum(weights) / 1e6
    return {
        **whole.to_json(),
        "a_ms": a_ms,
        "b_ms": a_ms * whole.ratio["median"],
        **({"beside": _summed_beside(cases)} if other else {}),
        "cases": cases,
        "checks": [r.describe() for r in judged],
        "doubts": others.warnings(),
    }


def _summed_beside(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the times in the other state of the caches over all layers, in ms."""
    ms = {f"{x}_ms": sum(len(c["layers"]) * c["beside"][f"{x}_ns"] for c in cases) / 1e6 for x in "ab"}
    return {"caches": cases[0]["beside"]["caches"], **ms}


def rounds_told(say: Say, text: str) -> Callable[[int, int], None]:
    """Make a function that tells of rounds as ``7/24``, at most twice a second, so that the display disturbs little."""
    last = time.monotonic()

    def told(done: int, most: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            say(f"{text}, round {done}/{most}")

    return told


def cost(op: Op, shape: Case) -> dict[str, Any]:
    """Return the FLOPs of a call, the type of what they multiply, and the bytes that the call must move."""
    nbytes = op.bytes(shape.sizes, shape.adds or {}, shape.absent, shape.types)
    return {"flops": op.work(shape.sizes, shape.absent), "bytes": nbytes, "operands": op.operands(shape.types)}


def bound(roofs: Roofs, timed: Mapping[str, Any]) -> tuple[float, str]:
    """Return the least ns of a call by the figures of `cost`, and the roof that sets them."""
    return roofs.bound(timed["flops"], timed["bytes"], timed.get("operands", WIDE))


def entry(found: Comparison, which: int = 0) -> dict[str, Any]:
    """Return the part of a record: the verdict, the median times, and every trial in the order of measuring, in ns."""
    values = {letter: found.figures(letter, which).tolist() for letter in found.times}
    medians = {"a_ns": float(np.median(values["A"] + values["C"])), "b_ns": float(np.median(values["B"]))}
    return {**found.verdict(which).to_json(), **medians, "order": found.order, "ns": values}


@dataclass(frozen=True)
class Change:
    """Calls of one op, in the layers that one of some globs matches, which go to kernel A or to kernel B."""

    kernels: tuple[Kernel, Kernel]
    layers: tuple[str, ...] = ("*",)

    def covers(self, call: Call) -> bool:
        """Return whether a call is one of them."""
        return call.op is self.kernels[0].op and any(fnmatchcase(call.layer, glob) for glob in self.layers)


class InStep:
    """A job in which some calls switch between kernel A and kernel B from step to step.

    Parameters
    ----------
    job : a job, or its settings: with the kernels of B, so that its rewrites keep the calls.
    changes : the calls that switch; all others keep the kernels of the job.
    audits : whether a step is judged now and then, between those that are timed.

    Attributes
    ----------
    layers : the layers of each change.
    workers : other processes that take the steps.
    """

    workers: Sequence[Worker] = ()

    def __init__(
        self,
        job: Settings | Trainable,
        changes: Sequence[Change],
        say: Say = lambda text: None,
        seed: int = 0,
        audits: bool = True,
    ) -> None:
        if isinstance(job, Settings):
            seed, settings = job.seed, job
            job = prepare(settings, lambda done, total, name: say(f"compiling {done}/{total} {name}"))
        self.job, self.engine, self.audits = job, job.engine, audits
        self.layers: list[list[str]] = []
        self.groups: dict[str, list[dict[int, Bound]]] = {"A": [], "B": []}
        for change in changes:
            chosen = [b for b in self.engine.calls if change.covers(b.call)]
            if not chosen:
                where = " or ".join(map(repr, change.layers))
                raise UserError(f"{change.kernels[0].op.name}: the step does not call it in a layer {where}")
            self.layers.append([b.call.layer for b in chosen])
            rebound = []
            for call in chosen:
                pair = [k.typed(call.call.types) for k in change.kernels]
                for k in dict.fromkeys(pair):
                    k.compile()
                rebound.append(self.engine.rebound(call, *pair))
            for i, side in enumerate("AB"):
                self.groups[side].append({id(call): both[i] for call, both in zip(chosen, rebound, strict=True)})
        self.phases = {p: list(calls) for p, calls in self.engine.phases.items()}
        self.backwards = list(self.engine.backwards)
        self.profiler = Profiler(self.engine, keep=1)
        self.rng = np.random.default_rng(seed)
        self.notes = list(job.engine.notes)
        self.judged: list[Result] = []

    def use(self, side: str) -> None:
        """Switch the calls to A or B."""
        swapped = {place: bound for group in self.groups[side] for place, bound in group.items()}
        doing(f"a step with {', '.join(sorted({bound.kernel.name for bound in swapped.values()}))}")
        self.engine.phases = {p: [swapped.get(id(b), b) for b in calls] for p, calls in self.phases.items()}
        self.engine.backwards = [[swapped.get(id(b), b) for b in calls] for calls in self.backwards]

    def take_step(self) -> float:
        """Train for one step, and return its loss."""
        return float(self.job.take_step(self.profiler.time_step).loss)

    @property
    def trials(self) -> tuple[Trial, Trial]:
        """The trials of A and B, for a comparison."""
        return partial(self.trial, "A"), partial(self.trial, "B")

    def trial(self, side: str) -> tuple[float, ...]:
        """Return the ns of a whole step, then of the calls of each change; in some trials a step is judged first."""
        if self.audits and self.rng.random() < 1 / SELDOM:
            self.judged += self.audit("between those that were timed")
        self.use(side)
        self.take_step()
        times = self.profiler.steps[-1]
        took = {id(b): int(ns) for calls, marks in times.runs for b, ns in zip(calls, np.diff(marks), strict=True)}
        mine = (sum(took[id(b)] for b in group.values()) for group in self.groups[side])
        return (float(times.end - times.start), *map(float, mine))

    def audit(self, when: str) -> list[Result]:
        """Train for one step in which a call of each changed op and shape, drawn at random, is judged with A and B.

        Raises
        ------
        UserError
            For a kernel that is wrong on the arrays of the step.
        """
        alike: dict[str, list[tuple[Bound, Bound]]] = {}
        for a, b in zip(self.groups["A"], self.groups["B"], strict=True):
            for place, bound in a.items():
                alike.setdefault(f"{bound.call.op.name} {Case.of(bound.call)}", []).append((bound, b[place]))
        drawn = [pairs[self.rng.integers(len(pairs))] for pairs in alike.values()]
        chosen, results = {id(b): pair for pair in drawn for b in pair[1:]}, list[Result]()

        def judged(calls: Iterable[Bound]) -> None:
            for bound in calls:
                for one in chosen.get(id(bound), ()):
                    results.append(on_step(one, self.engine.threads))
                    refuse(results[-1], f"it is not timed: in a step {when}")
                bound.kernel.function(*bound.args)

        self.use("B")
        usual, self.engine.runner = self.engine.runner, judged
        try:
            self.take_step()
        finally:
            self.engine.runner = usual
        return results

    def checks(self) -> list[dict[str, Any]]:
        """Describe what was found so far in steps that were judged."""
        return [r.describe() for r in self.judged]

    def losses(self) -> dict[str, list[float]]:
        """Return the losses of a few steps with A and with B, from the same weights on the same batches."""
        engine = self.engine
        values = [*engine.program.parameters, *engine.program.moments]
        before = [engine.array(v).copy() for v in values]
        found = {}
        for side in "AB":
            self.use(side)
            for v, x in zip(values, before, strict=True):
                np.copyto(engine.array(v), x)
            self.job.done = engine.step_number = 0
            found[side] = [self.take_step() for _ in range(CHECKED_STEPS)]
        return found


def in_step(
    settings: Settings,
    op: Op,
    variants: tuple[str, str],
    *,
    layer: str = "*",
    seed: int = 0,
    analyses: Sequence[int] = ANALYSES,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Compare two variants inside real training steps.

    Returns
    -------
    The verdict on the op's own time, ``step`` with the verdict on the whole step, and the losses of both.

    Raises
    ------
    UserError
        If the losses of the first steps differ, or the model does not call the op there.
    """
    swap = f"{op.name}{'' if layer == '*' else '@' + layer}={variants[1]}"
    change = Change((KERNELS[op.name, variants[0]], KERNELS[op.name, variants[1]]), (layer,))
    return of_op(InStep(replace(settings, swap=(*settings.swap, swap)), [change], say), variants, seed, analyses, say)


def of_op(pair: InStep, variants: tuple[str, str], seed: int, analyses: Sequence[int], say: Say) -> dict[str, Any]:
    """Compare steps in which one op changes; return what `in_step` does."""
    found, (mine,) = compare_steps(pair, variants, seed, analyses, say, decides=1)
    ms = {"a_ms": mine["a_ns"] / 1e6, "b_ms": mine["b_ns"] / 1e6}
    return {**mine, **ms, "layers": pair.layers[0], **found}


def compare_steps(
    pair: InStep, names: tuple[str, str], seed: int, analyses: Sequence[int], say: Say, decides: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Compare training steps with A and with B.

    Parameters
    ----------
    decides : index of the figure of `InStep.trial` that ends the comparison.

    Returns
    -------
    ``step`` with the verdict on the whole step, the losses of both and warnings; then the verdict on each change.

    Raises
    ------
    UserError
        If the losses of the first steps differ.
    """
    say("first steps")
    losses = pair.losses()
    if refused := disagreement(names, losses["A"], losses["B"]):
        raise RefusedError(refused)
    say("judging a step")
    pair.judged += pair.audit("before any was timed")
    others = Others(pair.workers)
    say("alternating steps")
    tick = rounds_told(say, "alternating steps")
    done = compare(*pair.trials, seed=seed, analyses=analyses, decides=decides, tick=tick)
    say("judging a step again")
    pair.judged += pair.audit("after all were timed")
    whole, *each = (entry(done, i) for i in range(1 + len(pair.layers)))
    warnings = [*others.warnings(), *impossible(whole, each)]
    return {"step": whole, "losses": losses, "doubts": warnings, "notes": pair.notes, "checks": pair.checks()}, each


def impossible(whole: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warn where a whole step gains more than the changed ops could: something else differs. Without any, it may."""
    step, gain = whole["a_ns"], 1 - whole["ratio"]["high"]
    most = sum(r["a_ns"] * (1 - r["ratio"]["low"]) for r in each) / step
    if not each or gain <= max(0.0, most) + SLACK:
        return []
    figures = f"ratio {spread(whole['ratio'])}, control {whole['control']['median']:.3f}"
    return [
        f"{GAINS} {100 * (1 - whole['ratio']['median']):.1f} % ({figures}), more than the op can gain in it, "
        f"{100 * max(0.0, most):.1f} % at the most: something else differs between the two"
    ]


def require_possible(names: Sequence[str], timed: Mapping[str, Any], threads: int) -> None:
    """Refuse a time that no machine allows, or that is far below a roof which was measured on a quiet machine.

    Raises
    ------
    UserError
        Naming the kernel: it cannot have done its work.
    """
    known = machine.stored().get(threads)
    for name, ns in zip(names, (timed["a_ns"], timed["b_ns"]), strict=True):
        most = MOST_GFLOPS * (2 if timed.get("operands") == "bfloat16" else 1)
        least = max(timed["flops"] / (most * threads), timed["bytes"] / (MOST_GBS * threads))
        roof = bound(known, timed)[0] / IMPOSSIBLE if known and not known.doubts else 0.0
        if ns < max(least, roof):
            raise RefusedError(
                f"{name} takes {ns:.0f} ns for {timed['flops']} FLOPs and {timed['bytes']} bytes, which is impossible: "
                f"at least {max(least, roof):.0f} ns are needed on {threads} threads ({from_json(Case, timed)})",
                CHEATING,
            )


def beyond_roofs(variants: Sequence[str], cases: Sequence[Mapping[str, Any]], roofs: Roofs | None) -> list[str]:
    """Warn of times that are less than what the machine's roofs allow."""
    found = []
    for timed in cases if roofs else ():
        assert roofs
        least, name = bound(roofs, timed)
        for variant, ns in zip(variants, (timed["a_ns"], timed["b_ns"]), strict=True):
            if least > ns:
                share = f"{100 * least / ns:.0f} % of the {name} roof"
                found.append(f"{variant} is at {share}, which is impossible ({from_json(Case, timed)})")
    return found
