"""The training loop: a job's steps, and the files of the run's folder."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from ..building import Array
from ..comm import Comm
from ..comm.agree import Agreement, CommonError
from ..data.stored import DataError
from ..data.tokenizers import byte_lengths, tokenizer_files
from ..engine import mean_of
from ..errors import UserError
from ..files import remove_leftovers, write_whole
from ..files.outputs import free
from ..files.reading import to_json
from ..machine import commit, peak_rss_bytes
from ..measure.profile import Profile
from ..measure.quartile import lower_quartile
from ..measure.rates import machine_id
from ..measure.roofline import Roofs
from ..profiler import Profiler
from ..signals import stop_flag
from ..weights import save_adapter, save_weights
from ..weights.tensors import all_below
from . import checkpoint
from .evaluate import bits_per_byte, text_bytes
from .guard import NOTHING_FOUND, find_first
from .job import Job
from .record import Run
from .samples import Samples
from .steps import UNCOUNTED, Taken, named

COMPARE_EVERY = 100
"""Steps between comparisons of the ranks' weights."""


def due(every: int, done: int) -> bool:
    """Return whether what happens every some steps, if `every` is not 0, happens after `done` of them."""
    return every > 0 and done % every == 0


class Listener(Protocol):
    """Observer of a run's progress."""

    def step_done(self, metrics: dict[str, Any]) -> None:
        """One step is done."""

    def validation(self, step: int, loss: float) -> None:
        """A validation loss was measured after `step` updates."""

    def sample(self, step: int, text: str) -> None:
        """The model generated a sample after `step` updates."""

    def note(self, text: str) -> None:
        """A note to the user."""


@dataclass
class RunResult:
    """The result of a run.

    Attributes
    ----------
    stopped_by : the number of the signal that ended it early, or 0.
    diagnosis : the reason why it ended too early, or without weights or a checkpoint; or ``""``.
    refused : whether it ended early for something that the user can mend, such as data that have changed.
    checkpoint : the newest one.
    """

    path: Path
    summary: dict[str, Any]
    stopped_by: int = 0
    diagnosis: str = ""
    checkpoint: Path | None = None
    profile: Profile | None = None
    refused: bool = False

    @property
    def status(self) -> int:
        """The exit status of the process."""
        if self.diagnosis:
            return 2 if self.refused else 1
        return 128 + self.stopped_by if self.stopped_by else 0


def validate(job: Job, stopped: Callable[[], int]) -> float | None:
    """Mean loss over the targets of the first batches of the held-out tokens, in their order; None once `stopped`.

    Ranks share the batches; the mean is exact, so it does not depend on them.

    Raises
    ------
    DataError
        If the tokens of one rank have changed on disk; the same on all ranks.
    """
    s, comm = job.settings, job.engine.comm
    batches = job.corpus.batches("val", s.B, s.T)
    if not len(batches):  # nothing is held out
        return None
    n = min(s.val_batches, len(batches))
    mine, found = np.zeros((2, 2 * n))
    wrong = ""
    for first in range(0, n, comm.size):
        if stopped():
            return None
        if (i := first + comm.rank) < n and not wrong:
            try:
                batch = named(batches.at(i))
            except DataError as e:
                wrong = str(e)
                continue
            if count := job.engine.counted(batch):
                mine[[i, n + i]] = job.engine.forward(**batch), count
    raise_of_any(comm, wrong)
    comm.combine(found, mine)
    return mean_of(found[:n], found[n:])


def raise_of_any(comm: Comm, wrong: str) -> None:
    """Raise the `DataError` of one rank on all of them; nothing if `wrong` is empty everywhere."""
    for rank, text in enumerate(comm.everyone(wrong)):
        if text:
            raise DataError(text if comm.size == 1 else f"rank {rank}: {text}")


def require_same_weights(comm: Comm, parameters: Mapping[str, Array], step: int) -> None:
    """Compare checksums of the weights, as steps read them, on all ranks.

    Raises
    ------
    CommonError
        Naming the first rank, and the first parameter, that differ from those of rank 0; the same on all ranks.
    """
    here = {name: zlib.crc32(p.reshape(-1).view(np.uint8).data) for name, p in parameters.items()}
    first, *others = comm.everyone(here)
    for rank, there in enumerate(others, 1):
        if name := next((name for name, crc in first.items() if there[name] != crc), None):
            raise CommonError(
                f"after step {step}, {name} on rank {rank} is not that on rank 0: memory, processor or a kernel is at "
                "fault there; go on from the last checkpoint without that host"
            )


