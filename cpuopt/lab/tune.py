"""`cpuopt tune`: the fastest kernel for each op and shape of a model's training step, as a plan for `--variant auto`.

A kernel takes the place of the default only where

1. it is ``faster`` than it alone, by the verdict of `cpuopt ab` on the very shapes, with caches as a step leaves them;
2. it passes its check on all cases, not just on the quick ones that allow it to be timed;
3. it is not ``slower`` in the step, where caches, memory and threads are shared with all other ops;

and the plan is kept only where steps with all its kernels are ``faster`` than with the defaults, or no difference is
shown. Rewrites are never changed: the ops to tune are those of the rewritten program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

from .. import kernels, ops
from ..check.cases import Case, calls_alike
from ..check.gate import in_child, planned, run
from ..check.result import RIGHT, whole
from ..errors import UserError
from ..files.reading import from_json, to_json
from ..isolate.child import Child
from ..kernels import registry
from ..kernels.compile import cache, jit
from ..kernels.toolkit import threads as numba_threads
from ..measure import rates as machine
from ..program.program import Call
from ..train import plans
from ..train.job import Settings, build_only, model_of
from ..wording import nearest

STOP_ABOVE = 1.5
"""The ratio for an early stop: a kernel whose every trial takes this many times as long gets two rounds."""
UNKNOWN = "unknown"
"""The hash of a kernel that cannot be hashed."""
KEPT = ("faster", "no difference shown")
"""The verdicts on the whole step with which a plan is kept."""


class TuneView:
    """Observer of progress; this one does nothing."""

    def at(self, text: str) -> None:
        """The next measurement begins."""

    def done(self, row: TunedOp, variant: str) -> None:
        """A comparison is done."""


@dataclass
class TunedOp:
    """One op on the shapes that some layers call it on.

    Attributes
    ----------
    shapes : more than one only where the same layers have them all.
    default : the variant that runs without a plan.
    hashes : the hashes of all variants to measure, and of the default.
    tried : the result of each variant: the verdict of `ab`, and that of the check if the variant was faster.
    in_step : the verdict inside the step.
    """

    JSON: ClassVar = ("op", "default", "hashes", "tried", "in_step", "best", "shapes")
    op: str
    shapes: list[Case]
    default: str
    hashes: dict[str, str]
    tried: dict[str, dict[str, Any]] = field(default_factory=dict)
    in_step: dict[str, Any] | None = None

    @property
    def layers(self) -> list[str]:
        """The layers with these calls, each once."""
        return list(dict.fromkeys(layer for s in self.shapes for layer in s.layers))

    @property
    def candidates(self) -> list[str]:
        """The variants that are still to be measured, without those of the same code as the default."""
        same = {self.hashes[self.default]} - {UNKNOWN}
        return [v for v, h in self.hashes.items() if v != self.default and v not in self.tried and h not in same]

    @property
    def best(self) -> str:
        """The correct variant with the strongest evidence of being faster than the default; else the default."""
        faster = [v for v, t in self.tried.items() if t["verdict"] == "faster" and t.get("check") in (RIGHT, "PASS")]
        return min(faster, key=lambda v: float(self.tried[v]["ratio"]["high"]), default=self.default)

    @property
    def rules(self) -> list[str]:
        """The rules of a plan with which the best variant runs; empty for the default."""
        return [f"{self.op}@{layer}={self.best}" for layer in self.layers if self.best != self.default]

    def __str__(self) -> str:
        return f"{self.op} {' and '.join(str(s) for s in self.shapes)}"

    def take(self, other: Mapping[str, Any]) -> None:
        """Reuse earlier measurements on the same shapes of the same machine code."""
        same = {v for v, h in self.hashes.items() if other["hashes"].get(v) == h != UNKNOWN}
        shapes = [from_json(Case, s) for s in other["shapes"]]
        if self.op == other["op"] and weighed(self.shapes) == weighed(shapes) and self.default in same:
            self.tried = {v: t for v, t in other["tried"].items() if v in same} | self.tried


@dataclass
class Tuning:
    """A plan in the making.

    Attributes
    ----------
    key, name : what the plan is for, and the model's name.
    rows : all ops and shapes of the step.
    flush : whether the step's memory is more than the caches hold, so that kernels are timed alone from memory.
    steps : each comparison of whole steps; the last one counts.
    rules : the plan.
    why : the reason why it has none; empty after Ctrl-C.
    finished : nothing is left to do, or the budget is used up.
    """

    JSON: ClassVar = (
        *("key", "name", "flush", "steps", "rules", "why", "doubts", "finished", "left", "kernels", "step", "rows"),
    )
    key: dict[str, Any]
    name: str
    rows: list[TunedOp]
    flush: bool
    kernels: list[str]
    calls: list[Call] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    why: str = ""
    doubts: list[str] = field(default_factory=list)
    finished: bool = False

    @property
    def left(self) -> int:
        """The number of comparisons that a budget left out."""
        return sum(len(row.candidates) for row in self.rows)

    @property
    def step(self) -> dict[str, Any] | None:
        """The last comparison of whole steps."""
        return self.steps[-1]["step"] if self.steps else None

    def plan(self) -> dict[str, Any]:
        """Return the content of the plan's file: all but the raw times, with the hashes that the plan depends on."""
        used = [row for row in self.rows if set(row.rules) & set(self.rules)]
        hashes = {f"{row.op}[{v}]": row.hashes[v] for row in used for v in (row.default, row.best)}
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        content: dict[str, Any] = _without_times({**to_json(self), "time": when, "hashes": hashes})
        return content


