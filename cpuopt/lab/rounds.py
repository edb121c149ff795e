"""One round on a file of kernels: check, compare alone and in the step, place under the roof, inspect.

Kernels run in a process of their own, a new one for each round. So no machine code of an earlier text is left,
and a kernel that crashes or hangs ends that process only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import models, ops
from ..errors import RefusedError, UserError
from ..files.reading import to_json
from ..isolate.child import ENDED, Child
from ..kernels.registry import BASE, DEFAULT, GENERATED, KERNELS
from ..measure.comparison import LEVEL, analyses_up_to, marginal
from ..measure.roofline import PASSED, UNFIT, Roofs
from ..wording import call_count, spread, text_of
from .ab import GAINS, bound
from .advice import CallTime
from .checked import check, jobs_at
from .inspect import inspect
from .worker import started

STAGES = ("check", "alone", "roof", "step", "machine code")


@dataclass(frozen=True)
class RoundPlan:
    """The settings of a round.

    Attributes
    ----------
    sizes : sizes by symbol in place of a model's, for those ops of the file that have these symbols.
    against : the variant to compare with; by default ``optimized`` if the op has it, else ``vanilla``.
    step : whether to compare inside the training step.
    rounds : the largest number of rounds of each comparison.
    limit_s : seconds for one answer of the process that runs the kernels.
    """

    file: Path
    model: str = models.DEFAULT
    B: int = 4
    T: int = 64
    threads: int = 1
    sizes: tuple[dict[str, int], ...] = ()
    against: str = ""
    step: bool = True
    rounds: int = 24
    limit_s: float = 120.0


@dataclass
class KernelRow:
    """The results of one kernel of the file: a line for each stage that is done, and ``bad`` for one that failed.

    Attributes
    ----------
    now, progress : the stage that is under way, and how far it is.
    """

    op: str
    variant: str
    against: str
    said: dict[str, str] = field(default_factory=dict)
    bad: str = ""
    now: str = ""
    progress: str = ""
    found: dict[str, Any] = field(default_factory=dict)


def whole(rows: Sequence[KernelRow]) -> bool:
    """Return whether a round has come to its end: each kernel passed all stages, or failed at one."""
    return bool(rows) and all(not r.now and (r.bad or len(r.said) == len(STAGES)) for r in rows)


def record(plan: RoundPlan, rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Return the record of a round; of the machine code its summary and the advice."""
    kernels = []
    for r in rows:
        found = dict(r.found)
        if code := found.get("inspect"):
            found |= {"inspect": code.get("summary"), "advice": code.get("advice", [])}
        kernels.append({"op": r.op, "variant": r.variant, "against": r.against, "bad": r.bad, "said": r.said, **found})
    asked = {k: getattr(plan, k) for k in ("model", "B", "T", "threads", "sizes", "rounds")}
    return {"file": plan.file.name, **to_json(asked), "kernels": kernels}


class RoundView:
    """Observer of a round; this one does nothing."""

    def rows(self, rows: Sequence[KernelRow]) -> None:
        """The results changed."""

    def problem(self, text: str) -> None:
        """The file cannot be used at all."""


def work(plan: RoundPlan, roofs: Roofs, view: RoundView, child: Child | None = None) -> list[KernelRow]:
    """Do one round, and return the results of each kernel.

    Parameters
    ----------
    child : the process to use, which is closed at the end.

    Raises
    ------
    UserError
        For a file that cannot be used at all.
    """
    child = child or started([str(plan.file)], plan.threads, plan.limit_s)
    view.rows([])
    with child:
        rows = rows_of(plan, child.start())
        if not rows:
            raise UserError(f"{plan.file.name} registers no kernel; expected functions under @kernel(op, 'name')")
        for row in rows:
            stages(plan, roofs, row, child, lambda: view.rows(rows))
    return rows


