"""The training loop: a job's steps, and what they leave in the run's folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, count
from math import nan
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any, Protocol

import numpy as np

from ..data.tokenizers import get_tokenizer
from ..engine import Array, Step
from ..errors import UserError
from ..files import remove_leftovers
from ..files.reading import finite
from ..generate.decoder import Decoder, Sampler, generate, text_of
from ..measure.profile import Profile
from ..measure.rates import machine_id
from ..measure.roofline import Roofs
from ..profiler import Profiler, codes, hashes, peak_rss_bytes
from ..weights import save_weights
from . import checkpoint
from .guard import Guard, find_first
from .job import Job
from .record import Run, commit
from .schedule import rate


class Listener(Protocol):
    """Who hears of a run's progress."""

    def step(self, metrics: dict[str, Any]) -> None:
        """One step is done."""

    def validation(self, step: int, loss: float) -> None:
        """A validation loss was measured after `step` updates."""

    def sample(self, step: int, text: str) -> None:
        """The model wrote a text after `step` updates."""

    def note(self, text: str) -> None:
        """Something happened that the user should know of."""


@dataclass
class Result:
    """What a run gave.

    Attributes
    ----------
    stopped_by : the number of the signal that ended it early, or 0.
    diagnosis : why it did not come to what was asked for, or ``""``.
    checkpoint : the newest one.
    """

    path: Path
    summary: dict[str, Any]
    stopped_by: int = 0
    diagnosis: str = ""
    checkpoint: Path | None = None
    profile: Profile | None = None