def _without_times(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _without_times(v) for k, v in x.items() if k not in ("ns", "order", "checks", "cases", "steps")}
    return [_without_times(v) for v in x] if isinstance(x, list) else x


def survey(settings: Settings, patterns: Sequence[str] = ("*",), again: bool = False) -> Tuning:
    """List the measurements for a job; nothing is compiled.

    Parameters
    ----------
    patterns : patterns of ops; rules of an existing plan for other ops stay.
    again : whether measurements of an interrupted run are repeated.

    Raises
    ------
    UserError
        For a pattern that matches no op of the step.
    """
    kernels.load_all(settings.kernels)
    settings = replace(settings, variant=registry.DEFAULT)
    settings, model = model_of(settings)
    built = build_only(settings)
    n = numba_threads.set_threads(settings.threads)
    key = plans.key(model.config.to_json(), settings.B, settings.T, n, settings.rewrites, settings.dtype)
    calls = [c for c in built.program.calls if c.phase != "evaluate"]
    default = {c.op.name: k.variant for c, k in zip(built.program.calls, built.kernels, strict=True)}
    used = list(dict.fromkeys(c.op.name for c in calls))
    for pattern in patterns:
        if not any(registry.op_matches(op, pattern) for op in used):
            raise UserError(f"--ops {pattern!r}: no op of this step matches; {nearest(pattern, used)}")
    rows = []
    for op in used:
        for shapes in groups([c for c in calls if c.op.name == op]):
            kernels_of = {v: typed(op, v, shapes) for v in dict.fromkeys([default[op], *registry.variants(op)])}
            hashes = {v: cache.digest(of[0].function) for v, of in kernels_of.items() if of}
            rows.append(TunedOp(op, shapes, default[op], hashes))
    flush = built.plan().total_bytes > max(v.nbytes or 0 for v in machine.levels())
    started = [] if again else [plans.read(plans.unfinished(key), key), *plans.elsewhere(key, flush)]
    finished = plans.read(plans.path(key), key)
    for row in rows:
        other = not any(registry.op_matches(row.op, p) for p in patterns)
        for old in (*started, finished if other else None):
            for there in old["rows"] if old else ():
                row.take(there)
        if other:
            row.hashes = {v: h for v, h in row.hashes.items() if v == row.default or v in row.tried}
    return Tuning(key, model.name, rows, flush, [*settings.kernels, *model.config.files], calls)


def typed(op: str, variant: str, shapes: Sequence[Case]) -> list[registry.Kernel]:
    """Return a variant's kernel for each type that some calls have; none if it does not take one of them."""
    kernel = registry.KERNELS[op, variant]
    found = [kernel.of(s.types) for s in shapes if kernel.takes_all(s.types)]
    return list(dict.fromkeys(found)) if len(found) == len(shapes) else []


def weighed(shapes: Sequence[Case]) -> list[tuple[str, int]]:
    """Return shapes, and of several the number of layers that each counts for."""
    return [(str(s), len(s.layers) if len(shapes) > 1 else 1) for s in shapes]


def groups(calls: Sequence[Call]) -> list[list[Case]]:
    """Group the calls of one op by layers that a rule can tell apart: shapes that share a layer go together."""
    by_layer: dict[str, list[Call]] = {}
    for c in calls:
        by_layer.setdefault(c.layer, []).append(c)
    alike: dict[Any, list[Call]] = {}
    for of_layer in by_layer.values():
        alike.setdefault(frozenset(str(s) for s in calls_alike(of_layer)), []).extend(of_layer)
    return [calls_alike(group) for group in alike.values()]


def compile_all(tuning: Tuning, processes: int, progress: Callable[[int, int, str], None]) -> None:
    """Compile the kernels to measure, in several processes. One that does not compile is reported at its comparison."""
    wanted = [k for r in tuning.rows for v in [r.default, *r.candidates] for k in typed(r.op, v, r.shapes)]
    with suppress(UserError):
        jit.compile_kernels(list(dict.fromkeys(wanted)), processes=processes, files=tuning.kernels, progress=progress)


def keep(tuning: Tuning) -> bool:
    """Write the plan or, until it is finished, its measurements; return whether that was possible."""
    if not tuning.finished or tuning.left:
        kept = plans.write(plans.unfinished(tuning.key), tuning.plan())
    if tuning.finished:
        kept = plans.write(plans.path(tuning.key), tuning.plan())
    if tuning.finished and kept and not tuning.left:
        plans.unfinished(tuning.key).unlink(missing_ok=True)
    return kept


