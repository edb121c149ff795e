"""The paired comparison of A and B: alternating trials, the ratio with its interval, and a verdict on B.

A round is one trial each of A and B, and with a control of C, which is A once more. Two rounds make a block, a random
order and then the same backwards (A B B A, or B A C C A B), so that what drifts steadily meets all alike. A round gives
the ratio of B's time to A's, the geometric mean of both trials of A, and the control: the ratio of C's to A's. The
medians over rounds get intervals from the bootstrap.

Interim analyses end the comparison after some rounds, after twice as many, and so on; intervals of 99.5 % pay for their
number. The ends of n rounds miss the median once in 2^(n-1) times. Below 12 rounds, where the bootstrap would miss it
more often than the level says, they are the interval; below 9 its level is lower. B is ``slower`` or ``faster`` where
the whole interval lies beyond the margin, and the effect is well above what the control shows between A and itself.
``no difference shown`` is the verdict if the interval is narrow and has 1 in it, and ``inconclusive`` if it is
wide, or the control fails; both come with the reason. An interval that spans more than a factor of 2, and more than its
distance from 1, supports neither ``faster`` nor ``slower``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, floor, inf, isfinite, log
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from ..ops.storage import TYPES
from ..wording import size_of, spread

Array = np.ndarray[Any, Any]
Word = Literal["faster", "slower", "no difference shown", "inconclusive"]
Trial = Callable[[], float | Sequence[float]]
"""A function that runs once and returns its time: one figure, or several."""
ANALYSES = (12, 24, 48, 96)
"""Rounds after which the interim analyses take place."""
LEVEL = 99.5
"""The level of the intervals in percent, if there are enough rounds for it."""
MARGIN = 0.005
"""The least distance of an interval from 1: smaller effects come from the addresses of arrays."""
NARROW = 0.02
"""The largest distance from 1 of an interval that shows no difference worth more rounds."""
WIDE = 0.02
"""Half the width of an interval beyond which the verdict is inconclusive."""
ABOVE_CONTROL = 2.0
"""The least ratio of an effect to the control's."""
APART = 2.0
"""The largest ratio of an interval's ends that supports ``faster`` or ``slower``; one farther from 1 may be as wide as
its distance."""
RESAMPLES = 10_000
CHECKED_STEPS = 3
"""The number of training steps whose losses must agree before times are compared."""
TOLERANCE = 1e-3
"""The largest difference between the losses of one step, relative to B's."""
ROUNDING = 1e-5
"""The largest difference between the losses of one batch from the same weights, relative to B's."""
BF16_TOLERANCE = float(TYPES["bfloat16"].limits.eps)
"""`TOLERANCE` if a side's products read bfloat16: 2^-7, twice the unit roundoff. Each side rounds each number that a
product reads by at most 2^-8 of it, and independent roundings average out: a loss is off by less than one of them."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on B, compared with A.

    Attributes
    ----------
    ratio, control : the ratio of B's time to A's, and of A's to its own: ``median``, ``low`` and ``high``.
    why : the reason of a word that is not ``faster`` or ``slower``.
    level : the level of the intervals in percent.
    """

    word: Word
    ratio: dict[str, float]
    control: dict[str, float] | None = None
    why: str = ""
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{spread(self.ratio)} ({self.level:g} % interval): {self.word}{self.why and ', ' + self.why}"

    def to_json(self) -> dict[str, Any]:
        """Return the part of a record."""
        found = asdict(self)
        return {"verdict": found.pop("word"), **found}


@dataclass
class Comparison:
    """All trials of a comparison.

    Attributes
    ----------
    times : the figures of each trial, by letter: A, B, and C for the control.
    order : the letters of the trials, from first to last.
    """

    times: dict[str, list[Array]]
    order: str = ""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.times["A"])

    def leave_out(self) -> None:
        """Remove the last round."""
        for times in self.times.values():
            del times[-1]
        self.order = self.order[: -len(self.times)]

    def figures(self, letter: str, which: int = 0) -> Array:
        """Return one figure of all trials of a letter."""
        return np.array([t[which] for t in self.times[letter]])

    def ratios(self, which: int = 0) -> Array:
        """Return the ratio of B's figure to A's in each round."""
        a, b, *c = (self.figures(letter, which) for letter in self.times)
        return np.asarray(b / (np.sqrt(a * c[0]) if c else a))

    def controls(self, which: int = 0) -> Array | None:
        """Return the ratio of A's second figure to its first in each round; None without a control."""
        return np.asarray(self.figures("C", which) / self.figures("A", which)) if "C" in self.times else None

    def verdict(self, which: int = 0) -> Verdict:
        """Return the verdict by one of the figures."""
        return judge([self.ratios(which)], [self.controls(which)])

    def slower_than(self, factor: float, which: int = 0) -> bool:
        """Return whether every trial of B took longer than any trial of A, by more than this factor."""
        a = np.concatenate([self.figures(letter, which) for letter in self.times if letter != "B"])
        return bool(self.figures("B", which).min() > factor * a.max())


