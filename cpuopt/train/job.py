"""A job: the settings of a run, and the model, data and engine that they give."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from .. import models, nn
from ..building import Array, BuildOptions, Built, build
from ..check import gate
from ..check.cases import Case
from ..check.gate import judging, require_loadable, require_right
from ..check.result import Result
from ..comm import SERIAL, Comm
from ..data.batches import SORTED, Batches
from ..data.chats import ChatBatches, Chats, load_chats
from ..data.corpus import Corpus, files_of, is_examples, load_corpus
from ..data.given import Batch, Given
from ..data.tokenizers import TOKEN_FILE, own_tokenizer
from ..engine import Engine, Step, load_kernels
from ..errors import UserError
from ..files.reading import from_json
from ..isolate.child import Child
from ..kernels import registry
from ..kernels.compile import cache
from ..kernels.roofs import MICRO
from ..kernels.toolkit import threads as numba_threads
from ..machine import ORDER, forget_peak
from ..models import Config
from ..nn.initial import initialize
from ..ops import USUAL
from ..ops.declaration import Spec
from ..ops.dequantize import BLOCKS, numbers
from ..ops.storage import TYPES, WIDE
from ..program.fuse import chosen as rewrites
from ..program.precision import NARROW
from ..program.quantize import INT8
from ..program.tree import divides
from ..weights import NO_MARKS, Adapter, Marks, Weights, check_target, copy_into, require_own
from ..wording import count
from . import plans
from .checkpoint import Checkpoint, load, open_weights
from .first import judge_first_step
from .frozen import Read, digests, drawn
from .guard import Guard
from .provenance import compare, made_by
from .samples import require_samples
from .schedule import rate
from .settings import DTYPES, FLAGS, FREE, flag, stored
from .settings import Settings as Settings

Progress = Callable[[int, int, str], None]
Start = Weights | Checkpoint | None
"""What a run starts from: weights in files, a checkpoint, or the seed."""
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


@dataclass
class Job(TrainingSteps):
    """A job with its model's config, its corpus, and the checks that its kernels passed."""

    name: str
    config: Config
    corpus: Corpus | Given | Chats
    checked: list[dict[str, Any]]
    made_by: dict[str, dict[str, str]]
    frozen: Mapping[str, str]
    """The hashes of the parameters that steps leave as they are, by name."""
    source: Read = field(repr=False)
    """Loads a frozen parameter as float32 from its source (`--init` or the seed)."""
    marks: Marks
    """The ids that begin and end a text, as the initial weights name them."""
    changes: tuple[str, ...] = ()
    """The changes that the user accepted when the run was resumed."""
    notes: tuple[str, ...] = ()
    """The changes since the checkpoint that need no acceptance."""

    @property
    def epoch_steps(self) -> float | None:
        """The steps in which all data are seen once; None for inputs that a model brings."""
        if not isinstance(self.batches, ChatBatches | Batches):
            return None
        return len(self.batches) / self.settings.micro_batches

    @property
    def planned_bytes(self) -> int:
        """The expected peak memory of the process: that of training, and the copy of the weights that samples read."""
        return self.engine.predicted_peak_bytes + sample_bytes(self.settings, self.config.n_params)

    @property
    def adapter(self) -> Adapter | None:
        """The adapters that the run trains, as they are now."""
        if self.settings.lora is None:
            return None
        arrays, lora = self.engine.parameters(), nn.Lora.parse(self.settings.lora)
        layers = tuple(nn.adapted_layers(arrays))
        return Adapter(Path(self.settings.run), lora, layers, self._now, self.settings.init)

    def weight(self, name: str) -> Array:
        """Return a parameter of the model as it is now, in float32: with what its adapter adds to it."""

        def read(name: str) -> Array:
            return self.source(name) if name in self.frozen else self._now(name)

        return self.adapter.merged(read)(name) if self.adapter else read(name)

    def _now(self, name: str) -> Array:
        """Return a parameter of the engine in float32."""
        return numbers(self.engine.parameters()[name])


