"""The training loop: a job's steps, and what they leave in the run's folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any, Protocol

from .job import Job
from .profile import Profile
from .profiler import Profiler, peak_rss_bytes
from .record import Run
from .roofline import Roofs


class Listener(Protocol):
    """Who hears of a run's progress."""

    def step(self, metrics: dict[str, Any]) -> None:
        """One step is done."""

    def validation(self, step: int, loss: float) -> None:
        """A validation loss was measured after `step` updates."""


@dataclass
class Result:
    """What a run gave; `stopped_by` is the number of the signal that ended it early, or 0."""

    path: Path
    summary: dict[str, Any]
    stopped_by: int = 0
    profile: Profile | None = None


@contextmanager
def stop_flag() -> Iterator[Callable[[], int]]:
    """Turn the first SIGINT or SIGTERM into a flag, its number; a second one interrupts at once."""
    hit: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if hit:
            raise KeyboardInterrupt
        hit.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: hit[0] if hit else 0
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def validate(job: Job) -> float:
    """Mean loss over the first batches of the held-out tokens, in the order of the text."""
    s = job.settings
    batches = job.corpus.batches("val", s.B, s.T)
    losses = []
    for i in range(min(s.val_batches, len(batches))):
        tokens, targets = batches.batch(0, i)
        losses.append(job.engine.forward(tokens=tokens, targets=targets))
    return fmean(losses)


def train(
    job: Job,
    root: Path,
    listener: Listener,
    clock: Callable[[], float] = time.perf_counter,
    roofs: Roofs | None = None,
) -> Result:
    """Run a job's steps and write its folder; the folder is complete after an interrupt too.

    Parameters
    ----------
    root : the folder that holds all runs.
    clock : in seconds.
    roofs : what the machine can do on the engine's threads, for the profile.
    """
    s, engine = job.settings, job.engine
    batches = job.corpus.batches("train", s.B, s.T, seed=s.seed)
    first = batches.at(0)  # a batch that cannot be had is refused before anything is written
    with Run(root, s.run, {**asdict(s), "sizes": asdict(job.config), "corpus": job.corpus.description}) as run:
        profiler = Profiler(engine)
        history: list[dict[str, Any]] = []
        val: dict[int, float] = {}

        def measure(step: int) -> None:
            val[step] = validate(job)
            run.validation(step, val[step])
            listener.validation(step, val[step])

        with stop_flag() as stopped:
            if s.val_every:
                measure(0)
            for step in range(1, s.steps + 1):
                if stopped():
                    break
                tokens, targets = first if step == 1 else batches.at(step - 1)
                start = clock()
                with profiler.step():
                    done = engine.step(
                        lr=s.lr,
                        beta1=s.beta1,
                        beta2=s.beta2,
                        eps=s.eps,
                        weight_decay=s.weight_decay,
                        clip=s.clip,
                        tokens=tokens,
                        targets=targets,
                    )
                elapsed_s = clock() - start
                metrics = {
                    "step": step,
                    "loss": done.loss,
                    "lr": s.lr,
                    "grad_norm": done.grad_norm,
                    "step_ms": elapsed_s * 1e3,
                    "tokens_per_s": s.B * s.T / elapsed_s,
                }
                if s.val_every and (step % s.val_every == 0 or step == s.steps) and not stopped():
                    measure(step)
                    metrics["val_loss"] = val[step]
                history.append(metrics)
                run.step(metrics)
                listener.step(metrics)
            stopped_by = stopped()
        profiler.remove()
        profile = (
            profiler.profile(model=job.name, B=s.B, T=s.T, choice=job.choice, checked=job.checked, roofs=roofs)
            if history
            else None
        )
        run.write("profile.json", profile.to_json() if profile else {})
        summary = _summary(job, history, val, bool(stopped_by))
        run.write("summary.json", summary)
        return Result(run.path, summary, stopped_by, profile)


def _summary(job: Job, history: list[dict[str, Any]], val: dict[int, float], interrupted: bool) -> dict[str, Any]:
    engine = job.engine
    return {
        "steps": len(history),
        "interrupted": interrupted,
        "loss_first": history[0]["loss"] if history else None,
        "loss_last": history[-1]["loss"] if history else None,
        "val_loss": {str(k): v for k, v in val.items()},
        "step_ms_median": median(m["step_ms"] for m in history) if history else None,
        "tokens_per_s": median(m["tokens_per_s"] for m in history) if history else None,
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_peak_bytes": engine.predicted_peak_bytes,
        "arena": engine.plan.describe(),
        "threads": engine.threads,
    }