class Trainer:
    """A job in progress.

    Attributes
    ----------
    history : the metrics of these steps; also of those before a resume.
    val : validation losses, by the steps before them.
    saved : the newest checkpoint, and the step after which it was written.
    tried : the step after which a checkpoint was last tried.
    diagnosis : the reason to take no further step, or ``""``.
    refused : whether that is an error that the user can mend.
    unsaved : the reason why the last checkpoint that was tried is missing, or ``""``.
    weights : the path of the final weights.
    """

    def __init__(
        self,
        job: Job,
        listener: Listener,
        clock: Callable[[], float] = time.perf_counter,
        watch: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.job, self.listener, self.clock, self.watch = job, listener, clock, watch
        self.comm = job.engine.comm
        self.history: list[dict[str, Any]] = []
        self.val: dict[int, float] = {}
        self.diagnosis, self.refused, self.unsaved = "", False, ""
        self._told: set[str] = set()
        self.saved: tuple[Path, int] | None = None
        self.weights: Path | None = None
        self.tried = 0
        self.tokenizer = tokenizer_files(job.corpus.tokenizer or None)
        self.samples: Samples | None = None
        _ = job.corpus.fingerprint  # read now, not when a signal leaves little time for a checkpoint
        s = job.settings
        if (s.patience or s.keep_best) and not len(job.corpus.batches("val", s.B, s.T)):
            raise UserError(
                f"--{'patience' if s.patience else 'keep-best'}: the data have nothing held out to validate on; give "
                "more of them (of examples, a tenth is held out), or leave it out"
            )
        job.micro_batches(1)  # settings that cannot be met are refused before anything is written

    @property
    def done(self) -> int:
        """The number of steps so far."""
        return self.job.done

    @property
    def best(self) -> int | None:
        """The step of the lowest validation loss."""
        return checkpoint.best_step({str(step): loss for step, loss in self.val.items()})

    @property
    def spent(self) -> bool:
        """Whether the last validations, as many as the patience, were no better than one before them."""
        patience, best = self.job.settings.patience, self.best
        return bool(patience) and best is not None and sum(step > best for step in self.val) >= patience

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint besides its tensors."""
        return {
            "step": self.done,
            "ranks": self.comm.size,
            "updates": self.job.engine.step_number,
            "val": {str(k): v for k, v in self.val.items()},
            "guard": self.job.guard.state(),
            "model": self.job.name,
            "architecture": self.job.config.model,
            "sizes": self.job.config,
            "corpus": self.job.corpus.fingerprint,
            "tokenizer": next(iter(self.tokenizer), self.job.corpus.tokenizer) or None,
            "marks": self.job.marks,
            "made_by": self.job.made_by,
            "frozen": self.job.frozen,
            "changes": self.job.changes,
            "settings": self.job.settings,
        }

    def restore(self, resume: checkpoint.Checkpoint, history: list[dict[str, Any]]) -> None:
        """Restore the state of a checkpoint."""
        state = resume.state
        self.history, self.saved, self.tried = history, (resume.path, state["step"]), state["step"]
        self.val = {int(k): v if v is not None else nan for k, v in state["val"].items()}

    def save(self, run: Run) -> None:
        """Write a checkpoint; if that fails, warn and continue."""
        self.tried = self.done
        self.note_changes()
        try:
            state = to_json({**self.state(), "run_id": run.id})
            path = checkpoint.save(run.path, self.job.engine, state, self.job.settings.keep)
        except (OSError, UserError) as e:
            self.unsaved = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            old = f"{self.saved[0].name} stays" if self.saved else "there is none before it"
            text = f"no checkpoint after step {self.done}: {self.unsaved}; {old}, and the next try comes in time"
            self.listener.note(text)
        else:
            self.saved, self.unsaved = (path, self.done), ""

    def note_changes(self) -> None:
        """Report each file of the data whose content on disk is no longer what the run reads, once."""
        for text in self.job.corpus.changes() if not self.comm.rank else ():
            if text not in self._told:
                self._told.add(text)
                more = "the run uses nothing of the change, and --resume needs the old content"
                self.listener.note(f"the data on disk have changed: {text}; {more}")

    def run(self, run: Run, profiler: Profiler, stopped: Callable[[], int]) -> None:
        """Take the remaining steps, until a signal, the guard or an error ends the run; save checkpoints on the way.

        Raises
        ------
        UserError
            For one in the first step, and where only one of several ranks has it.
        """
        s, first = self.job.settings, self.done
        try:
            self._take(run, profiler, stopped)
        except UserError as e:
            if self.done == first or (self.comm.size > 1 and not isinstance(e, DataError)):
                raise
            self._refuse(e)
        useful = self.refused or (not self.diagnosis and (stopped() or s.save_every))
        if self.tried != self.done and useful:
            self.save(run)
        self.note_changes()

    def _take(self, run: Run, profiler: Profiler, stopped: Callable[[], int]) -> None:
        """Take the remaining steps."""
        s = self.job.settings
        trouble = ""
        if s.val_every and not self.done:
            self.measure(run, stopped)
        while self.done < s.steps and not self.diagnosis and not (self.spent or stopped()):
            try:
                self._fetch()
                metrics = self.take_step(profiler)
            except Exception as e:
                if not isinstance(e, UserError) and self.done > self.tried and self.comm.size == 1:
                    self.save(run)  # of a model's own code, which shows its traceback
                raise
            if s.val_every and (due(s.val_every, self.done) or self.done == s.steps):
                metrics |= self.measure(run, stopped)
            if s.sample_every and (self.done == s.steps or due(s.sample_every, self.done)):
                self.show_sample()
            self.history.append(metrics)
            run.step_done(metrics)
            self.listener.step_done(metrics)
            if run.trouble != trouble and (trouble := run.trouble):
                self.listener.note(trouble)
            if self.comm.size > 1 and due(COMPARE_EVERY, self.done):
                require_same_weights(self.comm, self.job.engine.weights_read(), self.done)
            best = s.keep_best and "val_loss" in metrics and self.best == self.done
            if (best or due(s.save_every, self.done)) and not self.diagnosis:
                self.save(run)
        if self.spent and self.done < s.steps:
            since = f"no validation since that of step {self.best} was better"
            self.listener.note(f"ended after step {self.done} of {s.steps}: {since} (--patience {s.patience})")

    def _fetch(self) -> None:
        """Read the batches of the next step; if one rank cannot, all end before it."""
        wrong = ""
        try:
            self.job.micro_batches(self.done + 1)
        except DataError as e:
            wrong = str(e)
        raise_of_any(self.comm, wrong)

    def _refuse(self, e: UserError) -> None:
        """Take no further step for an error that the user can mend."""
        self.refused = True
        self.diagnosis = f"ended after step {self.done}: {e}"

    def conclude(self) -> None:
        """Call it a failure where the last checkpoint that was tried is missing."""
        if self.unsaved and not self.diagnosis:
            newest = f"the newest is that of step {self.saved[1]}" if self.saved else "there is none"
            self.diagnosis = f"no checkpoint after step {self.tried}: {self.unsaved}; {newest}"

    def finish(self, run: Run) -> None:
        """Check that the final weights are finite, and write them to `Settings.save`, or else to a path near it."""
        if self.diagnosis:
            return
        self._take_best(run)
        self.job.engine.collect()
        parameters, wrong = self.job.engine.parameters(), ""
        if bad := [name for name, p in parameters.items() if not all_below(p)]:
            wrong = f"the weights are not finite after step {self.done}: {bad[0]} and {len(bad) - 1} more"
            wrong += "; they are not saved" if self.job.settings.save is not None else ""
        elif self.job.settings.save is not None and not self.comm.rank:
            wrong = self._save_weights(run, Path(self.job.settings.save))
        self.diagnosis = "; ".join(filter(None, (self.diagnosis, wrong)))

    def _save_weights(self, run: Run, wanted: Path) -> str:
        """Write the weights to a path, or else to one near it; return what went wrong, or ``""``."""
        for path in dict.fromkeys([wanted, free(wanted), free(run.path / wanted.name)]):
            try:
                tokenizer, marks = self._tokenizer_in(run), self.job.marks
                if adapter := self.job.adapter:
                    save_adapter(path, self.job.config, adapter, tokenizer)
                else:
                    save_weights(path, self.job.config, self.job.weight, tokenizer=tokenizer, marks=marks)
            except UserError as e:
                self.listener.note(f"the weights are not saved: {e}")
            else:
                self.weights = path
                return f"the weights are at {str(path)!r}, not at {str(wanted)!r}" if path != wanted else ""
        return f"the weights are not at {str(wanted)!r}, and nowhere else"

    def _tokenizer_in(self, run: Run) -> str:
        """Return the tokenizer's name or file; the copy in the run's folder if the file is gone."""
        name, copy = self.job.corpus.tokenizer, next(iter(self.tokenizer), None)
        return name if copy is None or Path(name).exists() else str(run.path / copy)

    def _take_best(self, run: Run) -> None:
        """Put the best weights in the place of the last, if they are kept and are others."""
        if not self.job.settings.keep_best or self.best in (None, self.done):
            return
        path = run.path / checkpoint.FOLDER / f"step-{self.best:08d}"
        try:
            checkpoint.load(checkpoint.verify(path), self.job.engine)
        except UserError as e:
            self.diagnosis = f"the best weights, of step {self.best}, cannot be read: {e}"
            self.diagnosis += f"; the weights are those of step {self.done}"
        else:
            self.listener.note(f"the weights are those of step {self.best}, which has the lowest validation loss")

    def measure(self, run: Run, stopped: Callable[[], int]) -> dict[str, float]:
        """Measure the validation loss, for the step's metrics; a signal leaves it out, changed data end the run."""
        try:
            loss = validate(self.job, stopped)
        except DataError as e:
            self._refuse(e)
            return {}
        if loss is None:
            return {}
        self.val[self.done] = loss
        run.validation(self.done, loss)
        self.listener.validation(self.done, loss)
        bits = bits_per_byte(loss, 1, self.token_bytes)
        return {"val_loss": loss} | ({} if bits is None else {"val_bits_per_byte": bits})

    @cached_property
    def token_bytes(self) -> float | None:
        """The mean bytes of a target of the validation; None if the tokenizer's files are not on this machine."""
        s, lengths = self.job.settings, byte_lengths(self.job.corpus.tokenizer)
        batches = self.job.corpus.batches("val", s.B, s.T)
        if not len(batches):
            return None
        every = [named(batches.at(i))["targets"] for i in range(min(s.val_batches, len(batches)))]
        targets = np.concatenate([x[x >= 0] for x in every])
        found = text_bytes(targets, lengths)
        return None if found is None else found / targets.size

    def show_sample(self) -> None:
        """Show a sample on the first rank."""
        self.job.engine.collect()
        if self.comm.rank:
            return
        try:
            self.listener.sample(self.done, self.sample())
        except UserError as e:  # no reason to lose the run
            self.listener.note(f"no sample after step {self.done}: {e}")

    def sample(self) -> str:
        """Generate a sample; its seed depends only on the run's seed and the step."""
        job = self.job
        if self.samples is None:
            self.samples = Samples(job.settings, job.config, job.corpus.tokenizer)
        return self.samples.text(job.weight, seed=self.done)

    def take_step(self, profiler: Profiler) -> dict[str, Any]:
        """Take one step; return its metrics."""
        with self.watch():
            taken = self.job.take_step(profiler.time_step, self.clock)
        metrics: dict[str, Any] = {
            "step": taken.number,
            "loss": taken.loss,
            "lr": taken.lr,
            "grad_norm": taken.grad_norm,
            "step_ms": taken.seconds * 1e3,
            "tokens_per_s": taken.tokens / taken.seconds,
        }
        if taken.refused:
            metrics["skipped"] = taken.refused
            self._refused(taken)
        return metrics

    def _refused(self, taken: Taken) -> None:
        """Report a refused step, and decide whether the run goes on."""
        if taken.refused == UNCOUNTED:
            self.listener.note(f"step {taken.number}: {UNCOUNTED}; it changes nothing")
            return
        job, guard = self.job, self.job.guard
        outlier = "deviations" in taken.refused
        cause = "" if outlier else f"; {self._cause(taken.number)}"
        what = f"step {taken.number}: {taken.refused}{cause}"
        if job.guarded == "stop":
            self.diagnosis = (
                f"{what}; weights were updated before this was known, so the run ends (--guard skip goes on)"
            )
        elif guard.exhausted:
            self.diagnosis = f"{what}; {sum(guard.recent)} of the last {len(guard.recent)} steps were skipped"
        else:
            self.listener.note(f"{what}; its update is skipped ({guard.skipped} so far)")

    def _cause(self, number: int) -> str:
        """Find what was not finite in a step, on whatever rank."""
        self.job.engine.collect()
        found = self.comm.everyone(find_first(self.job.engine, self.job.micro_batches(number)))
        where = [f"{text} on rank {rank}" for rank, text in enumerate(found) if text != NOTHING_FOUND]
        return found[0] if self.comm.size == 1 or not where else where[0]


def train(
    job: Job,
    root: Path,
    listener: Listener,
    clock: Callable[[], float] = time.perf_counter,
    resume: checkpoint.Checkpoint | None = None,
    roofs: Roofs | None = None,
    watch: Callable[[], AbstractContextManager[object]] = nullcontext,
    began: Callable[[Path], None] = lambda path: None,
    last: bool = False,
) -> RunResult:
    """Run a job's steps and write its folder; the folder is complete after an interrupt too.

    Of several ranks the first one writes the folder, and each its part of a checkpoint. A signal to one ends all.

    Parameters
    ----------
    root : the folder that holds all runs.
    clock : in seconds.
    resume : the checkpoint that `job` was prepared with, whose run continues.
    roofs : the machine's roofs, for the profile.
    watch : a context manager for each step, such as `Watchdog.watch_step`.
    began : called with the run's folder before the first step.
    last : whether the process ends after it, so that nothing is left for further signals once one has stopped the run.
    """
    s, engine, comm = job.settings, job.engine, job.engine.comm
    trainer = Trainer(job, listener, clock, watch)
    with stop_flag(last) as stopped, ExitStack() as stack:
        run = Run.followed()
        with Agreement(comm):
            if not comm.rank:
                run = stack.enter_context(opened(trainer, root, resume))
        run.path = Path(comm.everyone(str(run.path))[0])
        if resume is not None and comm.rank:
            trainer.restore(resume, [])
        began(run.path)
        profiler = Profiler(engine)
        agreed = stopped if comm.size == 1 else lambda: max(comm.everyone(stopped()))
        trainer.run(run, profiler, agreed)
        stopped_by = agreed()
        if not stopped_by:
            trainer.finish(run)
        trainer.conclude()
        profiler.remove()
        how: dict[str, Any] = {"model": job.name, "choice": engine.options.choice, "checked": job.checked}
        how["int8"] = job.int8
        profile = profiler.profile(B=s.B * s.micro_batches, T=s.T, roofs=roofs, **how) if profiler.steps else None
        summary = _summary(trainer, bool(stopped_by))
        if profile:  # of calls, which more disturbed steps move less than a quartile of whole steps
            summary["step_ms_quiet"] = profile.quiet_ms
        for name, content in (("profile.json", profile or {}), ("summary.json", summary)):
            try:
                run.write(name, content)
            except UserError as e:
                listener.note(str(e))
        newest = trainer.saved[0] if trainer.saved else None
        return RunResult(run.path, summary, stopped_by, trainer.diagnosis, newest, profile, trainer.refused)


def opened(trainer: Trainer, root: Path, resume: checkpoint.Checkpoint | None) -> Run:
    """Make or open the folder of a run."""
    job, listener, s = trainer.job, trainer.listener, trainer.job.settings
    if resume is None:
        sizes = {"architecture": job.config.model, "sizes": job.config}
        config = {**vars(s), **sizes, "corpus": job.corpus.description}
        run = Run(root, s.run, config, {"machine_id": machine_id(), "commit": commit()})
    else:
        run, history = Run.reopen(resume.run, resume.state["step"])
        trainer.restore(resume, history)
    for file, kept in trainer.tokenizer.items() if resume is None else ():
        write_whole(run.path / file, [kept])
    if s.tensorboard:
        run.begin_events(trainer.history, trainer.val)
    left = checkpoint.clean(run.path)
    left += remove_leftovers(Path(s.save)) if s.save is not None else []
    for name in left:
        listener.note(f"removed {name}, left by an interrupted save")
    return run


def _summary(trainer: Trainer, interrupted: bool) -> dict[str, Any]:
    engine, history = trainer.job.engine, trainer.history
    quiet = lower_quartile(history, lambda m: m["step_ms"]) if history else {"step_ms": None, "tokens_per_s": None}
    return {
        "steps": trainer.done,
        "interrupted": interrupted,
        "skipped": trainer.job.guard.skipped,
        "diagnosis": trainer.diagnosis,
        "changes": trainer.job.changes,
        "checkpoint": str(trainer.saved[0]) if trainer.saved else None,
        "weights": str(trainer.weights) if trainer.weights else None,
        "loss_first": history[0]["loss"] if history else None,
        "loss_last": history[-1]["loss"] if history else None,
        "val_loss": {str(k): v for k, v in trainer.val.items()},
        "best_step": trainer.best,
        "val_bits_per_byte": bits_per_byte([*trainer.val.values()][-1], 1, trainer.token_bytes)
        if trainer.val
        else None,
        "step_ms_median": median(m["step_ms"] for m in history) if history else None,
        "step_ms_quiet": quiet["step_ms"],
        "tokens_per_s": quiet["tokens_per_s"],
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_peak_bytes": trainer.job.planned_bytes,
        "arena": engine.plan.describe(),
        "threads": engine.threads,
        "ranks": engine.comm.size,
    }
