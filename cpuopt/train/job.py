"""A job: everything a run is asked to do, and the model, data and engine that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import ops
from ..check.judged import Judged, require_loadable, require_right, sized_of
from ..data.batches import SORTED
from ..data.corpus import Corpus, load_corpus
from ..engine import Built, Engine, build, load_kernels
from ..errors import UserError
from ..files.reading import misfit
from ..isolate.child import Child
from ..kernels import registry
from ..kernels.toolkit import threads as numba_threads
from ..models import specs
from ..models.gpt2 import GPT2, PRESETS, Config, parse_config
from ..program.fuse import FUSIONS
from ..program.fuse import parse as parse_fusions
from ..weights import Weights, check_target, copy_into
from . import plans, tensorboard
from .checkpoint import Checkpoint, load, open_weights
from .provenance import compare, made_by
from .record import check_name
from .schedule import SCHEDULES

GUARDS = ("auto", "skip", "stop", "off")
"""``skip`` leaves out the update of a bad step; ``stop`` ends the run after one; ``auto`` skips where all gradients are
known before the first update, and else stops."""
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Settings:
    """All that a run is asked to do; the defaults are those of ``train_gpt2.c`` where it has them."""

    model: str | None = None
    """By default that of `init`, or gpt2-124M."""
    init: str | None = None
    data: str = "builtin"
    B: int = 4
    T: int = 64
    steps: int = 40
    variant: str = registry.DEFAULT
    plan: tuple[str, ...] | None = None
    """The rules that ``--variant auto`` came to when the run began; a resumed run keeps them."""
    swap: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    fuse: str = "auto"
    threads: int | None = None
    seed: int = 0
    lr: float = 1e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    lr_end: float = 0.0
    """What the schedule falls to, as a share of `lr`."""
    optimizer: str = ops.USUAL
    beta1: float | None = None
    """This and the next four: by default as the optimizer declares; None where it has no such number."""
    beta2: float | None = None
    eps: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    decay: str = "all"
    """Which parameters decay: ``all``, or ``matrices``, those of two axes."""
    clip: float | None = None
    total_batch: int | None = None
    """Tokens of a step; by default B * T. A multiple of that is gathered over micro-batches."""
    overfit: bool = False
    """Train on the first batch only."""
    guard: str = "auto"
    """What to do about a step that is not finite or far off: one of ``GUARDS``."""
    guard_z: float = 0.0
    val_every: int = 10
    val_batches: int = 5
    sample_every: int = 0
    sample_tokens: int = 64
    prompt: str = ""
    """What samples begin with."""
    save: str | None = None
    save_every: int = 0
    """Steps between checkpoints; 0 leaves them to the end of an interrupted run."""
    keep: int = 2
    run: str = "train"
    tensorboard: bool = False
    """Whether to write events for TensorBoard besides the run's own files."""
    processes: int = 1

    def __post_init__(self) -> None:
        for name, default in self._numbers.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    @property
    def _numbers(self) -> dict[str, float]:
        return ops.OPTIMIZERS[self.optimizer].defaults if self.optimizer in ops.OPTIMIZERS else {}

    @property
    def numbers(self) -> dict[str, float]:
        """The optimizer's numbers for `Engine.step`, without the learning rate."""
        return {name: getattr(self, name) for name in self._numbers}

    def check_optimizer(self) -> None:
        """Refuse an optimizer that does not exist, and numbers that it does not have or cannot use.

        Raises
        ------
        UserError
            Naming the flag.
        """
        if self.optimizer not in ops.OPTIMIZERS:
            raise UserError(
                f"--optimizer {self.optimizer!r}: there is no such; {registry.nearest(self.optimizer, ops.OPTIMIZERS)}"
            )
        for name in dict.fromkeys(name for o in ops.OPTIMIZERS.values() for name in o.defaults):
            x, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if x is not None and name not in self._numbers:
                has = ", ".join(f"--{n.replace('_', '-')}" for n in self._numbers)
                raise UserError(f"{flag} {x}: {self.optimizer} has no {name.replace('_', ' ')}; it has --lr, {has}")
        for number in ops.OPTIMIZERS[self.optimizer].numbers:
            x = getattr(self, number.name)
            if wrong := number.wrong(x):
                raise UserError(f"--{number.name.replace('_', '-')} {x}: expected {wrong}")

    def check(self) -> None:
        """Refuse numbers that no run can use.

        Raises
        ------
        UserError
            Naming the flag.
        """
        for flag, n, least in (
            ("-B", self.B, 1),
            ("-T", self.T, 1),
            ("--steps", self.steps, 1),
            ("--threads", 1 if self.threads is None else self.threads, 1),
            ("--seed", self.seed, 0),
            ("--warmup-steps", self.warmup_steps, 0),
            ("--val-every", self.val_every, 0),
            ("--val-batches", self.val_batches, 1),
            ("--sample-every", self.sample_every, 0),
            ("--sample-tokens", self.sample_tokens, 1),
            ("--save-every", self.save_every, 0),
            ("--keep", self.keep, 1),
        ):
            if n < least:
                raise UserError(f"{flag} {n}: expected {least} or more")
        self.check_optimizer()
        for flag, x in (("--lr", self.lr), ("--clip", 1.0 if self.clip is None else self.clip)):
            if not 0 < x < float("inf"):
                raise UserError(f"{flag} {x}: expected a positive number")
        if not 0 <= self.guard_z < float("inf"):
            raise UserError(f"--guard-z {self.guard_z}: expected 0 or more")
        if not 0 <= self.lr_end <= 1:
            raise UserError(f"--lr-end {self.lr_end}: expected a share of --lr, from 0 to 1")
        if self.warmup_steps and self.warmup_steps >= self.steps:
            raise UserError(f"--warmup-steps {self.warmup_steps}: expected less than the {self.steps} steps of --steps")
        for flag, word, known in (
            ("--schedule", self.schedule, tuple(SCHEDULES)),
            ("--decay", self.decay, ("all", "matrices")),
            ("--guard", self.guard, GUARDS),
        ):
            if word not in known:
                raise UserError(f"{flag} {word!r}: expected one of {', '.join(known)}")
        if self.total_batch is not None and (self.total_batch < 1 or self.total_batch % (self.B * self.T)):
            near = max(1, round(self.total_batch / (self.B * self.T))) * self.B * self.T
            raise UserError(
                f"--total-batch {self.total_batch}: expected a multiple of {self.B * self.T}, the tokens of a "
                f"micro-batch, "
                f"-B {self.B} times -T {self.T}; the nearest is {near}"
            )
        check_name(self.run)
        if self.tensorboard:
            tensorboard.require()
        if self.save is not None:
            check_target(Path(self.save))

    @property
    def micro_batches(self) -> int:
        """How many micro-batches make a step."""
        return (self.total_batch or self.B * self.T) // (self.B * self.T)

    @property
    def variants(self) -> list[str]:
        """All that are named."""
        return [self.variant, *(s.partition("=")[2] for s in (*self.swap, *(self.plan or ())))]

    @property
    def two_pass(self) -> str:
        """Name the flag that needs all gradients before the first update; empty if none does."""
        if self.clip:
            return f"--clip {self.clip}"
        if self.micro_batches > 1:
            return f"--total-batch {self.total_batch}"
        return f"--guard {self.guard}" if self.guard == "skip" else "--guard-z" if self.guard_z else ""


