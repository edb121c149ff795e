"""A job: the settings of a run, and the model, data and engine that they give.

`prepare` makes one in six stages: model, data, plan, engine, start and run. Each returns a value for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from .. import models, nn
from ..building import Array, BuildOptions, Built, Progress, build
from ..check import gate
from ..check.cases import Case
from ..check.gate import judging, require_loadable, require_right
from ..check.result import Result
from ..comm import SERIAL, Comm
from ..data.batches import Batches
from ..data.chats import ChatBatches, Chats, load_chats
from ..data.corpus import Corpus, files_of, is_examples, load_corpus
from ..data.given import Given
from ..data.tokenizers import TOKEN_FILE, own_tokenizer
from ..engine import Engine, load_kernels
from ..errors import UserError
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
from ..ops.dequantize import numbers
from ..ops.storage import TYPES, WIDE
from ..program.precision import NARROW
from ..program.quantize import INT8
from ..program.tree import divides
from ..weights import NO_MARKS, Adapter, Marks, Weights, check_target, copy_into, require_own
from . import plans
from .checkpoint import Checkpoint, load, open_weights
from .first import judge_first_step
from .frozen import Read, digests, drawn
from .provenance import made_by
from .quantization import listed, product_errors, too_coarse
from .resume import since
from .samples import require_samples
from .settings import DATA, EXAMPLES, FLAGS
from .settings import Settings as Settings
from .steps import TrainingSteps, named

Start = Weights | Checkpoint | None
"""What a run starts from: weights in files, a checkpoint, or the seed."""
Data = Corpus | Given | Chats


@dataclass(frozen=True)
class NamedModel:
    """A model by its name, and what it starts from."""

    name: str
    config: Config
    start: Start = None


@dataclass
class Job(TrainingSteps):
    """A job with its model's config, its corpus, and the checks that its kernels passed."""

    name: str
    config: Config
    corpus: Data
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
    int8: list[dict[str, Any]] = field(default_factory=list)
    """The errors of products in int8 on the batch of the first step, as `quantization.ProductError` has them."""
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


def prepare(
    settings: Settings,
    progress: Progress = lambda done, total, name: None,
    resume: Checkpoint | None = None,
    accept_changes: bool = False,
    comm: Comm = SERIAL,
    agreed: Callable[[Mapping[str, Any], Mapping[str, str]], None] = lambda facts, kernels: None,
) -> Job:
    """Turn settings into a job, ready to step. Nothing is written.

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
    settings, model = model_of(settings, resume, comm)
    config, judged = model.config, list[Result]()
    with judging((*settings.kernels, *config.files), numba_threads.set_threads(settings.threads)) as child:
        require_loadable(child)  # before they are loaded here
        load_kernels(settings.kernels)
        settings, notes = planned(settings, config)
        data = open_data(model, **settings.some(*DATA, *EXAMPLES))
        batches = data.batches("train", settings.B, settings.T, seed=settings.seed)
        settings = settings.of_epochs(len(batches))
        require_samples(settings, config, data.tokenizer, isinstance(data, Given))
        said = list[str]()

        def ready(built: Built, threads: int) -> None:
            judged[:] = admitted(built, threads, child)
            kernels = dict.fromkeys(built.own_kernels.values())
            said[:] = [*unused(settings.kernels, kernels), *gate.notes(judged)]
            if any(r.seconds for r in judged):
                forget_peak()  # which a note says; not in the gate: a run's later judgements belong to its peak
            sources = {f"the source of {k.name}": cache.digest(k.function) for k in kernels}
            agreed({"text of --data with the fingerprint": data.fingerprint}, sources)

        def started(settings: Settings) -> tuple[Engine, Read]:
            engine = Engine.from_options(
                *plan_of(settings, config, comm),
                seed=settings.seed if model.start is None else None,
                progress=progress,
                hint=partial(smaller, settings, config),
                ready=ready,
                reserved=sample_bytes(settings, config.n_params),
            )
            return engine, filled(engine, model, settings.init, settings.seed)

        engine, source = started(settings)
        errors = product_errors(engine, named(batches.at(0))) if resume is None else []
        if settings.multiplies_int8 and settings.bf16_layers is None and resume is None:
            coarse = too_coarse(errors)
            settings = replace(settings, bf16_layers=tuple(e.layer for e in coarse))
            if coarse:
                errors = [e for e in errors if e not in coarse]
                notes.append(f"computed in bf16, because int8 is too coarse on the first batch: {listed(coarse)}")
                del engine  # before memory is taken again
                engine, source = started(settings)
    engine.dropout_seed = settings.seed
    engine.notes[:0] = [*notes, *said]
    marks, code = model.start.marks if model.start else NO_MARKS, made_by(engine, settings.kernels, config.files)
    checks = [r.describe() for r in judged]
    job = Job(settings, engine, batches, model.name, config, data, checks, code, digests(engine), source, marks)
    if resume is not None:
        job.changes, job.notes = since(resume, settings, data, batches, code, accept_changes)
        load(resume, engine)
        engine.step_number, job.done = resume.state["updates"], resume.state["step"]
        job.guard.restore(resume.state["guard"])
    job.checked += [r.describe() for r in judge_first_step(job)]
    if resume is not None:
        errors = product_errors(engine, job.micro_batches(job.done + 1)[0])
    job.int8 = [asdict(e) for e in errors]
    return job


def build_only(settings: Settings, comm: Comm = SERIAL) -> Built:
    """Trace a job's program and choose its kernels, of one rank; nothing is compiled or allocated."""
    settings, model = model_of(settings, comm=comm)
    load_kernels(settings.kernels)
    settings, notes = planned(settings, model.config)
    built = build(*plan_of(settings, model.config, comm))
    return replace(built, notes=[*notes, *built.notes])


