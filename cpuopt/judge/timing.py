"""The timing of a candidate beside the baseline, both in the sandbox, on the same arrays in shared memory.

A round has a short trial of the candidate and two of the baseline, with the same content of all arrays, in an order
that is drawn and then reversed. A trial takes 2 ms of calls, so that both sides of a ratio see the same machine. If
threads waited for a core in most samples of a trial, its round does not count: Linux tells how long they did.

Two clocks run. One is read in the process by compiled code around each call, and gives the times. The other is the
judge's, around the request. They differ by what a request costs, and for the candidate by no more than for the
baseline, which the package brings. Some batches are so long that this cost does not matter: a time that was told too
small would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..check.cases import Arguments, Case, elements
from ..check.judge import Wanted, imprecise
from ..check.result import Result
from ..check.timed import OUTS, UNSEEN, WORK, draw
from ..errors import CHEATING, RefusedError
from ..kernels.registry import Kernel
from ..lab.remote import WAITED, AloneRemote, Clocks, Far
from . import private

Drawn = dict[str, tuple[Arguments, list[Wanted]]]
"""Inputs that were drawn before in a session, with the wanted results, by op and shape."""
CALLS = tuple((which, outs, scratch) for which in (0, 1) for outs in OUTS for scratch in WORK)
"""What the arrays of timed calls hold: set of inputs, outputs, scratch."""
AT_EDGE = 2
"""Calls with the arrays at each edge of inaccessible memory, which hold some of `CALLS`, drawn for each candidate."""
APART, LONG_APART, SLACK, NOISE_NS = 3.0, 1.5, 0.1, 1e5
"""Allowed disagreement of the clocks over the baseline's: samples, long batches; relative slack; slack in ns."""
LONG_ORDER, MOST_LONG = "ABBAABBA", 4
"""Long batches of both sides, and how often they are repeated at most, as long as the clocks disagree."""
LEAST = 4
"""Batches from which the clocks are compared."""
LAST = 32
"""Samples from whose lower quartile it follows how many calls a long batch has."""
LONG_S, MOST_TIMES = 0.1, 10_000
"""The length of the slower side's long batch, and the most times that its arguments are called with."""
JUDGED = 8
"""How many times as seldom as in an `Alone` a sample of a trial is judged."""
FRESH, MANY = (3, 1), 1 << 21
"""Sets of inputs that each candidate sees once: of most shapes, and of those whose arrays have as many elements."""
KEEPS, CALM = 1.5, 1.25
"""How many times as long a call may take with them as with inputs that came before; and of the baseline, if it is calm.
"""
ONCE_NS = 5e4
"""How much longer than in a trial a single call may take: its caches and branch predictor are cold."""
SUSPECTED = 2
"""How often a candidate must be found to keep results, each time with other inputs."""
ROUNDS = (12, 384)
"""The least and the most rounds of a comparison; how many depends on the time that it may take."""
LOOKS = (8, 4, 2, 1)
"""The analyses: after an eighth of the rounds, a quarter, a half, and all."""