@contextmanager
def stop_flag() -> Iterator[Callable[[], int]]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag, the number of the first; Ctrl-C after one interrupts at once.

    What ends a session sends several of the others in a row. One that was ignored before, as `nohup` has it, stays so.
    """
    hit: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if hit and number == signal.SIGINT:
            raise KeyboardInterrupt
        hit.append(number)

    heeded = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, note) for s in heeded}
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


class Trainer:
    """A job on its way.

    Attributes
    ----------
    done : the steps so far; those that the guard skipped count.
    history : the metrics of these steps; also of those before a resume.
    val : validation losses, by the steps before them.
    saved : where the newest checkpoint is, and after which step it was written.
    tried : after which step the last was tried.
    diagnosis : why no further step makes sense, or ``""``.
    weights : where they were saved at the end.
    """

    def __init__(self, job: Job, listener: Listener, clock: Callable[[], float] = time.perf_counter) -> None:
        s = job.settings
        self.job, self.listener, self.clock = job, listener, clock
        self.batches = job.corpus.batches("train", s.B, s.T, seed=s.seed)
        self.guard = Guard(s.guard_z)
        self.done = 0
        self.history: list[dict[str, Any]] = []
        self.val: dict[int, float] = {}
        self.diagnosis = ""
        self.saved: tuple[Path, int] | None = None
        self.weights: Path | None = None
        self.tried = 0
        self.decoder: Decoder | None = None
        _ = job.corpus.fingerprint  # read now, not when a signal leaves little time for a checkpoint
        self.micro_batches(1)  # what cannot be had is refused before anything is written

    def micro_batches(self, step: int) -> list[dict[str, Array]]:
        """Give the batches of a step, counted from 1; any step's can be had at any time."""
        s = self.job.settings
        n = s.micro_batches
        first = 0 if s.overfit else (step - 1) * n
        pairs = (self.batches.at(i) for i in range(first, first + n))
        return [{"tokens": tokens, "targets": targets} for tokens, targets in pairs]

    def state(self) -> dict[str, Any]:
        """Give what a checkpoint says besides its tensors."""
        return {
            "step": self.done,
            "updates": self.job.engine.step_number,
            "val": {str(k): v for k, v in self.val.items()},
            "guard": self.guard.state(),
            "model": self.job.name,
            "sizes": asdict(self.job.config),
            "corpus": self.job.corpus.fingerprint,
            "tokenizer": self.job.corpus.tokenizer,
            "made_by": self.job.made_by,
            "changes": self.job.changes,
            "settings": asdict(self.job.settings),
        }

    def restore(self, resume: checkpoint.Checkpoint, history: list[dict[str, Any]]) -> None:
        """Stand where a checkpoint was written."""
        state = resume.state
        self.done, self.history, self.saved = state["step"], history, (resume.path, state["step"])
        self.tried = self.done
        self.val = {int(k): v if v is not None else nan for k, v in state["val"].items()}
        self.guard.restore(state["guard"])

    def save(self, run: Run) -> None:
        """Write a checkpoint; where that fails, say so and go on."""
        self.tried = self.done
        try:
            path = checkpoint.save(run.path, self.job.engine, finite(self.state()), self.job.settings.keep)
        except (OSError, UserError) as e:
            why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            old = f"{self.saved[0].name} stays" if self.saved else "there is none before it"
            self.listener.note(f"no checkpoint after step {self.done}: {why}; {old}, and the next try comes in time")
        else:
            self.saved = path, self.done

    def run(self, run: Run, profiler: Profiler, stopped: Callable[[], int]) -> None:
        """Take the steps that are left, until a signal or the guard ends it; save on the way, and at its end."""
        s = self.job.settings
        trouble = ""
        if s.val_every and not self.done:
            self.measure(run)
        while self.done < s.steps and not stopped() and not self.diagnosis:
            metrics = self.step(profiler)
            if s.val_every and (self.done % s.val_every == 0 or self.done == s.steps) and not stopped():
                metrics["val_loss"] = self.measure(run)
            if s.sample_every and self.done % s.sample_every == 0:
                self.listener.sample(self.done, self.sample())
            self.history.append(metrics)
            run.step(metrics)
            self.listener.step(metrics)
            if run.trouble != trouble and (trouble := run.trouble):
                self.listener.note(trouble)
            if s.save_every and self.done % s.save_every == 0 and not self.diagnosis:
                self.save(run)
        if self.tried != self.done and not self.diagnosis and (stopped() or s.save_every):
            self.save(run)

    def finish(self, run: Run) -> None:
        """Judge the weights that a run has come to, and write them where `Settings.save` says, or else near it."""
        if self.diagnosis:
            return
        parameters = self.job.engine.parameters()
        if bad := [name for name, p in parameters.items() if not np.isfinite(p).all()]:
            self.diagnosis = f"the weights are not finite after step {self.done}: {bad[0]} and {len(bad) - 1} more"
            self.diagnosis += "; they are not saved" if self.job.settings.save is not None else ""
        elif self.job.settings.save is not None:
            wanted = Path(self.job.settings.save)
            for path in dict.fromkeys([wanted, _free(wanted), _free(run.path / wanted.name)]):
                try:
                    save_weights(path, self.job.config, parameters.__getitem__, tokenizer=self.job.corpus.tokenizer)
                except UserError as e:
                    self.listener.note(f"the weights are not saved: {e}")
                    self.diagnosis = f"the weights are not at {str(wanted)!r}, and nowhere else"
                else:
                    self.weights = path
                    self.diagnosis = (
                        f"the weights are at {str(path)!r}, not at {str(wanted)!r}" if path != wanted else ""
                    )
                    return

    def measure(self, run: Run) -> float:
        """Take the validation loss."""
        loss = self.val[self.done] = validate(self.job)
        run.validation(self.done, loss)
        self.listener.validation(self.done, loss)
        return loss

    def sample(self) -> str:
        """Let the model write; another text at each step, the same one whenever the step is taken."""
        s, job = self.job.settings, self.job
        if self.decoder is None:
            choice = {"variant": s.variant, "threads": s.threads, "processes": s.processes}
            self.decoder = Decoder(job.config, **choice, kernel_files=s.kernels)  # type: ignore[arg-type]
        for name, p in job.engine.parameters().items():
            self.decoder.parameters()[name][...] = p
        self.decoder.restart()
        tokenizer = get_tokenizer(job.corpus.tokenizer)
        prompt = tokenizer.encode(s.prompt) or [tokenizer.eot]
        tokens = generate(self.decoder, prompt, Sampler(0.8, seed=self.done), s.sample_tokens)
        return s.prompt + "".join(text_of(tokens, tokenizer))

    def step(self, profiler: Profiler) -> dict[str, Any]:
        """Take one step; give its metrics."""
        s, engine = self.job.settings, self.job.engine
        number = self.done + 1
        lr = rate(s.schedule, number, steps=s.steps, warmup=s.warmup_steps, peak=s.lr, end=s.lr * s.lr_end)
        first, *more = micro = self.micro_batches(number)
        mode = s.guard if s.guard != "auto" else "skip" if engine.two_pass else "stop"
        reasons: list[str] = []

        def accept(done: Step) -> bool:
            reasons.append(self.guard.judge(done))
            return not reasons[0]

        start = self.clock()
        with profiler.step():
            done = engine.step(
                lr=lr,
                **s.numbers,
                vector_decay=0.0 if s.decay == "matrices" else None,
                clip=s.clip,
                more=more,
                accept=accept if mode == "skip" else None,
                **first,
            )
        elapsed_s = self.clock() - start
        self.done = number
        metrics: dict[str, Any] = {
            "step": number,
            "loss": done.loss,
            "lr": lr,
            "grad_norm": done.grad_norm,
            "step_ms": elapsed_s * 1e3,
            "tokens_per_s": s.B * s.T * len(micro) / elapsed_s,
        }
        if mode == "stop":
            accept(done)
        if any(reasons):
            metrics["skipped"] = reasons[0]
            self._refused(number, reasons[0], micro, stop=mode == "stop")
        return metrics

    def _refused(self, number: int, reason: str, micro: list[dict[str, Array]], stop: bool) -> None:
        """Say what was wrong with a step, and decide whether the run goes on."""
        cause = "" if "deviations" in reason else f"; {find_first(self.job.engine, micro)}"
        what = f"step {number}: {reason}{cause}"
        if stop:
            self.diagnosis = (
                f"{what}; weights were updated before this was known, so the run ends (--guard skip goes on)"
            )
        elif self.guard.exhausted:
            self.diagnosis = f"{what}; {sum(self.guard.recent)} of the last {len(self.guard.recent)} steps were skipped"
        else:
            self.listener.note(f"{what}; its update is skipped ({self.guard.skipped} so far)")