# Model ----------------------------------------------------------------------------------------------------------------


def model_of(settings: Settings, resume: Checkpoint | None = None, comm: Comm = SERIAL) -> tuple[Settings, NamedModel]:
    """Check settings and open their model; return them with the B and T of a model that has its own.

    Raises
    ------
    UserError
        For settings that no run can use, and for those that do not fit the model or the ranks.
    """
    settings.check()
    require_shares(settings.micro_batches, settings.B, settings.T, comm.size)
    model = open_model(settings.model, settings.init, resume)
    if settings.save is not None:
        check_target(Path(settings.save), model.config)
    if (most := model.config.block_size) < settings.T:
        raise UserError(
            f"-T {settings.T}: {model.name} has a context of {most} tokens; take -T {most} or less, or a model with a "
            "longer context"
        )
    settings = settings.sized(model.config)
    _ = settings.rewrites  # refused before anything is loaded
    return settings, model


def require_shares(n: int, B: int, T: int, ranks: int) -> None:
    """Refuse a number of ranks that cannot share the micro-batches of a step.

    Raises
    ------
    UserError
        With the numbers that can.
    """
    if divides(ranks, n):
        return
    can = ", ".join(str(r) for r in range(1, n + 1) if divides(r, n))
    raise UserError(
        f"{ranks} ranks cannot share the {n} micro-batches of {B}x{T} in a step: each rank needs a power of two of "
        f"them, so {can} can; or take --total-batch {ranks * B * T}, {ranks} micro-batches"
    )


def open_model(name: str | None, init: str | None, resume: Checkpoint | None = None) -> NamedModel:
    """Open a model by its name, and what it starts from: the seed, weights in files, or a checkpoint.

    Raises
    ------
    UserError
        For weights that cannot be read, and for a model of other sizes than theirs.
    """
    start: Start = open_weights(Path(init)) if resume is None and init is not None else resume
    if name is None or start is None:
        config = start.config if start else models.parse(models.DEFAULT if name is None else name)
    else:
        config = same_model(name, init, start)
    return NamedModel(resume.state["model"] if resume else models.name_of(config), config, start)


