"""The check of a gradient: a float64 backward against the slope of its forward's reference, in random directions.

For a backward op and a random direction u of one input, the slope that the backward gives, ``sum(dx * u)``, is compared
with ``(L(x + h u) - L(x - h u)) / 2h`` for several h, where L is the sum of the outputs, each times its adjoint. Too
large an h bends, too small an h rounds; the best of them counts. If the reference is a kernel's own text, dual
numbers give its slope instead, to the last digits (`cpuopt.check.dual`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import WRONG, UserError
from ..ops.declaration import Op
from .cases import SMALL, Arguments, Array, Case, arguments, case, reference, widened
from .dual import slope as exact_slope
from .result import RIGHT

STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-6
"""The tolerance relative to the slope's terms; a difference with the best step is good to about 1e-9."""
EXACT = 1e-9
"""The tolerance for a slope by dual numbers, which is good to about 1e-15."""

Pullback = Callable[[Arguments], dict[str, Array]]
"""A function from a backward's arguments by name, float64, to its gradients."""


@dataclass(frozen=True)
class GradientResult:
    """The result of the check of one gradient.

    Attributes
    ----------
    argument : the name of the gradient.
    slope : the slope along the direction by the backward.
    errors : for each of `STEPS`, or of the slope by dual numbers, relative to the size of the slope's
        terms; NaN if there is nothing finite to compare with.
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
        """A word of `result.WORDS`: right or wrong."""
        return RIGHT if self.error <= (TOLERANCE if len(self.errors) > 1 else EXACT) else WRONG

    def __str__(self) -> str:
        ways = [f"{h:.0e}" for h in STEPS] if len(self.errors) > 1 else ["dual numbers"]
        each = "  ".join(f"{way}: {e:.1e}" for way, e in zip(ways, self.errors, strict=True))
        return f"{self.verdict}  {self.error:8.1e}  {self.op} {self.argument:8} {each}"

    def describe(self) -> dict[str, Any]:
        """Return the result for a record."""
        content = {"op": self.op, "case": str(self.case), "argument": self.argument, "status": self.verdict}
        return content | {"error": self.error if self.error < float("inf") else None, "slope": self.slope}


def check_gradient(
    op: Op,
    on: Case | None = None,
    *,
    seed: int = 0,
    pullback: Pullback | None = None,
    domain: Callable[[Array], Array] = lambda x: x,
) -> list[GradientResult]:
    """Check the references of an op's backward against the slope of the reference of its forward.

    Parameters
    ----------
    op : a forward op with a declared backward, or a backward op.
    on : the sizes and the kind of inputs; small normal ones by default.
    seed : the random seed of the inputs.
    pullback : a backward to check in place of the reference; gradients that it overwrites come filled with NaN.
    domain : function from an input's numbers to those that the forward gets.

    Returns
    -------
    One result for each gradient.

    Raises
    ------
    UserError
        For an op that has no gradient, or what is no op.

    Examples
    --------
    >>> from cpuopt import check_gradient, ops
    >>> [(r.argument, r.verdict) for r in check_gradient(ops.silu_forward)]
    [('dinp', 'right')]
    """
    if not isinstance(op, Op):
        raise UserError(f"check_gradient: {op!r} is no op; expected one such as ops.gelu_forward")
    backwards = [op] if op.inverts else op.backwards
    if not backwards:
        raise UserError(f"{op.name} has no declared backward, so there is no gradient to check")
    results = []
    for b in backwards:
        of = pullback or (lambda given, b=b: reference(b, given))  # type: ignore[misc]
        results += _check(b, on or case(b, SMALL), np.random.default_rng(seed), of, domain)
    return results


def _check(
    op: Op, on: Case, rng: np.random.Generator, pullback: Pullback, domain: Callable[[Array], Array]
) -> list[GradientResult]:
    forward = op.inverts
    assert forward is not None
    sizes = {**on.sizes, **{s: n for s, n in case(forward, SMALL).sizes.items() if s not in on.sizes}}
    gone = {a.name for a in forward.arrays if a.optional and {a.name, f"d{a.name}"} & on.absent}
    given = widened(arguments(forward, replace(on, sizes=sizes, absent=frozenset(gone)), rng))
    given |= {a.name: domain(given[a.name]) for a in forward.args if a.kind == "in" and given[a.name] is not None}
    outs = reference(forward, given)
    adjoints: Arguments = {a.name: rng.standard_normal(outs[a.name[1:]].shape) for a in op.args if a.name[1:] in outs
                and a.name not in forward.by_name}  # fmt: skip
    everything = {**given, **outs, **adjoints}
    wanted = {a.name: everything.get(a.name) for a in op.args}
    for a in op.args:
        if a.kind == "acc" and given.get(a.name[1:]) is not None:
            wanted[a.name] = np.full(given[a.name[1:]].shape, np.nan)
    gradients = pullback(wanted)

    def difference(name: str, step: Any) -> float:
        up, down = (reference(forward, given | {name: given[name] + s}) for s in (step, -step))
        return sum(float(((up[n[1:]] - down[n[1:]]) * d).sum()) for n, d in adjoints.items())

    results = []
    kernel = getattr(forward.reference, "kernel", None)
    for name, gradient in gradients.items():
        u: Any = rng.standard_normal(gradient.shape)
        slope, size = float((gradient * u).sum()), float(np.sqrt(((gradient * u) ** 2).sum()))
        if kernel:
            found, terms = exact_slope(kernel, given, {name[1:]: u}, {n[1:]: d for n, d in adjoints.items()})
            errors = [abs(found - slope) / (terms + 1e-30)]
            if np.isfinite(found + terms) and not np.isfinite(slope):
                errors = [float("inf")]
        else:
            ends = [difference(name[1:], h * u) / (2 * h) for h in STEPS]
            errors = [abs(found - slope) / (size + abs(found) + 1e-12) for found in ends]
        results.append(GradientResult(op.name, on, name, slope, tuple(errors)))
    return results