def tune(
    tuning: Tuning,
    settings: Settings,
    child: Child,
    *,
    analyses: Sequence[int],
    seed: int = 0,
    view: TuneView | None = None,
    save: Callable[[Tuning], object] = lambda tuning: None,
    budget_s: float = inf,
) -> Tuning:
    """Do the missing measurements, and confirm the plan in whole steps.

    Parameters
    ----------
    settings : those of the job.
    analyses : rounds of the interim analyses of each comparison.
    save : called with the results so far after each comparison. After Ctrl-C they are returned.
    budget_s : seconds after which no further comparison alone begins; the plan is then made of what is measured.

    Returns
    -------
    The same, with `Tuning.finished` set if nothing is left to do; not after Ctrl-C, nor if steps could not be
    compared, so that the next run goes on with what was measured.
    """
    view = view or TuneView()
    job = {
        **{k: getattr(settings, k) for k in ("model", "data", "B", "T", "fuse", "seed", "dtype")},
        "threads": tuning.key["threads"],
        "kernels": child.kernels,
    }
    end = time.monotonic() + budget_s
    asked = {"settings": job, "analyses": list(analyses), "seed": seed}
    try:
        for row in tuning.rows:
            for variant in row.candidates:
                if time.monotonic() > end:
                    break
                view.at(f"{row}: {variant}")
                row.tried[variant] = compare(row, variant, tuning, child, asked)
                save(tuning)
                view.done(row, variant)
        tuning.finished = confirm(tuning, child, asked, view)
    except KeyboardInterrupt:
        tuning.rules = []
    tried = [t for row in tuning.rows for t in row.tried.values()]
    busy = sum(bool(t.get("doubts")) for t in tried)
    tuning.doubts = []
    if busy:
        tuning.doubts.append(f"other processes were busy during {busy} of {len(tried)} comparisons alone")
    tuning.doubts += [f"whole steps: {d}" for d in (tuning.steps[-1]["doubts"] if tuning.steps else ())]
    return tuning


def compare(row: TunedOp, variant: str, tuning: Tuning, child: Child, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a variant with the default alone, and check it on all cases if it is faster."""
    op = ops.ALL[row.op]
    more = {"shapes": to_json(row.shapes), "flush": tuning.flush, "stop_above": STOP_ABOVE}
    pair = [row.default, variant]
    for v in pair:
        if row.hashes[v] == UNKNOWN:
            return {"verdict": "refused", "why": f"{v} cannot be hashed, so no plan could tell when it is stale"}
    try:
        found = child.ask("ab", op=row.op, variants=pair, layer="*", in_step=False, **more, **asked)
    except UserError as e:
        return {"verdict": "refused", "why": str(e)}
    if found["verdict"] == "faster":
        mine = [c for c in tuning.calls if c.op is op and c.layer in row.layers]
        counts = sorted({1, int(tuning.key["threads"])})
        cases, _ = planned(op, mine)
        checked = whole(run(cases, in_child(child, (row.op, variant), counts), until_refused=True))
        found |= {"check": checked.verdict, "check_ratio": checked.to_json()["ratio"]}
        if checked.verdict != RIGHT:
            found["why"] = f"{checked.reason} ({checked.case})"
    return found


def confirm(tuning: Tuning, child: Child, asked: Mapping[str, Any], view: TuneView) -> bool:
    """Compare steps with the defaults and with the plan; drop what is slower there, and try the rest again.

    Returns
    -------
    Whether steps could be compared. Where not, `Tuning.why` holds the reason, and there are no rules.
    """
    rows = [row for row in tuning.rows if row.best != row.default]
    tuning.rules, tuning.why = [], "" if rows else "no variant is faster alone"
    while rows:
        rules = [rule for row in rows for rule in row.rules]
        changes = [{"op": r.op, "layers": r.layers, "variants": [r.default, r.best]} for r in rows]
        job = {**asked["settings"], "variant": registry.AUTO, "plan": rules}
        names = [registry.DEFAULT, registry.AUTO]
        view.at(f"whole steps with {len(rows)} of {len(tuning.rows)} changed")
        try:
            found = child.ask("steps", **{**asked, "settings": job}, changes=changes, names=names)
        except UserError as e:
            tuning.why = f"steps could not be compared: {e}"
            return False
        tuning.steps.append(found)
        for row, verdict in zip(rows, found["each"], strict=True):
            row.in_step = verdict
        left = [row for row in rows if row.in_step and row.in_step["verdict"] != "slower"]
        if len(left) == len(rows):
            word = found["step"]["verdict"]
            if word in KEPT:
                tuning.rules = rules
            else:
                because = f" ({found['step']['why']})" if found["step"]["why"] else ""
                tuning.why = f"whole steps with it: {word}{because}"
            return True
        rows = left
    tuning.why = tuning.why or "the variants that are faster alone are slower in the step"
    return True