def same_model(name: str, init: str | None, start: Weights | Checkpoint) -> Config:
    """Return the config of a start; of a model of one's own that of its file, which may have changed since.

    Raises
    ------
    UserError
        For weights of other sizes than those of the name.
    """
    own, config = models.is_own(name), start.config
    if not own and not isinstance(start, Weights):
        return config
    asked = models.parse(name)
    sizes, there = ({"model": c.model} | asdict(c) for c in (asked, config))
    for size, n in there.items() if isinstance(start, Weights) else ():
        if sizes[size] != n and not (own and size == "digest"):
            raise UserError(
                f"--model {name} has {size} {sizes[size]}, and --init {init} has {n}; leave --model out, since the "
                "weights fix the sizes"
            )
    return asked if own else config


# Data -----------------------------------------------------------------------------------------------------------------


def open_data(
    model: NamedModel, data: str, tokenizer: str | None, B: int, T: int, epochs: int | None, **examples: Any
) -> Data:
    """Open the inputs that a model brings, or else the examples or the text of a name.

    Parameters
    ----------
    examples : the settings of examples, as of `load_chats`.

    Raises
    ------
    UserError
        For data that cannot be read, and for epochs of inputs that a model brings.
    """
    config, start = model.config, model.start
    if (given := config.inputs(B, T)) is not None:
        if epochs is not None:
            raise UserError(f"--epochs {epochs}: the model brings its inputs, which have no end; take --steps")
        return given
    if start is not None and (not tokenizer or isinstance(start, Checkpoint)):
        tokenizer = start.tokenizer
    if isinstance(start, Weights) and not data.endswith(TOKEN_FILE):
        tokenizer = own_tokenizer(tokenizer, start.path, config.vocab_size)
    how: dict[str, Any] = {"vocab_size": config.vocab_size, "T": T, "tokenizer": tokenizer or None}
    if is_examples(data):
        return load_chats(files_of(data), name=data, **how, **examples)
    return load_corpus(data, B=B, **how)


# Plan -----------------------------------------------------------------------------------------------------------------


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
    key = plans.key(config.to_json(), settings.B, settings.T, threads, settings.rewrites, settings.dtype)
    rules, note = plans.rules(key, settings.kernels)
    return replace(settings, plan=rules), [note, *notes]


def plan_of(settings: Settings, config: Config, comm: Comm = SERIAL) -> tuple[nn.Module, dict[str, Spec], BuildOptions]:
    """Return what `build` and `Engine.from_options` take: a job's module, its inputs, and how it becomes calls."""
    module, inputs = module_of(config, settings.B, settings.T, settings.pack, settings.lora, settings.save is not None)
    return module, inputs, settings.options(config.files, comm)


def module_of(
    config: Config, B: int, T: int, pack: bool = False, lora: str | None = None, saved: bool = False
) -> tuple[nn.Module, dict[str, Spec]]:
    """Return a model's module, with its adapters, and its inputs.

    Parameters
    ----------
    pack : whether rows hold several examples.
    saved : whether the adapters are written for PEFT.

    Raises
    ------
    UserError
        If an adapter is for a layer that the model does not have, or rows of several examples for a model that has no
        input for where they start.
    """
    module, specs = config.sized(B, T)
    if pack:
        if "starts" not in signature(module.forward).parameters:
            raise UserError(
                f"--pack: the forward of {models.name_of(config)} takes no `starts` (B, T), where each token's example "
                "starts in its row; leave --pack out"
            )
        specs = {**specs, "starts": specs["tokens"]}
    if lora is not None:
        layers = nn.add_adapters(module, nn.Lora.parse(lora), config.head)
        if saved:
            require_own(config, layers)
    return module, specs


# Engine ---------------------------------------------------------------------------------------------------------------


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


def sample_bytes(settings: Settings, parameters: int) -> int:
    """Return the bytes of the copy of the weights that samples are generated with."""
    each = TYPES[WIDE if settings.dtype == WIDE else NARROW].bytes  # of int8 too: embeddings have two
    return parameters * each if settings.sample_every else 0


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


# Start ----------------------------------------------------------------------------------------------------------------


def filled(engine: Engine, model: NamedModel, init: str | None, seed: int) -> Read:
    """Fill in the weights that no checkpoint has; return where those that steps leave alone come from."""
    config, start = model.config, model.start
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
