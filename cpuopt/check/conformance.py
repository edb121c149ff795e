"""Kernels checked one after another in a process of their own: on awkward cases, and at the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from ..errors import UserError
from ..isolate.child import Asked
from ..ops.declaration import Op
from ..program.program import Call
from .cases import Case, cases, quick_cases
from .judge import Result

MOST_FLOATS = 1 << 26
"""Cases with more elements than this are left out: the reference would take a gigabyte for each of several copies."""


@dataclass
class Verdict:
    """What all checks of one kernel found.

    Attributes
    ----------
    worst : the result with the largest ratio.
    skipped : cases that are too large for the float64 reference.
    """

    op: str
    variant: str
    results: list[Result] = field(default_factory=list)
    skipped: int = 0

    @property
    def worst(self) -> Result:
        """The result with the largest ratio."""
        return max(self.results, key=lambda r: r.ratio)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        worst = self.worst.to_json()
        return {
            "op": self.op,
            "variant": self.variant,
            "verdict": self.worst.verdict,
            "ratio": worst["ratio"],
            "worst": worst,
            "cases": [r.to_json() for r in self.results],
            "skipped": self.skipped,
        }


def model_cases(op: Op, calls: Iterable[Call]) -> list[Case]:
    """List the sizes at which a program calls an op, each once."""
    found = [Case.of(c) for c in calls if c.op is op]
    return list({str(case): case for case in found}.values())


def too_large(op: Op, case: Case) -> bool:
    """Whether a case has too many elements for its reference."""
    return sum(prod(d(case.sizes) for d in a.shape) for a in op.arrays) > MOST_FLOATS


def conform(
    child: Asked,
    wanted: Sequence[tuple[Op, str]],
    calls: Sequence[Call] = (),
    *,
    quick: bool = False,
    threads: Sequence[int] = (1, 2),
    seed: int = 0,
    tick: Callable[[str], None] = lambda text: None,
    stop_at_failure: bool = False,
) -> list[Verdict]:
    """Check kernels; one that crashes or hangs fails, and the others are checked all the same.

    Parameters
    ----------
    child : has their files loaded.
    wanted : op and variant of each.
    calls : of a model, whose sizes are cases too.
    tick : called before each case.
    stop_at_failure : leave a kernel's other cases out after the first that fails.
    """
    found = []
    for op, variant in wanted:
        verdict = Verdict(op.name, variant)
        for case in plan(op, calls, quick):
            if too_large(op, case):
                verdict.skipped += 1
                continue
            tick(f"{op.name}[{variant}]  {case}")
            try:
                answer = child.ask(
                    "check", op=op.name, variant=variant, case=case.to_json(), threads=list(threads), seed=seed
                )
            except UserError as e:  # it ended its process, or was ended; it would be waited for again and again
                verdict.results.append(Result(f"{op.name}[{variant}]", case, inf, reason=str(e)))
                break
            verdict.results.append(Result.from_json(answer["result"], case))
            if stop_at_failure and verdict.results[-1].verdict == "FAIL":
                break
        found.append(verdict)
    return found


def plan(op: Op, calls: Sequence[Call], quick: bool) -> list[Case]:
    """List the cases of an op."""
    return [*(quick_cases(op) if quick else cases(op)), *model_cases(op, calls)]
