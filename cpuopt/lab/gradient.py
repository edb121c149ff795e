"""Is a gradient right? A float64 backward against differences of its forward's reference, in random directions.

For a backward op and a random direction u of one input, the slope that the backward gives, ``sum(dx * u)``, is compared
with ``(L(x + h u) - L(x - h u)) / 2h`` for several h, where L is the sum of the outputs, each times its adjoint. Too
large an h bends, too small an h rounds; the best of them counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UserError
from ..op import Op
from .cases import SMALL, Arguments, Array, Case, arguments, case, reference

STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-6
"""Relative to the size of the slope's terms; a difference with the best step is good to about 1e-9."""

Pullback = Callable[[Arguments], dict[str, Array]]
"""From a backward's arguments by name, float64, to its gradients."""


@dataclass(frozen=True)
class GradientResult:
    """What was found of one input's gradient.

    Attributes
    ----------
    argument : the gradient.
    slope : along the direction, as the backward gives it.
    errors : of the difference for each of `STEPS`, relative to the size of the slope's terms.
    """

    op: str
    case: Case
    argument: str
    slope: float
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The smallest error; NaN counts as infinite."""
        return min((e for e in self.errors if e == e), default=float("inf"))

    @property
    def verdict(self) -> str:
        """PASS or FAIL."""
        return "PASS" if self.error <= TOLERANCE else "FAIL"

    def __str__(self) -> str:
        told = "  ".join(f"{h:.0e}: {e:.1e}" for h, e in zip(STEPS, self.errors, strict=True))
        return f"{self.verdict}  {self.error:8.1e}  {self.op} {self.argument:8} {told}"

    def describe(self) -> dict[str, Any]:
        """For a record."""
        told = {"op": self.op, "case": str(self.case), "argument": self.argument, "status": self.verdict}
        return told | {"error": self.error if self.error < float("inf") else None, "slope": self.slope}


def check_gradient(
    op: Op, on: Case | None = None, *, seed: int = 0, pullback: Pullback | None = None
) -> list[GradientResult]:
    """Check the references of an op's backward against differences of the reference of its forward.

    Parameters
    ----------
    op : a forward op with a declared backward, or a backward op.
    on : the sizes and the kind of inputs; small normal ones by default.
    pullback : a backward to check in place of the reference; gradients that it overwrites come filled with NaN.

    Returns
    -------
    One result for each gradient.

    Raises
    ------
    UserError
        For an op that has no gradient.
    """
    backwards = [op] if op.inverts else op.backwards
    if not backwards:
        raise UserError(f"{op.name} has no declared backward, so there is no gradient to check")
    results = []
    for b in backwards:
        of = pullback or (lambda given, b=b: reference(b, given))  # type: ignore[misc]
        results += _check(b, on or case(b, SMALL), np.random.default_rng(seed), of)
    return results


def _check(op: Op, on: Case, rng: np.random.Generator, pullback: Pullback) -> list[GradientResult]:
    forward = op.inverts
    assert forward is not None
    sizes = {**on.sizes, **{s: n for s, n in case(forward, SMALL).sizes.items() if s not in on.sizes}}
    gone = {a.name for a in forward.arrays if f"d{a.name}" in on.absent or a.name in on.absent}
    given = _wide(arguments(forward, replace(on, sizes=sizes, absent=frozenset(gone)), rng))
    outs = reference(forward, given)
    adjoints = {a.name: rng.standard_normal(outs[a.name[1:]].shape) for a in op.args if a.name[1:] in outs
                and a.name not in forward.by_name}  # fmt: skip
    everything = {**given, **outs, **adjoints}
    wanted = {a.name: everything.get(a.name) for a in op.args}
    for a in op.args:
        if a.role == "acc" and given.get(a.name[1:]) is not None:
            wanted[a.name] = np.full(given[a.name[1:]].shape, np.nan)
    gradients = pullback(wanted)

    def value(name: str, x: Any) -> float:
        found = reference(forward, given | {name: x})
        return sum(float((found[n[1:]] * d).sum()) for n, d in adjoints.items())

    results = []
    for name, gradient in gradients.items():
        x = given[name[1:]]
        u = rng.standard_normal(x.shape)
        slope, size, errors = float((gradient * u).sum()), float(np.sqrt(((gradient * u) ** 2).sum())), []
        for h in STEPS:
            difference = (value(name[1:], x + h * u) - value(name[1:], x - h * u)) / (2 * h)
            errors.append(abs(difference - slope) / (size + abs(difference) + 1e-12))
        results.append(GradientResult(op.name, on, name, slope, tuple(errors)))
    return results


def _wide(given: Arguments) -> Arguments:
    return {n: x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x for n, x in given.items()}