class AloneFar(AloneRemote):
    """A baseline and a candidate of the sandbox on the same arrays of one shape.

    Parameters
    ----------
    drawn : inputs of this seed that were drawn before; those of this shape are added.
    most_s : the seconds that a comparison may take.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        shape: Case,
        seed: int,
        flush: bool,
        clock: Callable[[], int],
        *,
        drawn: Drawn,
        most_s: float,
    ) -> None:
        self.most_s, self.seed = most_s, seed
        op = kernels[0].op
        if (key := f"{op.name} {shape}") not in drawn:
            drawn[key] = draw(op, shape, seed, FRESH[elements(op, shape) >= MANY])
        super().__init__(kernels, shape, seed, flush, clock, drawn=drawn[key], secret=True)
        self.rng = np.random.default_rng(private.seed())  # another for each candidate
        self.chance /= JUDGED
        self.fence()

    def rounds(self, analyses: Sequence[int]) -> Sequence[int]:
        """Choose as many rounds as the time allows, by that of one."""
        start = time.perf_counter()
        for side in "ABA":
            self.trial(side)
        self.disturbed()
        self.rounds_disturbed.clear()
        few, most = ROUNDS
        n = max(few, min(most, int(self.most_s / (time.perf_counter() - start))))
        return [*dict.fromkeys(max(few, n // look) for look in LOOKS)]

    def finish(self) -> list[Result]:
        """Judge each once more, and let both clocks measure batches that last.

        Raises
        ------
        UserError
            For a candidate that is wrong, keeps results, or is far less precise than the baseline.
        """
        calls = self.lengths["A"][0]
        times = max(2, min(MOST_TIMES, int(LONG_S * 1e9 / calls / max(map(self.told, "AB")))))
        functions = {side: self.far(side) for side in "AB"}
        confirm(functions, lambda side: functions[side].batch(self.args[side][:calls], times))
        self.require_no_memory()
        usual, mine = found = super().finish()
        if said := imprecise(self.op, usual, mine):
            raise RefusedError(f"{said}, on the arrays that are timed ({mine.case})")
        return found

    def require_no_memory(self) -> None:
        """Call each with inputs that it never saw, between calls with those that it was timed with.

        Raises
        ------
        UserError
            For a candidate that is wrong with them, or takes longer: it keeps results, wherever that is.
        """
        new, said = self.sets[2:], ""
        for i in range(SUSPECTED):
            if not (said := self.kept(new if i == 0 else self.more(len(new)))):
                break
        self.swap(0)
        if said:
            raise RefusedError(f"{self.kernels['B'].name} {said}", CHEATING)

    def kept(self, new: Sequence[Wanted]) -> str:
        """Return that the candidate takes longer with new inputs than with known ones, or than was measured; or ""."""
        took: dict[str, list[tuple[float, float]]] = {"A": [], "B": []}
        for i, fresh in enumerate(new):
            for side, ns in took.items():
                known, _ = self.once(side, self.sets[i % 2])
                first, waited = self.once(side, fresh)
                if waited <= WAITED * first:  # otherwise its time is that of another process
                    ns.append((known, first))
                self.judge(side, 1, UNSEEN)
        each = {side: ([a for a, _ in ns], [b for _, b in ns]) for side, ns in took.items()}
        measured = {side: float(np.median(ns)) for side, ns in self.took.items() if ns}
        return memory(each) or (memory(each, measured) if measured else "")

    def more(self, count: int) -> Sequence[Wanted]:
        """Draw as many inputs once more, others than all before."""
        _, sets = draw(self.op, self.case, self.seed, len(self.sets) - 2 + count)
        return sets[len(self.sets) :]

    def once(self, side: str, inputs: Wanted) -> tuple[float, float]:
        """Return the ns of a call with some inputs, and those for which its threads waited for a core.

        The baseline is called before it: the inputs are then in the caches, as they are when a kernel is timed.
        """
        self.hold(0, inputs)
        for one in "A", side:
            self.fill(one, "nan", "nan", 1)
            found = self.far(one).batch(self.args[one][:1])
        return found

    def told(self, side: str) -> float:
        """Return the ns of a call in the last samples, by the clock of the process."""
        last = sorted(ns for ns, _ in self.far(side).clocks[-LAST:])
        return max(last[(len(last) - 1) // 4], 1.0) / self.lengths[side][0]

    def fence(self) -> None:
        """Call the candidate at the very size that is timed, with every array at the edge of inaccessible memory."""
        function, calls = self.far("B"), [CALLS[i] for i in self.rng.permutation(len(CALLS))]
        for i, function.fenced in enumerate(("end", "begin")):
            some = calls[AT_EDGE * i :][:AT_EDGE]
            self.audit("B", some, "beside inaccessible memory, at the size that is timed")
        function.fenced = ""


def confirm(functions: Mapping[str, Far], batch: Callable[[str], object]) -> None:
    """Let both clocks measure long batches, again as long as they disagree: a lie is in each, a delay is by chance.

    Parameters
    ----------
    batch : makes as many calls of either side, since the clocks differ by that of a call times their number.
    """
    for _ in range(MOST_LONG):
        for side in LONG_ORDER:
            batch(side)
        if not disagreement(functions["A"], functions["B"]):
            return


def memory(
    took: Mapping[str, tuple[Sequence[float], Sequence[float]]], measured: Mapping[str, float] | None = None
) -> str:
    """Return that a candidate keeps results, by the ns of both sides with known inputs and with new ones; or "".

    Parameters
    ----------
    measured : the ns of a call that the timing found, in place of those with known inputs: a kernel may be quick only
        while it is timed.
    """
    (usual, fresh), (known, new) = took["A"], took["B"]
    slack, where, calm = 0.0, "with others", not fresh or min(fresh) <= CALM * max(usual)
    if measured:
        slack, where, calm = ONCE_NS, "while it was timed", max(fresh, default=np.inf) <= CALM * measured["A"]
        known = [measured["B"]]
    if calm and new and min(new) > KEEPS * max(known) + slack:
        said = f"it takes {min(new) / 1e3:.0f} us with inputs that it had not seen"
        return f"keeps what it computed: {said}, and {max(known) / 1e3:.0f} us {where}"
    return ""


def disagreement(baseline: Far, candidate: Far) -> str:
    """Return how both clocks disagree about a candidate; empty if they do not."""
    short = _apart(baseline.clocks, candidate.clocks, np.median, APART)
    return short or _apart(baseline.long, candidate.long, np.min, LONG_APART)  # what else runs only delays an answer


def _apart(baseline: Clocks, candidate: Clocks, of: Callable[[Any], Any], times: float) -> str:
    if min(len(baseline), len(candidate)) < LEAST:
        return ""
    gaps = [np.diff(c)[:, 0] for c in (baseline, candidate)]
    usual, own = (float(of(g)) for g in gaps)
    allowed = times * max(usual, 0.0) + SLACK * float(np.median(candidate, axis=0)[0]) + NOISE_NS
    if own > allowed or float(gaps[1].min()) < 0:
        return (
            f"told times that the judge's clock does not confirm: a request takes {own / 1e3:.0f} us longer than told, "
            f"with the baseline {usual / 1e3:.0f} us"
        )
    return ""