def _free(path: Path) -> Path:
    """Give a path, or where something is there, the first free one of ``NAME-2``, ``NAME-3``, ..."""
    others = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(2))
    return next(p for p in chain([path], others) if not os.path.lexists(p))


def train(
    job: Job,
    root: Path,
    listener: Listener,
    clock: Callable[[], float] = time.perf_counter,
    resume: checkpoint.Checkpoint | None = None,
    roofs: Roofs | None = None,
) -> Result:
    """Run a job's steps and write its folder; the folder is complete after an interrupt too.

    Parameters
    ----------
    root : the folder that holds all runs.
    clock : in seconds.
    resume : the checkpoint that `job` was prepared with; its run goes on.
    roofs : what the machine can do, for the profile.
    """
    s, engine = job.settings, job.engine
    trainer = Trainer(job, listener, clock)
    if resume is None:
        config = {**asdict(s), "sizes": asdict(job.config), "corpus": job.corpus.description}
        run = Run(root, s.run, config, {"machine_id": machine_id(), "commit": commit()})
    else:
        run, history = Run.reopen(resume.run, resume.state["step"])
        trainer.restore(resume, history)
    with run:
        if s.tensorboard:
            run.begin_events(trainer.history, trainer.val)
        left = checkpoint.clean(run.path)
        left += remove_leftovers(Path(os.path.realpath(s.save))) if s.save is not None else []
        for name in left:
            listener.note(f"removed {name}, which an interrupted save has left")
        profiler = Profiler(engine)
        with stop_flag() as stopped:
            trainer.run(run, profiler, stopped)
            stopped_by = stopped()
            if not stopped_by:
                trainer.finish(run)
        profiler.remove()
        profile = (
            profiler.profile(
                model=job.name, B=s.B * s.micro_batches, T=s.T, choice=job.choice, checked=job.checked, roofs=roofs
            )
            if profiler.steps
            else None
        )
        if profile:
            profile.hashes, profile.codes = hashes(engine), codes(engine)
        summary = _summary(trainer, bool(stopped_by))
        for name, content in (("profile.json", profile.to_json() if profile else {}), ("summary.json", summary)):
            try:
                run.write(name, content)
            except UserError as e:
                listener.note(str(e))
        newest = trainer.saved[0] if trainer.saved else None
        return Result(run.path, summary, stopped_by, trainer.diagnosis, newest, profile)


def _summary(trainer: Trainer, interrupted: bool) -> dict[str, Any]:
    engine, history = trainer.job.engine, trainer.history
    return {
        "steps": trainer.done,
        "interrupted": interrupted,
        "skipped": trainer.guard.skipped,
        "diagnosis": trainer.diagnosis,
        "changes": trainer.job.changes,
        "checkpoint": str(trainer.saved[0]) if trainer.saved else None,
        "weights": str(trainer.weights) if trainer.weights else None,
        "loss_first": history[0]["loss"] if history else None,
        "loss_last": history[-1]["loss"] if history else None,
        "val_loss": {str(k): v for k, v in trainer.val.items()},
        "step_ms_median": median(m["step_ms"] for m in history) if history else None,
        "tokens_per_s": median(m["tokens_per_s"] for m in history) if history else None,
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_peak_bytes": engine.predicted_peak_bytes,
        "arena": engine.plan.describe(),
        "threads": engine.threads,
    }
