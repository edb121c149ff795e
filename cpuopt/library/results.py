"""Results that show what the command line prints: ``print(x)``, or ``x`` in a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files.outputs import check
from ..machine import Others
from ..measure.comparison import Trial, analyses_up_to, summed
from ..measure.comparison import compare as compare_trials
from ..measure.profile import Profile
from ..report import ab as report_ab
from ..report import html, rendered, tables

if TYPE_CHECKING:
    from ..engine import Engine

TRIAL_S = 8e-3
"""The least length of a trial of `compare`."""


class Report:
    """A result that shows itself as the command line does."""

    def tables(self) -> rendered.Shown:
        """Return tables and lines, for rich."""
        raise NotImplementedError

    def __str__(self) -> str:
        return rendered.as_text(self.tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return rendered.as_html(self.tables())


@dataclass(repr=False)
class ProfileReport(Report):
    """The result of `Engine.profile`.

    Attributes
    ----------
    profile : all figures, as in ``profile.json``: ``step_ms``, ``tokens_per_s``, ``ops``, ``layers``, ...
    engine : the engine that was profiled.
    detail : whether tables have a row for every op of every layer; may be set.
    """

    profile: Profile
    engine: Engine
    detail: bool = False

    def tables(self) -> rendered.Shown:
        """Return what ``cpuopt profile`` prints."""
        return tables.profile_tables(self.profile, detail=self.detail)

    def write_html(self, path: str | Path) -> None:
        """Write the page of ``cpuopt profile --html``.

        Raises
        ------
        UserError
            If it cannot be written.
        """
        check(Path(path), "write_html")
        html.write_report(Path(path), self.profile, self.engine)


@dataclass(repr=False)
class ComparisonReport(Report):
    """The result of `Engine.ab` and of `compare`: the verdict is on B, compared with A.

    Attributes
    ----------
    record : all figures, as in the record of ``cpuopt ab``.
    """

    record: dict[str, Any]

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``no difference shown`` or ``inconclusive``."""
        return str(self.record["verdict"])

    @property
    def ratio(self) -> dict[str, float]:
        """B's time over A's: ``median``, and the ends of its interval, ``low`` and ``high``."""
        return dict(self.record["ratio"])

    def tables(self) -> rendered.Shown:
        """Return what ``cpuopt ab`` prints."""
        shown = report_ab.tables if "op" in self.record else lambda record, path: report_ab.compared(record)
        return shown(self.record, None)


def compare(
    a: Callable[..., object],
    b: Callable[..., object],
    *args: Any,
    rounds: int = 96,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> ComparisonReport:
    """Compare the times of two functions on the same arguments; neither is checked.

    Trials of both alternate in a random order, along with a control, A once more, until the interval of the ratio
    allows a verdict. For two kernels of an op, `Engine.ab` compares what they compute too.

    Parameters
    ----------
    a, b : the baseline, and the function that the verdict is about. Both run three times before.
    args : the arguments of both; what a function changes in them stays changed.
    rounds : the largest number of rounds, 6 at least.
    seed : the random seed of the order.
    clock : in seconds.

    Raises
    ------
    UserError
        For too few rounds, or what is no function.

    Examples
    --------
    >>> import numpy as np, cpuopt
    >>> x = np.ones(10_000, np.float32)
    >>> found = cpuopt.compare(np.sum, np.cumsum, x, rounds=6)
    >>> found.verdict in ("faster", "slower", "no difference shown", "inconclusive")
    True
    """
    if wrong := [f for f in (a, b) if not callable(f)]:
        raise UserError(f"compare: {wrong[0]!r} is no function; it takes two, and then the arguments of both")
    analyses, others = analyses_up_to(rounds), Others()

    def timed(function: Callable[[], object], calls: int = 1) -> float:
        start = clock()
        for _ in range(calls):
            function()
        return (clock() - start) / calls

    functions: list[Callable[[], object]] = [partial(f, *args) for f in (a, b)]
    seconds = [min(timed(f) for _ in range(3)) for f in functions]
    calls = max(1, int(TRIAL_S / max(min(seconds), 1e-9)))
    pair: list[Trial] = [lambda f=f: 1e9 * timed(f, calls) for f in functions]  # type: ignore[misc]
    found = compare_trials(*pair, seed=seed, analyses=analyses)
    ms = {f"{side.lower()}_ms": float(min(found.figures(side))) / 1e6 for side in "AB"}
    result = {**found.verdict().to_json(), **ms, "doubts": others.warnings()}
    names = dict(zip("ab", _names(a, b), strict=True))
    return ComparisonReport({**names, **summed([result]), "results": [result]})


def _names(a: Callable[..., object], b: Callable[..., object]) -> tuple[str, str]:
    """Return the functions' names, or A and B if these are the same."""
    one, two = (str(getattr(f, "__name__", "")) for f in (a, b))
    return (one, two) if one != two and one and two else ("A", "B")