def resumed(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Settings:
    """Build the settings of a resumed run: the checkpoint's, with the changes in `given` that are allowed.

    Raises
    ------
    UserError
        Naming the settings that must not change.
    """

    def wrong(what: str) -> UserError:
        return UserError(f"--resume {str(checkpoint.run)!r}: {what}")

    try:
        there = vars(from_json(Settings, checkpoint.state["settings"], "settings"))
    except ValueError as e:
        raise wrong(f"{e}, in its state.json; take another run") from e
    moved = {"init"} if checkpoint.frozen and there["init"] else set()  # what is there is compared, not where it lies
    moved |= {"order"} if there["order"] is None else set()  # of a run in float32, or of an earlier version
    if checkpoint.state["settings"].get("local_steps"):
        raise wrong(
            "the run has local steps, with which this version cannot go on; start a new run from its weights with "
            f"--init {str(checkpoint.run)!r}"
        )
    other = {n: x for n, x in given.items() if n not in (*FREE, *moved) and x != there[n]}
    if isinstance(there["model"], str) and models.is_own(there["model"]):
        if "model" not in given:
            raise wrong(
                "the run's model is in a file of code, which no checkpoint starts by itself; if you trust the file, "
                f"name it: --model {there['model']}"
            )
        if models.is_own(other.get("model", "")) and str(models.parse(other["model"])) == checkpoint.state["model"]:
            del other["model"]  # the same, from another folder; what is in the file is compared
    if other:
        had = {n: f"no {flag(n)}" if there[n] is None else f"{n} {there[n]!r}" for n in other}
        if "model" in other and there["init"]:
            had["model"] = f"the model of --init {there['init']!r}"
        flags = ", ".join(f"{had[n]}, not {x!r}" for n, x in other.items())
        raise wrong(f"the run has {flags}; leave that out, or start a new run")
    if there["kernels"] and "kernels" not in given:
        flags = " ".join(f"--kernels {file!r}" for file in there["kernels"])
        raise wrong(
            "the run has kernels of its own, which are code that no checkpoint starts by itself; if you trust these "
            f"files, name them: {flags}"
        )
    settings, done = Settings(**there | dict(given)), checkpoint.state["step"]
    complete = done >= settings.steps and not given.keys() & {"save", "epochs"}
    if complete and settings.save and os.path.lexists(settings.save):
        raise wrong(
            f"the run is complete after {count(done, 'step')}, and its --save {settings.save!r} is there; to go on, "
            "give more steps with --steps N, and another --save PATH"
        )
    return settings


def model_of(settings: Settings, resume: Checkpoint | None = None) -> tuple[str, Config, Start]:
    """Find the model's name and config, and what it starts from; check that the sequence fits its context."""
    settings.check()
    start: Start = resume
    if resume is None and settings.init is not None:
        start = open_weights(Path(settings.init))
    own = settings.model is not None and models.is_own(settings.model)
    config = start.config if start else models.parse(models.DEFAULT if settings.model is None else settings.model)
    if settings.model is not None and (isinstance(start, Weights) or (start and own)):
        asked = models.parse(settings.model)
        sizes, there = ({"model": c.model} | asdict(c) for c in (asked, config))
        for size, n in there.items() if isinstance(start, Weights) else ():
            if sizes[size] != n and not (own and size == "digest"):
                raise UserError(
                    f"--model {settings.model} has {size} {sizes[size]}, and --init {settings.init} has {n}; "
                    "leave --model out, since the weights fix the sizes"
                )
        config = asked if own else config  # its file may have changed since, as long as the weights fit
    name = resume.state["model"] if resume else models.name_of(config)
    if settings.save is not None:
        check_target(Path(settings.save), config)
    if config.block_size < settings.T:
        raise UserError(
            f"-T {settings.T}: {name} has a context of {config.block_size} tokens; "
            f"take -T {config.block_size} or less, or a model with a longer context"
        )
    return name, config, start


def prepare(
    settings: Settings,
    progress: Progress = lambda done, total, name: None,
    resume: Checkpoint | None = None,
    accept_changes: bool = False,
    comm: Comm = SERIAL,
    agreed: Callable[[Mapping[str, Any], Mapping[str, str]], None] = lambda facts, kernels: None,
) -> Job:
    """Turn settings into a job, ready to step. Nothing is written.

    Its stages: the model and what it starts from, the plan (how the model becomes calls), the data, the engine, the
    weights that it starts with, and the run with what a checkpoint says of it.

    Parameters
    ----------
    resume : a checkpoint to continue from, with settings that agree with it (`resumed`).
    accept_changes : whether to continue with kernels that differ from the checkpoint's.
    comm : the ranks that train together; this process alone by default.
    agreed : called before ranks exchange anything, with what must be the same on all, and digests of kernels.

    Raises
    ------
    UserError
        For settings that cannot be met.
    """
    require_shares(settings, comm.size)
    name, config, start = model_of(settings, resume)
    settings = sized(settings, config)
    fusions(settings)  # refused before anything is loaded
    judged = list[Result]()
    with judging((*settings.kernels, *config.files), numba_threads.set_threads(settings.threads)) as child:
        require_loadable(child)  # before they are loaded here
        load_kernels(settings.kernels)
        settings, notes = planned(settings, config)
        settings, corpus = with_data(settings, config, start)
        require_samples(settings, config, corpus.tokenizer, isinstance(corpus, Given))

        def ready(built: Built, threads: int) -> None:
            judged.extend(admitted(built, threads, child))
            kernels = dict.fromkeys(built.own_kernels.values())
            notes.extend((*unused(settings.kernels, kernels), *gate.notes(judged)))
            if any(r.seconds for r in judged):
                forget_peak()  # which a note says; not in the gate: a run's later judgements belong to its peak
            sources = {f"the source of {k.name}": cache.digest(k.function) for k in kernels}
            agreed({"text of --data with the fingerprint": corpus.fingerprint}, sources)

        engine = Engine(
            *plan_of(settings, config, comm),
            seed=settings.seed if start is None else None,
            progress=progress,
            hint=partial(smaller, settings, config),
            ready=ready,
            reserved=sample_bytes(settings, config.n_params),
        )
    engine.dropout_seed = settings.seed
    engine.notes[:0] = notes
    source = filled(engine, config, start, settings.init, settings.seed)
    job = Job(
        settings,
        engine,
        corpus.batches("train", settings.B, settings.T, seed=settings.seed),
        name,
        config,
        corpus,
        [r.describe() for r in judged],
        made_by(engine, settings.kernels, config.files),
        digests(engine),
        source,
        start.marks if start else NO_MARKS,
    )
    if resume is not None:
        job.changes, job.notes = since(resume, job, accept_changes)
        load(resume, engine)
        engine.step_number, job.done = resume.state["updates"], resume.state["step"]
        job.guard.restore(resume.state["guard"])
    job.checked += [r.describe() for r in judge_first_step(job)]
    return job


def admitted(built: Built, threads: int, child: Child) -> list[Result]:
    """Judge the kernels of a program before its first step, at awkward sizes and at its own; return the results.

    Raises
    ------
    UserError
        For a kernel that is refused, or does not promise the bits that ranks promise.
    """
    kernels = built.own_kernels
    if built.options.comm.size > 1 and built.options.reduce == "exact":
        for kernel in kernels.values():
            if not kernel.same_bits:
                raise UserError(
                    f"{kernel.name} does not promise identical bits on any number of threads, so several ranks would "
                    "not be one with --reduce exact; choose another variant, or --reduce fast"
                )
    calls = [(k, Case.of(call)) for call, k in kernels.items()]
    return require_right(kernels.values(), calls, threads=threads, child=child)


def with_data(settings: Settings, config: Config, start: Start) -> tuple[Settings, Corpus | Given | Chats]:
    """Return a job's settings, with the steps that their epochs are, and its data.

    Raises
    ------
    UserError
        For data that cannot be read, and for epochs of inputs that a model brings.
    """
    if (given := config.inputs(settings.B, settings.T)) is not None:
        if settings.epochs is not None:
            raise UserError(f"--epochs {settings.epochs}: the model brings its inputs, which have no end; take --steps")
        return settings, given
    tokenizer = start.tokenizer if start else None
    if not isinstance(start, Checkpoint):
        tokenizer = settings.tokenizer or tokenizer
    if isinstance(start, Weights) and not settings.data.endswith(TOKEN_FILE):
        tokenizer = own_tokenizer(tokenizer, start.path, config.vocab_size)
    corpus = data_of(settings, config.vocab_size, tokenizer)
    return settings.of_epochs(len(corpus.batches("train", settings.B, settings.T))), corpus


def data_of(s: Settings, vocab_size: int, tokenizer: str | None) -> Corpus | Chats:
    """Load the examples or the text of a job."""
    if is_examples(s.data):
        return examples_of(s, vocab_size, tokenizer)
    return load_corpus(s.data, vocab_size=vocab_size, T=s.T, B=s.B, tokenizer=tokenizer)


def examples_of(s: Settings, vocab_size: int, tokenizer: str | None, adapters: Sequence[Path] = ()) -> Chats:
    """Load the examples of a job; `adapters` are directories of adapters, which may have a chat template."""
    return load_chats(
        files_of(s.data),
        name=s.data,
        vocab_size=vocab_size,
        T=s.T,
        tokenizer=tokenizer,
        chat_format=s.chat_format,
        system=s.system,
        adapters=adapters,
        pack=s.pack,
        truncate=s.truncate,
        skip_invalid=s.skip_invalid,
    )


def filled(engine: Engine, config: Config, start: Start, init: str | None, seed: int) -> Read:
    """Fill in the weights that no checkpoint has; return where those that steps leave alone come from."""
    if isinstance(start, Weights):
        parameters = engine.parameters()
        added = {name: parameters.pop(name) for layer in nn.adapted_layers(parameters) for name in nn.adapter_of(layer)}
        copy_into(parameters, start)
        initialize(engine.model, added, seed)
        if start.dtype == "q8_0" and engine.options.base == INT8:
            engine.notes.append(f"--base {INT8} rounds the blocks of --init again; --base q8_0 keeps their numbers")
        return start.read
    frozen = [p for p in engine.program.parameters if not p.trained]
    if start is None or not frozen:
        return drawn(config, seed)
    source = start.initial(config, {"init": init, "seed": seed})
    for p in frozen:
        engine.array(p)[...] = source(p.name)
    return source


def require_shares(settings: Settings, ranks: int) -> None:
    """Refuse a number of ranks that cannot share the micro-batches of a step.

    Raises
    ------
    UserError
        With the numbers that can.
    """
    n, tokens = settings.micro_batches, settings.B * settings.T
    if divides(ranks, n):
        return
    can = ", ".join(str(r) for r in range(1, n + 1) if divides(r, n))
    raise UserError(
        f"{ranks} ranks cannot share the {n} micro-batches of {settings.B}x{settings.T} in a step: each rank needs a "
        f"power of two of them, so {can} can; or take --total-batch {ranks * tokens}, {ranks} micro-batches"
    )


def since(resume: Checkpoint, job: Job, accept: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare a job with the checkpoint that it continues from; return all accepted changes, and notes.

    Raises
    ------
    UserError
        For another text, and for other kernels, rewrites or another order of the text if that is not accepted.
    """
    s, there = job.settings, resume.state["corpus"]
    if there not in (job.corpus.fingerprint, job.corpus.ends):
        raise UserError(f"--data {s.data} holds other text than when {str(resume.path)!r} was written")
    then = from_json(Settings, resume.state["settings"], "settings")
    refused, notes = compare(resume.state.get("made_by"), job.made_by, rewritten(then, s))
    if isinstance(job.corpus, Corpus) and there == job.corpus.ends:
        notes.append("the checkpoint knows the sizes and the ends of its text only, so the rest may be another now")
        if (windows := job.corpus.batches("train", s.B, s.T, seed=s.seed).n_windows) > SORTED:
            refused.append(f"the order of the text, for {windows} rows are now shuffled without sorting them")
    if refused and not accept:
        raise UserError(
            f"--resume {str(resume.run)!r}: {'; '.join(refused)}: resuming would change the run; "
            "restore it, or accept the change with --accept-changes"
        )
    before = resume.state.get("changes", [])
    return (*before, *(f"after step {resume.state['step']}: {text}" for text in refused)), (*refused, *notes)


def rewritten(then: Settings, now: Settings) -> str:
    """Return which setting of a resumed run adds or leaves out the rewrite ``update``; ``""`` if none does."""
    if fusions(then) == fusions(now):
        return ""
    if now.two_pass:
        return f"{now.two_pass} leaves out the rewrite 'update', which the run had"
    return f"without {then.two_pass} the rewrite 'update' comes in, which the run did not have"


def require_correct(engine: Engine, files: Sequence[str]) -> list[dict[str, Any]]:
    """Check each kernel of an engine at a few small sizes, those of users' files in a process of their own.

    Raises
    ------
    UserError
        Naming the kernel, the element that is wrong, and both values.
    """
    with judging(files, engine.threads) as child:
        return [r.describe() for r in require_right(engine.kernels, threads=engine.threads, child=child)]


def fusions(settings: Settings) -> tuple[str, ...]:
    """Return the rewrites of a job; ``update`` is not among them if a setting needs all gradients before."""
    return rewrites(settings.fuse, settings.variant, settings.two_pass)


def planned(settings: Settings, config: Config) -> tuple[Settings, list[str]]:
    """Fill in what a run keeps of this machine: the order of sums in bf16, and the rules of ``--variant auto``.

    Returns
    -------
    The settings, and notes, of which that on a plan comes first.

    Raises
    ------
    UserError
        If kernels are imported with another order.
    """
    notes = list[str]()
    if settings.dtype != WIDE:  # float32 has one order
        if settings.order not in (None, MICRO.order):
            raise UserError(
                f"--order {settings.order}: kernels are imported with the order {MICRO.order!r}; set {ORDER}="
                f"{settings.order} before Python starts"
            )
        settings = replace(settings, order=MICRO.order)
        if MICRO.emulated:
            notes.append(
                f"products are added in the order {MICRO.order!r}, for which this processor has no instruction"
            )
    if settings.variant != registry.AUTO or settings.plan is not None:
        return settings, notes
    other = {
        USUAL: settings.optimizer != USUAL,
        "training all parameters": bool(settings.freeze or settings.lora),
        "moments and weights in float32": any(getattr(settings, n) != FLAGS[n].default for n in ("moments", "weights")),
    }
    if which := next((name for name, differs in other.items() if differs), ""):
        note = f"--variant auto: plans are for {which}; all ops stay with {registry.DEFAULT}"
        return replace(settings, plan=()), [note, *notes]
    threads = numba_threads.set_threads(settings.threads)
    key = plans.key(config.to_json(), settings.B, settings.T, threads, fusions(settings), settings.dtype)
    rules, note = plans.rules(key, settings.kernels)
    return replace(settings, plan=rules), [note, *notes]


def sized(settings: Settings, config: Config | None = None) -> Settings:
    """Return the settings with the B and T of the model: a model that brings its inputs has its own.

    Raises
    ------
    UserError
        If such a model is given data.
    """
    config = config or models.parse(settings.model or models.DEFAULT)
    B, T = config.batch_size(settings.B, settings.T)
    if config.inputs(B, T) is not None:
        for flag, x in (("--data", settings.data != "builtin"), ("--tokenizer", settings.tokenizer is not None)):
            if x:
                raise UserError(f"{flag}: {models.name_of(config)} brings its own inputs; leave {flag} out")
    return replace(settings, B=B, T=T)


def plan_of(settings: Settings, config: Config, comm: Comm = SERIAL) -> tuple[nn.Module, dict[str, Spec], BuildOptions]:
    """Return what `build` and `Engine` take: a job's module with its adapters, its inputs, and how it becomes calls.

    Raises
    ------
    UserError
        If an adapter is for a layer that the model does not have, or rows of several examples for a model that has no
        input for where they start.
    """
    module, specs = config.sized(settings.B, settings.T)
    if settings.pack:
        if "starts" not in signature(module.forward).parameters:
            raise UserError(
                f"--pack: the forward of {models.name_of(config)} takes no `starts` (B, T), where each token's example "
                "starts in its row; leave --pack out"
            )
        specs = {**specs, "starts": specs["tokens"]}
    if settings.lora is not None:
        layers = nn.add_adapters(module, nn.Lora.parse(settings.lora), config.head)
        if settings.save is not None:
            require_own(config, layers)
    how = BuildOptions(
        choice=registry.Choice(settings.variant, settings.swap, settings.plan or ()),
        fuse=fusions(settings),
        recompute=settings.recompute if settings.recompute == "all" else int(settings.recompute),
        micro_batches=settings.micro_batches // comm.size,
        reduce="exact" if settings.reduce == "exact" else "fast",
        zero=settings.zero,
        comm=comm,
        optimizer=settings.optimizer,
        freeze=settings.freeze,
        dtype=stored(settings.dtype),
        base=base if (base := settings.base or "") in BLOCKS else "",
        moments=DTYPES[settings.moments],
        weights=DTYPES[settings.weights],
        threads=settings.threads,
        processes=settings.processes,
        kernel_files=(*settings.kernels, *config.files),
    )
    return module, specs, how


def sample_bytes(settings: Settings, parameters: int) -> int:
    """Return the bytes of the copy of the weights that samples are generated with."""
    each = TYPES[WIDE if settings.dtype == WIDE else NARROW].bytes  # of int8 too: embeddings have two
    return parameters * each if settings.sample_every else 0


def unused(files: Sequence[str], ran: Collection[registry.Kernel]) -> list[str]:
    """Return a note for each file of kernels of which none runs, with the flag that uses one."""
    found = []
    for file in files:
        path = str(Path(file).resolve())
        there = [k for k in registry.KERNELS.values() if k.file == path]
        mine = [k for k in there if k.variant not in (registry.BASE, registry.GENERATED)]
        ops = {k.op.name for k in ran}
        if mine and not any(k.file == path for k in ran):
            k = next((k for k in mine if k.op.name in ops), mine[0])
            hint = f"--swap {k.op.name}={k.variant} uses it" if k.op.name in ops else "the model does not call its op"
            found.append(f"--kernels {file}: {k.name} does not run; {hint}")
    return found


def smaller(settings: Settings, config: Config, there: int) -> str:
    """Find a B and T whose arena fits into the available memory, by halving."""
    fits = 4 * config.n_params <= there  # else no trace is worth its minutes
    B, T = (settings.B, settings.T) if fits else (1, 1)
    while B > 1 or T > 1:
        B, T = (B // 2, T) if B > 1 else (B, T // 2)
        less = replace(settings, B=B, T=T)
        needed = build(*plan_of(less, config)).plan().total_bytes
        if needed + sample_bytes(less, config.n_params) <= there:
            return f"try -B {B} -T {T}"
    return "no B and T fit: try a smaller --model"


def build_only(settings: Settings, comm: Comm = SERIAL) -> Built:
    """Trace a job's program and choose its kernels, of one rank; nothing is compiled or allocated."""
    require_shares(settings, comm.size)
    _, config, _ = model_of(settings)
    load_kernels(settings.kernels)
    settings, notes = planned(sized(settings, config), config)
    built = build(*plan_of(settings, config, comm))
    return replace(built, notes=[*notes, *built.notes])