@dataclass
class Job:
    """What a configuration comes to: sizes, data, engine, and the checks that its kernels passed."""

    settings: Settings
    name: str
    config: Config
    corpus: Corpus
    engine: Engine
    choice: registry.Choice
    rewrites: tuple[str, ...]
    checked: list[dict[str, Any]]
    made_by: dict[str, dict[str, str]]
    changes: tuple[str, ...] = ()
    """What the user let change when the run was resumed."""
    notes: tuple[str, ...] = ()
    """What has changed since then that needs no leave."""


FREE = {"steps", "threads", "processes", "save", "save_every", "keep", "val_every", "val_batches", "guard", "guard_z"}
FREE |= {"sample_every", "sample_tokens", "prompt", "tensorboard", "kernels"}
"""Settings that a resumed run may have otherwise: no number of its steps depends on them.

Of files of kernels, what is in them is compared, not where they lie."""


def resumed(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Settings:
    """Build the settings of a run that goes on: the checkpoint's, and what of `given` may differ.

    Raises
    ------
    UserError
        With what differs and must not.
    """
    if wrong := misfit(checkpoint.state["settings"], Settings, "settings"):
        raise UserError(f"--resume {str(checkpoint.run)!r}: {wrong}, in its state.json; take another run")
    known = {f.name for f in fields(Settings)}
    there = {"optimizer": ops.USUAL}  # where an earlier version does not say
    there |= {n: tuple(x) if isinstance(x, list) else x for n, x in checkpoint.state["settings"].items() if n in known}
    other = {n: x for n, x in given.items() if n not in FREE and x != there.get(n, x)}
    if other:
        flags = ", ".join(f"{n} {there[n]!r}, not {x!r}" for n, x in other.items())
        raise UserError(f"--resume {str(checkpoint.run)!r}: the run has {flags}; leave that out, or start a new run")
    if there.get("kernels") and "kernels" not in given:
        flags = " ".join(f"--kernels {file!r}" for file in there["kernels"])
        raise UserError(
            f"--resume {str(checkpoint.run)!r}: the run has kernels of its own, which are code that no checkpoint "
            f"starts by itself; if you trust these files, name them: {flags}"
        )
    return Settings(**there | dict(given))


def model_of(settings: Settings, resume: Checkpoint | None = None) -> tuple[str, Config, Weights | None]:
    """Find the model's sizes, and its weights if they are given; check that the sequence fits its context."""
    settings.check()
    weights = open_weights(Path(settings.init)) if settings.init is not None and resume is None else None
    if resume is not None:
        name, config = resume.state["model"], Config(**resume.state["sizes"])
    elif weights is None:
        name, config = parse_config("gpt2-124M" if settings.model is None else settings.model)
    else:
        config = weights.config
        name = next((n for n, preset in PRESETS.items() if preset == config), "gpt2-custom")
        asked = parse_config(settings.model)[1] if settings.model is not None else config
        for size, there in asdict(config).items():
            if (wanted := asdict(asked)[size]) != there:
                raise UserError(
                    f"--model {settings.model} has {size} {wanted}, and --init {settings.init} has {there}; "
                    "leave --model out, since the weights fix the sizes"
                )
    if config.block_size < settings.T:
        raise UserError(
            f"-T {settings.T}: {name} has a context of {config.block_size} tokens; "
            f"take -T {config.block_size} or less, or --model with a larger block_size"
        )
    return name, config, weights


def prepare(
    settings: Settings,
    progress: Progress = lambda done, total, name: None,
    resume: Checkpoint | None = None,
    accept_changes: bool = False,
) -> Job:
    """Turn settings into a job, ready to step. Nothing is written.

    Parameters
    ----------
    resume : a checkpoint to go on from, with settings that agree with it (`resumed`).
    accept_changes : whether to go on with other kernels than the checkpoint was made with.

    Raises
    ------
    UserError
        For whatever in the settings cannot be done.
    """
    name, config, weights = model_of(settings, resume)
    rewrites = fusions(settings)
    with Child(settings.kernels, numba_threads.set_threads(settings.threads)) as child:
        require_loadable(child)  # before they are loaded here
        load_kernels(settings.kernels, settings.variants)
        settings, notes = planned(settings, config)
        choice = choice_of(settings)
        corpus = load_corpus(settings.data, vocab_size=config.vocab_size, T=settings.T, B=settings.B)
        told: list[Judged] = []

        def ready(built: Built, threads: int) -> None:
            sizes = sized_of(built.program.calls, built.kernels)
            told.append(require_right(built.kernels, sizes, threads=threads, child=child))

        engine = Engine(
            GPT2(config),
            specs(settings.B, settings.T),
            choice=choice,
            threads=settings.threads,
            seed=settings.seed if weights is None and resume is None else None,
            fuse=rewrites,
            accumulate=settings.micro_batches > 1,
            optimizer=settings.optimizer,
            processes=settings.processes,
            kernel_files=settings.kernels,
            progress=progress,
            hint=lambda there: smaller(settings, config, choice, there),
            ready=ready,
        )
    engine.notes[:0] = [*notes, *told[0].notes()]
    if weights is not None:
        copy_into(engine.parameters(), weights)
    checked = [r.describe() for r in told[0].results]
    job = Job(settings, name, config, corpus, engine, choice, rewrites, checked, made_by(engine, settings.kernels))
    if resume is not None:
        job.changes, job.notes = since(resume, job, accept_changes)
        load(resume, engine)
        engine.step_number = resume.state["updates"]
    return job


def since(resume: Checkpoint, job: Job, accept: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare a job with the checkpoint that it goes on from; give all changes that were accepted, and notes.

    Raises
    ------
    UserError
        For another text, and for other kernels or another order of the text where that is not accepted.
    """
    s, there = job.settings, resume.state["corpus"]
    if there not in (job.corpus.fingerprint, job.corpus.ends):
        raise UserError(f"--data {s.data} holds other text than when {str(resume.path)!r} was written")
    refused, notes = compare(resume.state.get("made_by"), job.made_by)
    if there == job.corpus.ends:
        notes.append("the checkpoint knows the sizes and the ends of its text only, so the rest may be another now")
        if (windows := job.corpus.batches("train", s.B, s.T, seed=s.seed).n_windows) > SORTED:
            refused.append(f"the order of the text, for {windows} rows are now shuffled without sorting them")
    if refused and not accept:
        raise UserError(
            f"--resume {str(resume.run)!r}: {'; '.join(refused)}: the run would go on as another one; "
            "restore what it was, or go on all the same with --accept-changes"
        )
    before = resume.state.get("changes", [])
    return (*before, *(f"after step {resume.state['step']}: {text}" for text in refused)), (*refused, *notes)


def require_correct(engine: Engine) -> list[dict[str, Any]]:
    """Check each kernel of an engine at a few small sizes, so that nothing is shown for a wrong one.

    Raises
    ------
    UserError
        Naming the kernel, the element that is wrong, and both values.
    """
    return [r.describe() for r in require_right(engine.kernels, threads=engine.threads).results]


def fusions(settings: Settings) -> tuple[str, ...]:
    """Choose the rewrites: those named, or by default all for ``optimized`` and ``auto``, none for other variants.

    Clipping, accumulation and a guard that skips need the whole gradient before the first update, so ``update`` then
    stays off by default.
    """
    if settings.fuse != "auto":
        names = parse_fusions(settings.fuse)
        if settings.two_pass and "update" in names:
            raise UserError(
                f"{settings.two_pass} with --fuse {settings.fuse}: 'update' applies updates in the backward, before "
                "the norm is known; fuse without 'update'"
            )
        return names
    rewrites = FUSIONS if settings.variant in (registry.DEFAULT, registry.AUTO) else ()
    return tuple(n for n in rewrites if not (settings.two_pass and n == "update"))


def planned(settings: Settings, config: Config) -> tuple[Settings, list[str]]:
    """Fill in the rules of ``--variant auto`` from the plan for this machine and size; say what they come to."""
    if settings.variant != registry.AUTO or settings.plan is not None:
        return settings, []
    threads = numba_threads.set_threads(settings.threads)
    key = plans.key(asdict(config), settings.B, settings.T, threads, fusions(settings))
    rules, note = plans.rules(key, settings.kernels)
    return replace(settings, plan=rules), [note]


def choice_of(settings: Settings) -> registry.Choice:
    """Give the rules of a job, with those of its plan."""
    plan = settings.plan or () if settings.variant == registry.AUTO else ()
    return registry.Choice(settings.variant, settings.swap, plan)


def smaller(settings: Settings, config: Config, choice: registry.Choice, there: int) -> str:
    """Find a B and T whose arena fits into the memory that is there, by halving."""
    B, T = settings.B, settings.T
    while B > 1 or T > 1:
        B, T = (B // 2, T) if B > 1 else (B, T // 2)
        asked = {"fuse": fusions(settings), "accumulate": settings.micro_batches > 1, "optimizer": settings.optimizer}
        built = build(GPT2(config), specs(B, T), choice=choice, **asked)  # type: ignore[arg-type]
        if built.plan().total_bytes <= there:
            return f"try -B {B} -T {T}"
    return "no B and T fit: try a smaller --model"


def build_only(settings: Settings) -> Built:
    """Trace a job's program and choose its kernels; nothing is compiled or allocated."""
    _, config, _ = model_of(settings)
    load_kernels(settings.kernels, settings.variants)
    settings, notes = planned(settings, config)
    built = build(
        GPT2(config),
        specs(settings.B, settings.T),
        choice=choice_of(settings),
        fuse=fusions(settings),
        accumulate=settings.micro_batches > 1,
        optimizer=settings.optimizer,
    )
    return replace(built, notes=[*notes, *built.notes])
