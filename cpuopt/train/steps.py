"""The steps of a job: its batches, its learning rate and its guard, on an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ..building import Array
from ..data.batches import Batches
from ..data.chats import ChatBatches
from ..data.given import Batch, Given
from ..engine import Engine, Step
from .guard import Guard
from .schedule import rate
from .settings import Settings

UNCOUNTED = "no target counts"
"""What a step is refused for that has only ignored targets."""


def named(batch: Batch | tuple[Array, Array]) -> dict[str, Array]:
    """Return a batch by the names of the inputs; a pair is that of a text."""
    return dict(batch) if isinstance(batch, Mapping) else dict(zip(("tokens", "targets"), batch, strict=True))


@dataclass(frozen=True)
class Taken:
    """One step that was taken.

    Attributes
    ----------
    number : counted from 1.
    loss, grad_norm : as in `engine.Step`.
    seconds : the time of the engine's step; fetching its batches is not counted.
    tokens : of all micro-batches, those of other ranks too.
    refused : the guard's reason for refusing it, `UNCOUNTED`, or ``""``.
    """

    number: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int
    refused: str


@dataclass
class TrainingSteps:
    """An engine with the settings and batches of its steps.

    Attributes
    ----------
    done : the steps so far; those that the guard skipped count.
    """

    settings: Settings
    engine: Engine
    batches: Batches | Given | ChatBatches
    done: int = field(default=0, init=False)
    _fetched: tuple[int, list[dict[str, Array]]] = field(default=(0, []), init=False, repr=False)
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(self.settings.guard_z)

    @property
    def guarded(self) -> str:
        """The guard's action: ``skip``, ``stop`` or ``off``."""
        usual = "skip" if self.engine.two_pass else "stop"
        return usual if self.settings.guard == "auto" else self.settings.guard

    def micro_batches(self, number: int) -> list[dict[str, Array]]:
        """Return this rank's batches of a step, counted from 1, in any order of steps.

        Raises
        ------
        DataError
            If the tokens have changed on disk.
        """
        if self._fetched[0] != number:
            self._fetched = number, self._read(number)
        return self._fetched[1]

    def _read(self, number: int) -> list[dict[str, Array]]:
        n = self.engine.micro_batches
        first = 0 if self.settings.overfit else (number - 1) * self.settings.micro_batches
        first += self.engine.comm.rank * n
        return [named(self.batches.at(i)) for i in range(first, first + n)]

    def take_step(
        self,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Taken:
        """Train on the next batches with the learning rate, decay, clipping and guard of the settings.

        Parameters
        ----------
        within : a context manager for the engine's step, such as `Profiler.time_step`.
        clock : in seconds.
        """
        s, number = self.settings, self.done + 1
        at, end = min(number, s.steps), s.lr * s.lr_end
        lr = rate(s.schedule, at, steps=s.steps, warmup=s.warmup_steps, peak=s.lr, end=end)
        first, *more = self.micro_batches(number)
        reasons: list[str] = []

        def accept(done: Step) -> bool:
            reasons.append(self.guard.judge(done))
            return not reasons[0]

        start = clock()
        with within():
            done = self.engine.step(
                lr=lr,
                **s.numbers,
                vector_decay=0.0 if s.decay == "matrices" else None,
                clip=s.clip,
                more=more,
                accept=accept if self.guarded == "skip" else None,
                **first,
            )
        seconds = clock() - start
        self.done = number
        if self.guarded == "stop":
            accept(done)
        tokens = s.B * s.T * s.micro_batches
        refused = "".join(reasons) if done.counted else UNCOUNTED
        return Taken(number, done.loss, done.grad_norm, lr, seconds, tokens, refused)
