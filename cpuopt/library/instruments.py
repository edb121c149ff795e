"""What `Engine.profile` and `Engine.ab` do: measure an engine, with results that show what the verbs print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import building, ops
from ..check.cases import Case, calls_alike
from ..check.gate import require_quick, require_right
from ..check.result import Result
from ..engine import Engine, Step
from ..errors import UserError
from ..files.reading import to_json
from ..kernels import registry
from ..kernels.registry import Choice, Rule
from ..lab import ab as lab
from ..measure import rates
from ..measure.comparison import analyses_up_to, summed
from ..measure.lines import LINES_S, MOST_STEPS
from ..measure.quartile import ENOUGH_S, MOST
from ..models.own import rows_of
from ..profiler import profile as profile_steps
from ..program.program import Call
from ..train.quantization import product_errors
from ..wording import nearest
from .results import ComparisonReport, ProfileReport


def profile(
    engine: Engine, given: Mapping[str, Any], *, steps: int | None, warmup: int, roofs: bool, lines: bool | str
) -> ProfileReport:
    """Measure the time of each op and layer of a training step; see `Engine.profile`."""
    require_trained(engine, "profile")
    enough_s = (LINES_S if lines else ENOUGH_S) if steps is None else inf
    steps = (MOST_STEPS if lines else MOST) if steps is None else steps
    if not all(isinstance(n, int | np.integer) for n in (steps, warmup)) or steps < 1 or warmup < 0:
        raise UserError(f"profile: steps {steps!r}, warmup {warmup!r}; expected 1 or more, and 0 or more")
    checked = check(engine)
    machine = rates.roofs(engine.threads) if roofs else None
    with unchanged(engine):
        job = Repeating.of(engine, given, steps, checked)
        wanted = "*" if lines is True else lines or None
        found = profile_steps(job, warmup=warmup, roofs=machine, enough_s=enough_s, lines=wanted)
    return ProfileReport(found, engine)


def ab(
    engine: Engine,
    op: str,
    a: str,
    b: str,
    given: Mapping[str, Any],
    *,
    layer: str,
    in_step: bool,
    flush: bool,
    rounds: int,
    seed: int,
) -> ComparisonReport:
    """Compare two kernels of an op; see `Engine.ab`."""
    if op not in ops.ALL:
        raise UserError(f"ab {op!r}: no such op; {nearest(op, ops.ALL)}")
    if flush and in_step:
        raise UserError("flush with in_step: a step leaves the caches as they are; give one of the two")
    pair = registry.find(op, a), registry.find(op, b)
    analyses, n = analyses_up_to(rounds), building.set_threads(engine.threads, pair)
    checks = require_quick(pair, n)
    if in_step:
        steps = lab.InStep(with_kernel(engine, Rule(op, layer, b), given), [lab.Change(pair, (layer,))], seed=seed)
        found = lab.of_op(steps, (a, b), seed, analyses, lambda text: None)
    else:
        calls = calls_alike(calls_of(engine, op, layer))
        found = lab.alone(pair, calls, flush=flush, seed=seed, analyses=analyses, other=True)
    checks += found["checks"] + require_quick(pair, n)
    B, T = rows_of(engine.inputs)
    result = to_json({"B": B, "T": T, "threads": n, **found, "checks": checks})
    asked = {"op": op, "a": a, "b": b, "model": type(engine.model).__name__, "layer": layer, "seed": seed}
    how = {"in_step": in_step, "flush": flush}
    return ComparisonReport({**asked, **how, **summed([result]), "results": [result]})


def with_kernel(engine: Engine, rule: Rule, given: Mapping[str, Any]) -> Repeating:
    """Return steps of an engine with one more rule, whose calls rewrites keep, and the weights of another."""
    require_trained(engine, "ab in_step")
    had = engine.options.choice
    choice = Choice(had.variant, [*map(str, had.swaps), str(rule)], [*map(str, had.plan)])
    options = replace(engine.options, choice=choice)
    other = Engine.from_options(engine.model, engine.inputs, options, seed=None, progress=engine.progress)
    for name, x in engine.parameters().items():
        other.parameters()[name][...] = x
    check(other)
    return Repeating.of(other, {**last(engine), **given})


def calls_of(engine: Engine, op: str, layer: str) -> list[Call]:
    """List the calls of an op in the program; if rewrites replace them, in the program without rewrites."""
    own = engine.program.calls
    there = any(c.op.name == op for c in own)
    plain = () if there else building.build(engine.model, engine.inputs).program.calls
    calls = [c for c in (*own, *plain) if c.op.name == op]
    found = [c for c in calls if fnmatchcase(c.layer, layer)]
    if not found:
        layers = dict.fromkeys(c.layer for c in calls)
        why = nearest(layer, layers) if layers else "it does not call it at all"
        raise UserError(f"{op}: {type(engine.model).__name__} does not call it in a layer {layer!r}; {why}")
    return found


def last(engine: Engine) -> dict[str, building.Array]:
    """Return the inputs of the last step."""
    return {name: engine.array(name).copy() for name in engine.inputs}


def check(engine: Engine) -> list[Result]:
    """Check every kernel, also at the sizes of the program."""
    own = [Case.of(b.call) for b in engine.calls if not isinstance(b.call.op, ops.Collective)]
    calls = list(zip(engine.kernels, own, strict=True))  # as they were chosen; what is bound may be compiled code
    return require_right(engine.kernels, calls, threads=engine.threads)


def require_trained(engine: Engine, what: str) -> None:
    """Refuse an engine without a backward."""
    if not engine.program.adjoint:
        raise UserError(f"{what}: this engine was built with train=False; build it without that")


@contextmanager
def unchanged(engine: Engine) -> Iterator[None]:
    """Put back the parameters, the optimizers' states and the number of the step after a block that trains."""
    engine.collect()
    values, number = [*engine.program.parameters, *engine.program.moments], engine.step_number
    before = [engine.array(v).copy() for v in values]
    try:
        yield
    finally:
        with engine.completing("profile"):
            engine.step_number = number
            for v, x in zip(values, before, strict=True):
                np.copyto(engine.array(v), x)


@dataclass
class Repeating:
    """Steps of an engine on one batch, for what measures the steps of a job."""

    engine: Engine
    take: Callable[[], Step]
    name: str
    settings: Any
    checked: list[dict[str, Any]]
    int8: list[dict[str, Any]]
    done: int = field(default=0)

    @classmethod
    def of(cls, engine: Engine, given: Mapping[str, Any], steps: int = 1, checked: Sequence[Result] = ()) -> Repeating:
        """Return the steps on given inputs, and else on those of the last step."""
        B, T = rows_of(engine.inputs)
        settings = SimpleNamespace(steps=steps, B=B, T=T, micro_batches=engine.micro_batches)
        inputs = {**last(engine), **given}
        take, name = partial(engine.step, **inputs), type(engine.model).__name__
        errors = product_errors(engine, {n: inputs[n] for n in engine.inputs}) if checked else []
        return cls(engine, take, name, settings, [r.describe() for r in checked], [asdict(e) for e in errors])

    def take_step(self, within: Callable[[], AbstractContextManager[object]]) -> Step:
        """Train on the batch."""
        with within():
            return self.take()