def compare(
    a: Trial,
    b: Trial,
    *,
    seed: int = 0,
    analyses: Sequence[int] = ANALYSES,
    control: bool = True,
    decides: int = 0,
    stop_above: float = inf,
    warm_up: bool = True,
    tick: Callable[[int, int], None] = lambda done, most: None,
    disturbed: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Run trials of A and B in pairs, until an interim analysis reaches a verdict.

    Parameters
    ----------
    seed : the random seed of the order.
    analyses : rounds after which there is one; the last of them ends the comparison.
    control : whether A runs twice in a round.
    decides : index of the figure that is analysed.
    stop_above : the factor of `Comparison.slower_than` for an early stop, from two rounds on.
    warm_up : whether A and B run once before.
    tick : called after each round with the number done and the largest number.
    disturbed : called after each round; one that was disturbed does not count, as long as no more were than count.
    """
    trials = {"A": a, "B": b} | ({"C": a} if control else {})
    found = Comparison({letter: [] for letter in trials})
    rounds = schedule("".join(trials), np.random.default_rng(seed))
    if warm_up:
        a(), b()
    early, left_out = False, 0
    for analysis in analyses:
        while found.rounds < analysis and not early:
            for letter in next(rounds):
                found.times[letter].append(np.atleast_1d(trials[letter]()))
                found.order += letter
            if disturbed() and left_out < found.rounds:
                found.leave_out()
                left_out += 1
            tick(found.rounds, analyses[-1])
            early = found.rounds > 1 and found.slower_than(stop_above, decides)
        if early or _settled(found.verdict(decides)):
            break
    return found


def schedule(letters: str, rng: np.random.Generator) -> Iterator[str]:
    """Yield the order of each round: random, then the same backwards, and so on."""
    while True:
        one = "".join(rng.permutation(list(letters)))
        yield one
        yield one[::-1]


def _settled(v: Verdict) -> bool:
    narrow = v.ratio["low"] > 1 - NARROW and v.ratio["high"] < 1 + NARROW
    return v.word in ("faster", "slower") or (v.word == "no difference shown" and narrow)


def timer(function: Callable[[], object], clock: Callable[[], int] = time.perf_counter_ns) -> Trial:
    """Make a trial of a function: one call, in ns."""

    def trial() -> float:
        start = clock()
        function()
        return clock() - start

    return trial


def judge(
    ratios: Sequence[Sequence[float] | Array],
    controls: Sequence[Sequence[float] | Array | None] = (None,),
    weights: Sequence[float] = (1.0,),
    *,
    margin: float = MARGIN,
    wide: float = WIDE,
) -> Verdict:
    """Compute the verdict over some cases.

    Parameters
    ----------
    ratios, controls : those of the rounds of each case; None if there is no control.
    weights : the time of A for each case.
    margin, wide : values in place of `MARGIN` and `WIDE`.
    """
    parts = np.asarray(weights, float) / np.sum(weights)
    level = level_of(min(len(r) for r in ratios))
    ratio = _interval(ratios, parts, level)
    known = [c for c in controls if c is not None]
    control = _interval(known, parts, level) if known else None
    effect, noise = (abs(log(r["median"])) if r else 0.0 for r in (ratio, control))
    width = ratio["high"] - ratio["low"]

    def verdict(word: Word, why: str = "") -> Verdict:
        return Verdict(word, ratio, control, why, level)

    word: Word | None = "slower" if ratio["low"] > 1 + margin else "faster" if ratio["high"] < 1 - margin else None
    differs = f"the control, A against itself, differs by {100 * noise:.1f} %"
    if word and effect <= ABOVE_CONTROL * noise:
        return verdict("inconclusive", f"{differs}; the difference is {100 * effect:.1f} %")
    for wide_one, what in ((ratio, "the interval"), (control, "the control's interval")) if word else ():
        if wide_one and _apart(wide_one) > max(log(APART), _distance(ratio)):
            ends = f"{wide_one['low']:.3f} to {wide_one['high']:.3f}"
            return verdict("inconclusive", f"{what} reaches from {ends}: the machine is too noisy")
    if word:
        return verdict(word)
    if control and (control["low"] > 1 + margin or control["high"] < 1 - margin):
        return verdict("inconclusive", f"{differs}: something disturbs the rounds")
    if width / 2 > wide:
        return verdict("inconclusive", f"the interval is {100 * width:.0f} % wide: the machine is too noisy")
    return verdict("no difference shown", f"differences below {100 * max(width / 2, margin):.1f} % would not show")


def _apart(interval: Mapping[str, float]) -> float:
    """Return the logarithm of the ratio of an interval's ends."""
    return log(interval["high"] / interval["low"]) if interval["low"] > 0 else inf


def _distance(interval: Mapping[str, float]) -> float:
    """Return how far the nearer end of an interval that leaves out 1 is from it, as a logarithm."""
    return min(abs(log(x)) if x > 0 else inf for x in (interval["low"], interval["high"]))


def level_of(rounds: int) -> float:
    """Return the level in percent of an interval that this number of rounds supports."""
    return min(LEVEL, floor(1000 * (1 - 2.0 ** (1 - rounds))) / 10)


def _interval(cases: Sequence[Sequence[float] | Array], parts: Array, level: float) -> dict[str, float]:
    """Average the median of each case, with the interval of that average."""
    middle = float(sum(p * np.median(c) for p, c in zip(parts, cases, strict=True)))
    if min(map(len, cases)) < ANALYSES[0]:
        low, high = (float(sum(p * end(c) for p, c in zip(parts, cases, strict=True))) for end in (np.min, np.max))
    else:
        drawn = sum(p * _medians(c, seed) for seed, (p, c) in enumerate(zip(parts, cases, strict=True)))
        low, high = map(float, np.percentile(np.asarray(drawn), [50 - level / 2, 50 + level / 2]))
    return {"median": middle, "low": low, "high": high}


def _medians(ratios: Sequence[float] | Array, seed: int) -> Array:
    """Bootstrap the median: (RESAMPLES,) medians of as many ratios, drawn with replacement."""
    picks = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    return np.asarray(np.median(np.asarray(ratios)[picks], axis=1))


# Several comparisons --------------------------------------------------------------------------------------------------


def analyses_up_to(rounds: int) -> list[int]:
    """Return the rounds of the interim analyses, for a largest number of rounds.

    Raises
    ------
    UserError
        For too few.
    """
    if rounds < 6:
        raise UserError(f"--rounds {rounds}: expected 6 or more, because fewer give no useful interval")
    return [*(n for n in ANALYSES if n < rounds), rounds]


def geometric_mean(ratios: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average ratios, and the ends of their intervals, which is wider than the interval of the average."""
    return {k: exp(sum(log(r[k]) for r in ratios) / len(ratios)) for k in ("median", "low", "high")}


def summed(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the verdicts of several sizes and numbers of threads: theirs if they agree, else ``inconclusive``."""
    level, ratio = min(r.get("level", LEVEL) for r in results), geometric_mean([r["ratio"] for r in results])
    words = dict.fromkeys(r["verdict"] for r in results)
    if len(words) == 1:
        return {"verdict": next(iter(words)), "ratio": ratio, "why": results[0]["why"], "level": level}
    each = "; ".join(f"{size_of(r)} on {r['threads']}: {r['verdict']}" for r in results)
    return {"verdict": "inconclusive", "ratio": ratio, "why": f"it depends: {each}", "level": level}


def marginal(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """List the kernels that are further from the reference than rounding explains, each by its worst check."""
    worst: dict[str, Mapping[str, Any]] = {}
    for c in (c for r in results for c in r.get("checks", ()) if c["status"].lower() == "marginal"):
        if c["ratio"] > worst.get(c["kernel"], {"ratio": 0.0})["ratio"]:
            worst[c["kernel"]] = c
    return [
        f"marginal: {name} is {c['ratio']:.1f} times what rounding explains from the reference ({c['case']})"
        for name, c in worst.items()
    ]


def disagreement(
    names: Sequence[str],
    ours: Sequence[float],
    theirs: Sequence[float],
    tolerance: float = TOLERANCE,
    updates_rounded: bool = False,
) -> str:
    """Describe the first step whose losses differ by too much or are not finite; empty if there is none.

    Parameters
    ----------
    tolerance : the largest difference, relative to B's loss.
    updates_rounded : whether B keeps its weights in bfloat16. Then an update is rounded to a multiple of a weight's
        last place: it may be lost, or be twice as large. So B's loss may lag behind or run ahead by what A's has
        changed.
    """
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        changed = abs(a - ours[0]) if updates_rounded else 0.0
        if not (isfinite(a) and isfinite(b) and abs(a - b) <= tolerance * abs(b) + changed):
            more = f" and {changed:.3g}, since bfloat16 rounds the updates" if changed else ""
            return (
                f"no ratio, because the losses of step {i} differ: {names[0]} {a:.6g}, {names[1]} {b:.6g}; expected "
                f"the same within {tolerance:g} of it{more}, from the same weights and batches"
            )
    return ""


def other_model(names: Sequence[str], scales: Sequence[float], ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Describe the first scale of the weights at which two sides' losses of one batch differ; empty for none."""
    for scale, a, b in zip(scales, ours, theirs, strict=True):
        if not (isfinite(a) and isfinite(b) and abs(a - b) <= ROUNDING * abs(b)):
            return (
                f"no ratio, because the two compute different losses from the same batch and {scale:g} times the same "
                f"weights: {names[0]} {a:.7g}, {names[1]} {b:.7g}; expected the same within {ROUNDING:g} of it"
            )
    return ""