def rows_of(plan: RoundPlan, added: Sequence[Mapping[str, Any]]) -> list[KernelRow]:
    """Return an empty row for each kernel of the file among those that were loaded with it.

    Raises
    ------
    UserError
        If one of their ops does not have the variant to compare with.
    """
    there = {(k["op"], k["variant"]) for k in added} | KERNELS.keys()
    rows = [
        KernelRow(k["op"], k["variant"], plan.against or default(k["op"], there))
        for k in added
        if k["file"] == str(plan.file.resolve()) and k["variant"] != GENERATED
    ]
    for row in rows:
        if (row.op, row.against) not in there:
            known = sorted(variant for op, variant in there if op == row.op)
            raise UserError(f"--against {row.against!r}: {row.op} has no such variant; known: {', '.join(known)}")
    return rows


def require_against(plan: RoundPlan) -> None:
    """Refuse a variant to compare with, as `rows_of` does, before a round; one shows why a file cannot be loaded."""
    with started([str(plan.file)], plan.threads, plan.limit_s) as child:
        with suppress(UserError):
            child.start()
        rows_of(plan, child.added)


def default(op: str, there: Collection[tuple[str, str]] = KERNELS) -> str:
    """Return the best variant of those that are there: optimized, else vanilla."""
    return DEFAULT if (op, DEFAULT) in there else BASE


def stages(plan: RoundPlan, roofs: Roofs, row: KernelRow, child: Child, show: Callable[[], None]) -> None:
    """Run the stages of one kernel up to the first that fails."""

    def told(text: str) -> None:
        row.progress = text
        show()

    child.say = told
    for name, stage in zip(STAGES, (_check, _alone, _roof, _step, _inspect), strict=True):
        if child.ended:
            return
        row.now, row.progress = name, ""
        show()
        try:
            row.said[name] = stage(plan, roofs, row, child)
        except UserError as e:
            if child.ended:  # by a newer save, of which this error is no result
                return
            row.bad, row.said[name] = name, str(e)
            if isinstance(e, RefusedError):
                row.said[name] = f"{e.word}: {e}"
                row.found |= e.to_json()
            break
    row.now = ""
    show()


def _check(plan: RoundPlan, roofs: Roofs, row: KernelRow, child: Child) -> str:
    jobs = [] if plan.sizes else jobs_at(plan.model, plan.B, plan.T, child.kernels)
    tell, child.say = child.say, lambda text: None  # the parts of a case change too fast to be read

    def tick(number: int, total: int) -> None:
        if child.ended:
            raise UserError(ENDED)
        tell(f"{number}/{total}")

    try:
        (v,) = check(child, plan.threads, [(row.op, row.variant)], jobs, plan.sizes, tick)
    finally:
        child.say = tell
    row.found |= {"check": v.of_kernel(), "verdict": v.verdict}
    if v.refused:
        raise RefusedError(f"{v.reason} ({v.case})", v.verdict, v.witness())
    scratch = f"; scratch of {v.scratch:.3g} times its arrays" if v.scratch > 1 else ""
    return f"{v.verdict}, {len(v.cases)} cases, worst ratio {v.ratio:.2f}{scratch}"


def _compare(plan: RoundPlan, row: KernelRow, child: Child, in_step: bool) -> dict[str, Any]:
    settings = {k: getattr(plan, k) for k in ("model", "B", "T", "threads")} | {"kernels": child.kernels}
    asked = {"layer": "*", "in_step": in_step, "flush": False, "seed": 0, "analyses": analyses_up_to(plan.rounds)}
    sizes = {"sizes": plan.sizes[0]} if plan.sizes else {}
    asked |= {"variants": [row.against, row.variant], "elsewhere": not in_step}
    return child.ask("ab", op=row.op, settings=settings, **asked, **sizes)


