"""Whether B is slower or faster than A, and how sure that is.

A round is one turn each of A, B and C, where C is A once more: the control. Two rounds make a block, a random order and
then the same backwards (B A C C A B), so that what drifts steadily meets all alike. A round gives B's time over A's,
the geometric mean of both turns of A, and the control C's over A's. The medians over rounds get intervals from the
bootstrap.

The verdict is looked for after some rounds, after twice as many, and so on; looking often is paid for by intervals of
99.5 %. The ends of n rounds miss the median once in 2^(n-1) times, so with few rounds they are the interval, and its
level is lower. B is ``slower`` or ``faster`` where the whole interval lies beyond `MARGIN`, and the effect is well
above what the control shows between A and itself. ``no difference shown`` is said where the interval is narrow and has
1 in it, and ``could not tell`` where it is wide, or the control fails; both come with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import floor, inf, log
from typing import Any, Literal

import numpy as np

from .stats import interval, resample

Array = np.ndarray[Any, Any]
Word = Literal["faster", "slower", "no difference shown", "could not tell"]
LOOKS = (12, 24, 48, 96)
"""Rounds after which a verdict is looked for."""
LEVEL = 99.5
"""Percent of the intervals, where there are rounds enough for it."""
MARGIN = 0.005
"""An interval must lie this far from 1: smaller effects come from where an array happens to lie."""
NARROW = 0.02
"""An interval that stays this close to 1 shows that there is no difference worth looking for."""
WIDE = 0.02
"""Half an interval's width, beyond which it tells nothing."""
ABOVE_CONTROL = 2.0
"""How many times the control's effect an effect must be."""


@dataclass(frozen=True)
class Verdict:
    """What the rounds say about B, compared with A.

    Attributes
    ----------
    ratio, control : B's time over A's and A's over its own: ``median``, ``low`` and ``high``.
    why : the reason of a word that is not ``faster`` or ``slower``.
    level : percent of the intervals.
    """

    word: Word
    ratio: dict[str, float]
    control: dict[str, float]
    why: str = ""
    level: float = LEVEL

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        told = asdict(self)
        return {"verdict": told.pop("word"), **told}


def order(blocks: int, rng: np.random.Generator) -> str:
    """Give the turns of some blocks of two rounds."""
    return "".join(one + one[::-1] for one in ("".join(rng.permutation(list("ABC"))) for _ in range(blocks)))


class Contest:
    """Rounds of A, B and C, until they tell or there have been enough.

    Parameters
    ----------
    turn : runs one turn of A or B, and gives what it took: one figure, or several.
    seed : of the order.
    looks : rounds after which a verdict is looked for.
    decides : the figure that it is looked for in.
    hopeless : no more rounds are taken once every turn of B took so many times as long as any of A.
    """

    def __init__(
        self,
        turn: Callable[[str], Sequence[float]],
        seed: int = 0,
        looks: Sequence[int] = LOOKS,
        decides: int = 0,
        hopeless: float = inf,
    ) -> None:
        self.turn, self.looks, self.decides, self.hopeless = turn, looks, decides, hopeless
        self.rng = np.random.default_rng(seed)
        self.order = ""
        self.times: dict[str, list[Sequence[float]]] = {"A": [], "B": [], "C": []}

    def run(self) -> Verdict:
        """Take turns until there is a verdict."""
        for name in "AB":
            self.turn(name)  # warm-up
        verdict = None
        for look in self.looks:
            while len(self.times["A"]) < look and not self.given_up():
                for letter in order(1, self.rng):
                    self.times[letter].append(self.turn("A" if letter == "C" else letter))
                    self.order += letter
            verdict = judge([self.ratios(self.decides)], [self.controls(self.decides)])
            narrow = verdict.ratio["low"] > 1 - NARROW and verdict.ratio["high"] < 1 + NARROW
            found = verdict.word in ("faster", "slower") or (verdict.word == "no difference shown" and narrow)
            if found or self.given_up():
                break
        assert verdict
        return verdict

    def given_up(self) -> bool:
        """Whether B is so slow that more rounds would be a waste."""
        a, b, c = (self.figures(letter, self.decides) for letter in "ABC")
        return bool(b.size) and float(b.min()) > self.hopeless * max(a.max(), c.max())

    def figures(self, letter: str, which: int = 0) -> Array:
        """Give one of the figures of all turns of a side."""
        return np.array([t[which] for t in self.times[letter]])

    def ratios(self, which: int = 0) -> Array:
        """B's figure over A's in each round."""
        return np.asarray(self.figures("B", which) / np.sqrt(self.figures("A", which) * self.figures("C", which)))

    def controls(self, which: int = 0) -> Array:
        """A's second figure over its first in each round."""
        return np.asarray(self.figures("C", which) / self.figures("A", which))


def judge(
    ratios: Sequence[Sequence[float] | Array],
    controls: Sequence[Sequence[float] | Array],
    weights: Sequence[float] = (1.0,),
) -> Verdict:
    """Work out the verdict over some cases.

    Parameters
    ----------
    ratios, controls : of the rounds of each case.
    weights : the time that A takes for each.
    """
    parts = np.asarray(weights, float) / np.sum(weights)
    level = level_of(min(len(r) for r in ratios))
    ratio = _combine(ratios, parts, level)
    control = _combine(controls, parts, level)
    effect, noise = abs(log(ratio["median"])), abs(log(control["median"]))
    failed = control["low"] > 1 + MARGIN or control["high"] < 1 - MARGIN
    half = (ratio["high"] - ratio["low"]) / 2
    beyond = "slower" if ratio["low"] > 1 + MARGIN else "faster" if ratio["high"] < 1 - MARGIN else ""
    if beyond and effect <= ABOVE_CONTROL * noise:
        why = f"the control, A against itself, differs by {100 * noise:.1f} %; the difference is {100 * effect:.1f} %"
        return Verdict("could not tell", ratio, control, why, level)
    if beyond:
        return Verdict("slower" if beyond == "slower" else "faster", ratio, control, "", level)
    if failed:
        why = f"the control, A against itself, differs by {100 * noise:.1f} %: something disturbs the rounds"
        return Verdict("could not tell", ratio, control, why, level)
    if half > WIDE:
        why = f"the interval is {100 * (ratio['high'] - ratio['low']):.0f} % wide: the machine is too noisy"
        return Verdict("could not tell", ratio, control, why, level)
    why = f"differences below {100 * max(half, MARGIN):.1f} % would not show"
    return Verdict("no difference shown", ratio, control, why, level)


def level_of(rounds: int) -> float:
    """Give the percent of an interval that so many rounds support: their ends miss the median once in 2^(n-1)."""
    return min(LEVEL, floor(1000 * (1 - 2.0 ** (1 - rounds))) / 10)


def _combine(cases: Sequence[Sequence[float] | Array], parts: Array, level: float) -> dict[str, float]:
    """Average the median of each case, with the interval of that average."""
    middle = float(sum(p * np.median(c) for p, c in zip(parts, cases, strict=True)))
    if level < LEVEL:
        low, high = (float(sum(p * end(c) for p, c in zip(parts, cases, strict=True))) for end in (np.min, np.max))
        return {"median": middle, "low": low, "high": high}
    drawn = sum(p * resample(list(c), seed) for seed, (p, c) in enumerate(zip(parts, cases, strict=True)))
    return interval(middle, np.asarray(drawn), level)
