"""The timing of a candidate beside the baseline, both in the closed process, on the same arrays in shared memory.

Two clocks run. One is read in the process, around a batch of calls, and gives the times; the other is the judge's,
around the request. They differ by what a request costs, and for the candidate by no more than for the baseline, which
the package brings: a time that was told too small would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..check.cases import Arguments
from ..check.timed import Inputs, TimedKernels, draw
from ..errors import UserError
from ..kernels.registry import Kernel
from ..lab.ab import Alone, Shape
from .remote import Clocks, Far

Drawn = dict[str, tuple[Arguments, list[Inputs]]]
"""Inputs that were drawn before in a session, with the wanted results, by op and shape."""
CALLS = ((0, "nan", "nan"), (1, "other", "numbers"))
"""The calls between inaccessible pages: set of inputs, outputs, scratch."""
APART, SLACK, NOISE_NS = 3.0, 0.25, 2e6
"""How far the clocks may be apart: times what they are for the baseline, a share of the time, and ns."""
LEAST = 4
"""Batches from which the clocks are compared."""


def alone_far(drawn: Drawn) -> Callable[..., AloneFar]:
    """Return what makes the pair of a shape, with inputs that stay warm."""

    def make(kernels: Sequence[Kernel], shape: Shape, seed: int, flush: bool, clock: Callable[[], int]) -> AloneFar:
        return AloneFar(kernels, shape, seed, drawn)

    return make


class AloneFar(Alone):
    """A baseline and a candidate of the closed process on the same arrays of one shape.

    Parameters
    ----------
    drawn : inputs of this seed that were drawn before; those of this shape are added.
    """

    def __init__(self, kernels: Sequence[Kernel], shape: Shape, seed: int, drawn: Drawn) -> None:
        self.drawn = drawn
        for k in kernels:
            k.typed(shape.types).compile()
        super().__init__(kernels, shape, seed)
        self.fence()

    def arrays(self, kernels: Mapping[str, Kernel], shape: Shape, seed: int) -> TimedKernels:
        """Make the arrays, into which no right result is put."""
        op, key = next(iter(kernels.values())).op, f"{next(iter(kernels.values())).op.name} {shape}"
        if key not in self.drawn:
            self.drawn[key] = draw(op, shape.case, shape.adds, seed)
        return TimedKernels(kernels, shape.case, shape.adds, seed, self.drawn[key], secret=True)

    def spend(self, side: str, every: Sequence[Sequence[Any]]) -> float:
        """Call a kernel with each of some arguments; return the ns by the clock of the process."""
        return self.far(side).batch(every)

    def far(self, side: str) -> Far:
        """Return the function of a side."""
        function = self.functions[side]
        assert isinstance(function, Far)
        return function

    def _filling(self, side: str) -> float:
        start = time.perf_counter_ns()
        self.sample(side, "almost", "numbers")
        return time.perf_counter_ns() - start

    def fence(self) -> None:
        """Call the candidate at the very size that is timed, with every array at the edge of inaccessible memory."""
        function = self.far("B")
        for function.fenced in ("end", "begin"):
            self.timed.audit("B", CALLS, "beside inaccessible memory, at the size that is timed")
        function.fenced = ""


def disagreement(baseline: Clocks, candidate: Clocks) -> str:
    """Return how both clocks disagree about a candidate; empty if they do not."""
    if min(len(baseline.inside), len(candidate.inside)) < LEAST:
        return ""
    gaps = [np.asarray(c.outside) - np.asarray(c.inside) for c in (baseline, candidate)]
    usual, own = (float(np.median(g)) for g in gaps)
    allowed = APART * max(usual, 0.0) + SLACK * float(np.median(candidate.inside)) + NOISE_NS
    if own > allowed or float(gaps[1].min()) < 0:
        return (
            f"told times that the judge's clock does not confirm: a request takes {own / 1e3:.0f} us longer than told, "
            f"with the baseline {usual / 1e3:.0f} us"
        )
    return ""


def require_threads(n: int) -> None:
    """Set the number of threads of the calls that follow.

    Raises
    ------
    UserError
        For more than this process was started with.
    """
    from ..kernels.toolkit import threads

    threads.set_threads(n)
    if threads.get_threads() != n:
        raise UserError(f"{n} threads cannot run here")