def _told(r: dict[str, Any], row: KernelRow) -> str:
    if row.against == row.variant:
        return f"{r['b_ms']:.3g} ms: the baseline of other variants"
    ratio, ms = r["ratio"], f"{r['b_ms']:.3g} ms against {r['a_ms']:.3g} of {row.against}"
    why = f"; {r['why']}" if r["why"] else ""
    few = f" ({r['level']:g} %: few rounds)" if r["level"] < LEVEL else ""
    ms += f" in {call_count(r)}" if call_count(r) else ""
    return "; ".join([f"{r['verdict']}: {ms}, ratio {spread(ratio)}{few}{why}", *marginal([r])])


def _alone(plan: RoundPlan, roofs: Roofs, row: KernelRow, child: Child) -> str:
    found = row.found["alone"] = _compare(plan, row, child, in_step=False)
    if _called(plan, row):
        return _told(found, row)
    return f"{_told(found, row)}; at {text_of(found['sizes'])}, because {plan.model} does not call it"


def _called(plan: RoundPlan, row: KernelRow) -> bool:
    """Return whether the sizes are those of the model or of the plan."""
    return bool(plan.sizes) or "sizes" not in row.found["alone"]


def _roof(plan: RoundPlan, roofs: Roofs, row: KernelRow, child: Child) -> str:
    alone = row.found["alone"]
    least: dict[str, float] = {}
    for case in alone["cases"]:
        ns, name = bound(roofs, case)
        least[name] = least.get(name, 0.0) + ns * len(case["layers"])
    total, name = sum(least.values()) / 1e6, max(least, key=lambda n: least[n])
    shares = {"of_roof": 100 * total / alone["b_ms"], "against": 100 * total / alone["a_ms"], "roof": name}
    row.found["roof"] = shares
    over = [v for v, key in {row.against: "against", row.variant: "of_roof"}.items() if shares[key] > PASSED]
    if over:
        at = max(shares["of_roof"], shares["against"])
        return (
            f"{UNFIT}: {' and '.join(over)} at up to {at:.0f} % of the {name} roof, which was measured too low; "
            "when it is quiet: cpuopt machine --again"
        )
    other = "" if row.against == row.variant else f" ({row.against}: {shares['against']:.0f} %)"
    return f"{shares['of_roof']:.0f} % of the {name} roof{other}"


def _step(plan: RoundPlan, roofs: Roofs, row: KernelRow, child: Child) -> str:
    if not plan.step:
        return "not asked for"
    if plan.sizes:
        return "none: --sizes names no model"
    if not _called(plan, row):
        return f"none: {plan.model} does not call it"
    if row.against == row.variant:
        return "nothing to compare with"
    r = row.found["step"] = _compare(plan, row, child, in_step=True)
    whole = r["step"]
    step = f"the whole step: {whole['verdict']}, {spread(whole['ratio'])}, control {whole['control']['median']:.3f}"
    more = [f"warning: {d}" for d in r["doubts"] if d.startswith(GAINS)] + [f"note: {n}" for n in r["notes"]]
    return "; ".join([_told(r, row), step, *more])


def _inspect(plan: RoundPlan, roofs: Roofs, row: KernelRow, child: Child) -> str:
    longest = max(row.found["alone"]["cases"], key=lambda c: len(c["layers"]) * c["b_ns"])
    call = CallTime.of(ops.ALL.get(row.op), longest, longest["b_ns"], plan.threads, roofs)
    found = inspect(row.op, row.variant, [str(plan.file)], call=call)
    row.found["inspect"] = to_json(found)
    if not found.compiled:
        return "a Python function"
    s = found.summary
    words = [f"{s['loops']} innermost loops", f"{s['width']} floats a vector", f"{s['fmas']} FMAs"]
    named = {"scalar": s["scalar_loops"], "spills": s["spills"], "doubles": s["doubles"]}
    words += [f"{n} {name}" for name, n in named.items() if n]
    return "\n".join([", ".join(words + [f"calls {c}" for c in s["calls"]]), *(a.said for a in found.advice)])
