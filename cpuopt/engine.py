"""The engine: a training program in memory, its batches, and its step; `building` says how it comes about."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from inspect import signature
from math import fsum, inf, prod, sqrt
from numbers import Integral
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeVar, cast

import numpy as np

from . import building, kernels, nn, ops
from .building import (
    Array,
    Bound,
    BuildOptions,
    Built,
    Loaded,
    Progress,
    load,
    run_calls,
    scratch_bytes,
    two_pass,
)
from .errors import UserError
from .files import write_whole
from .generate.decoder import Sampler, generate
from .generate.uncached import ModuleConfig, Uncached
from .kernels import registry
from .kernels.registry import Choice
from .kernels.toolkit import threads
from .nn.initial import initialize
from .ops.declaration import Spec
from .ops.dequantize import numbers as dequantized
from .ops.rounding import draw_of
from .ops.storage import WIDE
from .program import arena
from .program.optimizer import Choice as OptimizerChoice
from .program.optimizer import numbers
from .program.precision import NARROW
from .program.program import DRAWS, PHASES, Phase, Scalar, Value
from .program.tree import MOST_MICRO_BATCHES
from .signals import deferred
from .weights.tensors import TensorFile, file_parts, stored_as
from .wording import nearest

F = TypeVar("F", bound=Callable[..., Any])
NEEDED = "gradients=True"


@dataclass(frozen=True)
class Step:
    """The result of a training step: the loss before the update, and the gradient's global norm before clipping.

    Attributes
    ----------
    counted : the terms that the loss is the mean of: targets that are not ignored, of all ranks, or micro-batches where
        the loss is no such mean. Without any, nothing changed, and both numbers are 0.
    """

    loss: float
    grad_norm: float
    counted: int = 1


def mean_of(losses: Iterable[float], counts: Iterable[float]) -> float:
    """Return the mean over all terms of which losses are means: each counts as often as it has terms.

    A loss of no terms is not looked at; without any term, the mean is 0.
    """
    known = [(loss, n) for loss, n in zip(losses, counts, strict=True) if n]
    most = max((n for _, n in known), default=1)  # equal counts are 1, so that the bits are those of a plain mean
    return fsum(loss * (n / most) for loss, n in known) / (fsum(n / most for _, n in known) or 1.0)


def exclusive(method: F) -> F:
    """Run an engine's method on its threads; refuse it while another runs, or after one left weights half updated."""

    @wraps(method)
    def call(self: Engine, *args: Any, **given: Any) -> Any:
        if self._busy.locked():  # two threads that both get past this take turns
            raise UserError(
                f"{method.__name__}: this engine is in a call already, of another thread or one that called this; "
                "use one engine per thread, or serialize the calls"
            )
        with self._busy:
            if self.torn:
                raise UserError(
                    f"{method.__name__}: {self.torn}() ended within its update, so the weights are partly those "
                    "before it and partly those after; build a new engine, and go on from weights that were saved"
                )
            threads.set_threads(self.threads)
            return method(self, *args, **given)

    return cast(F, call)


def require_known(maker: Callable[..., Any], names: Iterable[str], *also: str) -> None:
    """Refuse a keyword that is neither a callable's, nor an option, nor another name."""
    own = [n for n, p in signature(maker).parameters.items() if p.kind is p.KEYWORD_ONLY]
    every = {*own, *also, *(f.name for f in fields(BuildOptions))} - {"choice"}
    for name in names:
        if name not in every:
            raise UserError(f"{maker.__name__}({name}=...): no such keyword; {nearest(name, sorted(every))}")


def require_model(model: object, inputs: object) -> None:
    """Refuse what is no module, and inputs that are not shape and dtype by name."""
    if isinstance(model, type):
        raise UserError(f"Engine: the model is the class {model.__name__}; expected a module: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise UserError(f"Engine: the model is a {type(model).__name__}; expected an nn.Module")
    if not isinstance(inputs, Mapping):
        raise UserError(f"inputs {inputs!r}: expected them by name, as in {{'x': ((512, 2), 'float32')}}")
    for name, spec in inputs.items():
        if not (isinstance(spec, tuple | list) and len(spec) == 2 and isinstance(spec[0], tuple | list)):
            raise UserError(f"input {name!r} is {spec}; expected shape and dtype, as in ((512, 2), 'float32')")
        if not all(isinstance(n, int | np.integer) and n > 0 for n in spec[0]):
            raise UserError(f"input {name!r} has shape {spec[0]}; expected whole numbers of 1 or more")


def build(
    model: nn.Module,
    inputs: Mapping[str, Spec],
    *,
    variant: str | Choice = registry.DEFAULT,
    swap: Sequence[str] = (),
    fuse: str | Sequence[str] = "auto",
    gradients: bool = False,
    **more: Any,
) -> Built:
    """Trace a model, generate its backward and its update, rewrite, and choose a kernel for each call.

    Nothing is compiled or allocated. ``model``, ``inputs``, ``variant``, ``swap``, ``fuse``, ``gradients``, ``more``
    and the errors are those of `Engine`.

    Returns
    -------
    ``program``, ``kernels`` (one for each call) and ``notes``; ``plan()`` plans the memory.

    Examples
    --------
    >>> from cpuopt import build, models
    >>> config, model = models.load("llama-tiny")
    >>> built = build(model, config.specs(2, 8), swap=["silu=vanilla"])
    >>> sorted({kernel.variant for kernel in built.kernels})
    ['optimized', 'vanilla']
    """
    require_known(build, more)
    options = BuildOptions.from_words(variant, swap, fuse, two_pass=NEEDED * gradients, **more)
    return building.build(model, inputs, options)


class Engine:
    """A model ready to train, with the kernels and rewrites that the command line uses: one arena, bound kernels.

    One thread at a time may use it; a call of another is refused. A Ctrl-C while a step updates the weights takes
    effect when the update is complete.

    Parameters
    ----------
    model : its ``forward`` takes the inputs by name and returns the loss, alone or first in a tuple.
    inputs : shape and dtype of each input, by name: ``{"x": ((512, 2), "float32")}``.
    variant : the variant of every op that has it, as ``cpuopt kernels`` lists them, or a `Choice` with its rules.
    swap : rules ``OP[@LAYER]=VARIANT``, of which the last that matches wins.
    fuse : rewrites, as of ``--fuse``: ``"auto"``, ``"all"``, ``"none"``, or names. ``"auto"`` is all with
        ``optimized``, and none with other variants.
    gradients : whether all gradients are kept until the update, for ``clip``, ``accept`` and `gradients`. Without it,
        many weights are updated while their gradient is made, which is faster.
    threads : the number for all kernels; numba's own by default.
    seed : the random seed of the initial weights and of dropout. A parameter's weights depend on the seed and its name
        alone. None leaves zeros, to be filled through `parameters`.
    train : whether to generate backward and update.
    optimizer : the name of one in ``cpuopt.ops.OPTIMIZERS``; or names by patterns of parameters, of which the last that
        matches wins, as in ``{"*": "adamw", "*.bias": "sgd"}``.
    freeze : patterns of parameters that steps leave as they are, as in ``["wte.*"]``; they have no gradient and no
        states. ``nn.Parameter(..., trained=False)`` says the same in the model.
    micro_batches : how many `step` is given: one by its inputs, the others as ``more``.
    more : ``processes``, how many compile what the cache lacks, one a core by default; ``progress``, called with
        (compiled, to compile, kernel), by default a line on stderr, live on a terminal; ``reduce``, ``zero`` and
        ``comm`` of several micro-batches or ranks, as in `cpuopt.building.BuildOptions`; ``dtype="bfloat16"`` to store
        in it what products, attention and activations read, ``dtype="int8"`` for products in int8 as well, and
        ``moments`` and ``weights`` to store those in bfloat16 too; ``base="int8"`` for frozen weights of blocks, or
        ``base="w8a8"`` to multiply them as int8; ``recompute="all"``, or a number of blocks, to compute them again in
        the backward instead of keeping what is inside them.

    Raises
    ------
    UserError
        For a model that cannot be traced, a rule that matches nothing, or too little memory.

    Examples
    --------
    >>> import numpy as np
    >>> from cpuopt import Engine, functional as F, nn
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         self.fc, self.out, self.loss = nn.Linear(2, 8), nn.Linear(8, 2), nn.CrossEntropyLoss()
    ...     def forward(self, x, y):
    ...         return self.loss(self.out(F.gelu(self.fc(x))), y)
    >>> engine = Engine(Net(), {"x": ((4, 2), "float32"), "y": ((4,), "int32")}, threads=1)
    >>> y = np.array([0, 1, 0, 1])
    >>> x = np.stack([y, 1 - y], axis=1)
    >>> first, *_, last = [engine.step(x=x, y=y, lr=0.05).loss for _ in range(20)]
    >>> bool(last < 0.5 * first)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Spec],
        *,
        variant: str | Choice = registry.DEFAULT,
        swap: Sequence[str] = (),
        fuse: str | Sequence[str] = "auto",
        gradients: bool = False,
        threads: int | None = None,
        seed: int | None = 0,
        train: bool = True,
        micro_batches: int = 1,
        optimizer: OptimizerChoice = ops.USUAL,
        freeze: Sequence[str] = (),
        **more: Any,
    ) -> None:
        require_known(Engine, more, "progress")
        require_model(model, inputs)
        progress = more.pop("progress", None)
        more |= {"threads": threads, "train": train, "micro_batches": micro_batches}
        more |= {"optimizer": optimizer, "freeze": freeze, "two_pass": NEEDED * gradients}
        options = BuildOptions.from_words(variant, swap, fuse, **more)
        self._begin(model, inputs, options, seed=seed, progress=progress)

    @classmethod
    def from_options(
        cls, model: nn.Module, inputs: Mapping[str, Spec], options: BuildOptions | None = None, **given: Any
    ) -> Engine:
        """Make an engine of explicit choices, without the defaults of `Engine`, as checks and runs need it.

        Parameters
        ----------
        options : how the model becomes calls; by default with vanilla kernels and without rewrites.
        given : ``seed`` and ``progress``, as of `Engine`; ``hint``, a function that returns advice when the memory does
            not suffice; ``ready``, called with the program and the threads when the kernels are compiled and the
            weights drawn, before other memory is touched; ``reserved``, the bytes that the process will need besides
            the arena; and fields of the options, in place of theirs.
        """
        engine = cls.__new__(cls)
        engine._begin(model, inputs, options or BuildOptions(), **given)
        return engine

    def _begin(
        self,
        model: nn.Module,
        inputs: Mapping[str, Spec],
        options: BuildOptions,
        *,
        seed: int | None = 0,
        progress: Progress | None = None,
        hint: Callable[[int], str] = lambda needed: "try a smaller batch",
        ready: Callable[[Built, int], None] = lambda built, threads: None,
        reserved: int = 0,
        **changes: Any,
    ) -> None:
        """Build the program, load it into memory, and draw its weights."""
        if not (seed is None or (isinstance(seed, Integral) and seed >= 0)):
            raise UserError(f"seed {seed!r}: expected a whole number of 0 or more, or None for weights of zeros")
        options = replace(options, **changes)
        least = sum(prod(p.shape) * options.least_bytes(p) for p in model.parameters())
        arena.check_fits(least, hint)  # before the work
        built = building.build(model, inputs, options)
        self.model, self.options, self.program, self.notes = model, options, built.program, built.notes
        self.comm, self.micro_batches, self.inputs = options.comm, options.micro_batches, dict(inputs)
        self.progress, self._reader = progress, cast(Uncached | None, None)
        self._stale, self._exposed = True, list[weakref.ref[Array]]()
        self._behind = False  # whether other ranks alone have the float32 of the weights that they updated
        self._busy = Lock()
        self.torn = ""
        """The method that ended within an update, which left the weights partly updated; else empty."""
        self.kernels = list(built.own_kernels.values())
        """The kernels of the program's calls, without what the communicator runs."""

        def draw(loaded: Loaded, ended: Event) -> None:
            if seed is not None:
                weights = {p.name: loaded.weight(p) for p in self.program.parameters}
                initialize(model, weights, seed, loaded.threads, ended)

        def begin(loaded: Loaded) -> None:
            ready(built, loaded.threads)
            weights = [*self.program.parameters, *self.program.scales.values()]
            drawn = sum(p.nbytes for p in weights) if seed is not None else 0
            self.base_bytes = arena.resident_bytes() - drawn

        (self._loaded,) = load([built], hint=hint, progress=progress, draw=draw, ready=begin, reserved=reserved)
        self.plan, self.threads, self.calls = self._loaded.plan, self._loaded.threads, self._loaded.calls
        self.step_number, self.dropout_seed = 0, seed or 0
        self.runner: Callable[[Iterable[Bound]], None] = run_calls
        self.phases = {phase: self._loaded.of(phase) for phase in PHASES}
        self.backwards = self._loaded.backwards()
        self._by_name = {v.name: v for v in self.program.values}
        self._targets = self.program.counted
        self._norms = [self.array(v) for v in self.program.norm_terms]
        adjoints = set(self.program.adjoint.values())
        self._wanted = [v for v in self.program.inputs if v not in adjoints]
        if self.program.adjoint:
            self.array(self.program.adjoint[self.program.outputs[0]]).fill(1)
        for parameter, states in self.program.states.items():
            for state in self.program.optimizers[parameter].states:
                if state.start:  # fresh memory is zero, and is not allocated before it is written
                    self.array(states[state.name]).fill(state.start)

    @property
    def divided(self) -> bool:
        """Whether ranks keep different states of optimizers."""
        return self.comm.size > 1 and self.options.zero == 1

    @property
    def predicted_peak_bytes(self) -> int:
        """The predicted peak memory of the process: its use before the arena, and the arena."""
        return self.base_bytes + self.plan.total_bytes + self.plan.window_bytes

    def array(self, value: Value | str) -> Array:
        """Return the array of a value, or of the name of one. A pooled value holds its numbers only while it lives.

        With ``dtype="bfloat16"``, products read copies of the weights. These follow what is written to a weight before
        the next forward, and later as long as anything refers to its array, such as a slice of it. With
        ``weights="bfloat16"`` there are no copies, and what is written is rounded to nearest. A weight in int8 is a
        `Quantized`: what is assigned to it as a whole is quantized.
        """
        if isinstance(value, str):
            if value not in self._by_name:
                raise UserError(f"no value {value!r} in the program; {nearest(value, self._by_name)}")
            value = self._by_name[value]
        if value not in self.plan.offsets:
            raise UserError(f"{value} is not a value of this engine's program")
        found = self._loaded.weight(value)
        if value.group == "parameter" and self._behind:
            raise UserError(
                f"{value}: other ranks have the newest weights in float32; call collect() on all ranks first"
            )
        if value.group == "parameter" and self.phases["convert"]:
            self._exposed.append(weakref.ref(found))
            self._stale = True
        return found

    def parameters(self) -> dict[str, Array]:
        """Return every parameter by name: views, so writing to them changes the model, as `array` says."""
        return {p.name: self.array(p) for p in self.program.parameters}

    def weights_read(self) -> dict[str, Array]:
        """Return what a step reads of every parameter that ranks have in common, to compare them: copies, or itself."""
        return {p.name: self._loaded.array(self.program.copied.get(p, p)) for p in self.program.parameters}

    @exclusive
    def collect(self) -> None:
        """Bring the float32 of all weights up to date on this rank; every rank calls it.

        Steps of several ranks with ``dtype="bfloat16"`` send copies, so it comes before `parameters`. Arrays that are
        referenced through a step stay up to date. In any other engine it does nothing.
        """
        self._collect()

    def _collect(self) -> None:
        if self._behind:
            with self.completing("collect"):
                self._run("collect")

    def states(self) -> dict[str, dict[str, Array]]:
        """Return the optimizers' states, such as ``lion_m``, for each parameter by its name: views."""
        optimizers = self.program.optimizers
        found: dict[str, dict[str, Array]] = {f"{o.files}_{s.name}": {} for o in optimizers.values() for s in o.states}
        for parameter, states in self.program.states.items():
            for name, value in states.items():
                found[f"{optimizers[parameter].files}_{name}"][parameter.name] = self.array(value)
        return found

    def gradients(self) -> dict[str, Array]:
        """Return the gradient of every parameter that has one, by the parameter's name; valid after ``backward``.

        Raises
        ------
        UserError
            If the engine was built without ``gradients=True``, and some are not kept.
        """
        if not self.two_pass:
            raise UserError(
                "gradients: some weights are updated while their gradient is made, which is not kept; build the engine "
                "with gradients=True"
            )
        found = {p: self.program.adjoint[p] for p in self.program.parameters if p in self.program.adjoint}
        return {p.name: self.array(adjoint).reshape(p.shape) for p, adjoint in found.items()}

    @exclusive
    def load(self, **batch: Array) -> None:
        """Copy a batch into the inputs, after checking every index: kernels do not check bounds.

        Raises
        ------
        UserError
            For a missing or unknown input, a wrong shape, or an index out of range.
        """
        self._load(self._checked(batch))

    def _load(self, checked: Mapping[Value, Array]) -> None:
        for v, given in checked.items():
            np.copyto(self.array(v), given, casting="same_kind")

    def _checked(self, batch: Mapping[str, Array]) -> dict[Value, Array]:
        """Return a batch by its inputs, each checked."""
        wanted, found = self._wanted, dict[Value, Array]()
        if batch.keys() != {v.name for v in wanted}:
            raise UserError(f"inputs are ({', '.join(batch)}); expected ({', '.join(v.name for v in wanted)})")
        for v in wanted:
            given = found[v] = np.asarray(batch[v.name])
            if given.shape != v.shape:
                raise UserError(f"input '{v.name}' has shape {given.shape}; expected {v.shape}")
            if not np.can_cast(given.dtype, v.dtype, "same_kind"):
                raise UserError(f"input '{v.name}' has type {given.dtype}; expected {v.dtype}")
            if v.below is not None:
                bad = ((given < 0) | (given >= v.below)) & (given != v.allowed if v.allowed is not None else True)
                if bad.any():
                    at = tuple(int(i) for i in np.argwhere(bad)[0])
                    raise UserError(f"input '{v.name}' holds {given[at]} at {at}; expected ids from 0 to {v.below - 1}")
            if v.rising and ((given > np.arange(v.shape[-1])) | (np.diff(given, axis=-1, prepend=0) < 0)).any():
                raise UserError(
                    f"input '{v.name}' has a row in which a place is beyond its own or less than the one before it; "
                    "expected, for each token, the place in its row at which its example starts"
                )
        return found

    @exclusive
    def run(self, *phases: Phase) -> None:
        """Run the calls of some phases, on this engine's threads."""
        with ExitStack() as updating:
            if {*phases} & {"update", *([] if self.two_pass else ["backward"])}:
                updating.enter_context(self.completing("run"))
            self._run(*phases)
        if "update" in phases:
            self._collect()

    def _run(self, *phases: Phase) -> None:
        for phase in phases:
            if phase == "forward":
                self._convert()
            self.runner(self.phases[phase])
            if phase in ("update", "collect"):
                self._behind = phase == "update" and bool(self.program.copied)

    def _convert(self) -> None:
        """Write the copies of weights in a narrower type, if a weight may have changed other than by an update."""
        if self.phases["convert"] and (self._stale or self._held()):
            if self._behind:
                raise UserError("a weight was taken within a step; call collect() on all ranks, and take it again")
            self.runner(self.phases["convert"])
            self._stale = False

    def weights_put_back(self) -> None:
        """Have the next forward write the copies of weights again, after they were written behind the engine's back."""
        self._stale = True

    def _held(self) -> bool:
        """Return whether an array of a weight is referenced, so that it may be read or written at any time."""
        self._exposed = [x for x in self._exposed if x() is not None]
        return bool(self._exposed)

    def counted(self, batch: Mapping[str, Array]) -> int:
        """Return how many terms the loss of a batch is the mean of: targets that are not ignored; else 1.

        Raises
        ------
        UserError
            For a wrong batch, as in `load`.
        """
        return self._counted(self._checked(batch))

    def _counted(self, checked: Mapping[Value, Array]) -> int:
        if self._targets is None:
            return 1
        targets, ignored = self._targets
        return int(np.count_nonzero(checked[targets] != ignored))

    @contextmanager
    def completing(self, what: str) -> Iterator[None]:
        """Run a block that changes weights or states to its end: signals wait. After an error, later calls are refused.

        Parameters
        ----------
        what : the method's name, for the message. Within another such block it changes nothing.
        """
        if self.torn:
            yield
            return
        with deferred():
            self.torn = what
            yield
            self.torn = ""

    @exclusive
    def forward(self, **batch: Array) -> float:
        """Run the forward on a batch and return the loss; NaN if all targets are ignored, as in PyTorch."""
        self._load(self._checked(batch))
        self._run("forward", "evaluate")
        return self.loss

    @property
    def loss(self) -> float:
        """The loss of the last forward."""
        return float(self.array(self.program.outputs[0]).item())

    @exclusive
    def step(
        self,
        *,
        lr: float = 1e-4,
        vector_decay: float | None = None,
        clip: float | None = None,
        more: Sequence[Mapping[str, Array]] = (),
        accept: Callable[[Step], bool] | None = None,
        **given: Any,
    ) -> Step:
        """Train on one batch: forward, backward, update.

        The loss of a step is the mean over all targets that count, of all micro-batches and ranks. Without any, nothing
        changes.

        Parameters
        ----------
        vector_decay : the weight decay of parameters of one axis, biases and normalizations; None: that of the others.
        clip : the largest global norm of the gradients, which are scaled down to it; None: no limit.
        more : further micro-batches of this rank.
        accept : called before the update; if it returns False, nothing changes and `step_number` stays.
        given : the model's inputs, by name; numbers of the optimizer, such as ``beta1``, in place of their defaults.
            If there are several optimizers, ``sgd={"lr": 0.1}`` is for one of them.

        Raises
        ------
        UserError
            For a number that no optimizer has, a wrong input, or an engine that was built for other steps.
        """
        batches = self._batches(given, more, lr=lr, vector_decay=vector_decay, clip=clip, accept=accept)
        (counts,) = self._combined(self._of_this_rank(map(self._counted, batches)))
        with ExitStack() as updating:
            losses, square = self._gradients(batches, counts, updating)
            held = np.zeros(self.comm.size)
            held[self.comm.rank] = self._held()
            losses, held = self._combined(losses, held)
            done = Step(mean_of(losses, counts), sqrt(square), int(counts.sum()))
            if not done.counted or (accept and not accept(done)):
                return done
            if accept:
                threads.set_threads(self.threads)  # which it may have changed, as by running another engine
            updating.enter_context(self.completing("step"))
            self.step_number += 1
            for optimizer in self.optimizers:
                scale = min(1.0, clip / (sqrt(square) + 1e-6)) if clip else 1.0
                self._loaded.set(Scalar("grad_scale", optimizer.name), scale)
            self._run("update")
            if held.any():
                self._run("collect")
        return done

    def _batches(
        self,
        given: Mapping[str, Any],
        more: Sequence[Mapping[str, Array]],
        *,
        clip: float | None,
        accept: Callable[[Step], bool] | None,
        **rates: Any,
    ) -> list[dict[Value, Array]]:
        """Check what a step is given, and set its numbers; return its micro-batches by their inputs."""
        if not self.program.adjoint:
            raise UserError(
                "this engine was built with train=False and has no backward; build it without that to train"
            )
        if clip is not None and not 0 < clip < inf:
            raise UserError(f"clip {clip}: expected a positive number, or None")
        if (clip or accept) and not self.two_pass:
            raise UserError(
                f"{'clip' if clip else 'accept'}: some weights are updated in the backward, before the norm is known; "
                "fuse without 'update', as an Engine with gradients=True does"
            )
        if 1 + len(more) != self.micro_batches:
            raise UserError(
                f"more: a step has {1 + len(more)} micro-batches, and this engine was built for {self.micro_batches}; "
                "build it with micro_batches="
            )
        names = {n for o in self.optimizers for n in (o.name, *o.defaults)}
        for n in (n for n in given if n not in names and n not in self._by_name):
            if any(n in (o.name, *o.defaults) for o in ops.OPTIMIZERS.values()):
                raise UserError(f"{n}: {' and '.join(o.name for o in self.optimizers)} has no such number")
        exact = numbers(self.optimizers, given, **rates)
        exact |= {Scalar("step", o.name): self.step_number + 1 for o in self.optimizers}
        if self.options.at_random:
            draw = draw_of(self.dropout_seed, self.step_number + 1)
            exact |= {Scalar("draw", o.name): draw for o in self.optimizers}
        for scalar, number in exact.items():
            self._loaded.set(scalar, number)
        first = {n: x for n, x in given.items() if n not in names}
        return [self._checked(micro) for micro in (first, *more)]

    def _gradients(
        self, batches: Sequence[Mapping[Value, Array]], counts: Array, updating: ExitStack
    ) -> tuple[Array, float]:
        """Run the schedule up to the norm; return this rank's losses, at its place, and the square of the norm.

        Parameters
        ----------
        counts : how many targets count in each micro-batch of the step. Without any, nothing runs.
        updating : is entered before the first update, where those are in the backward.
        """
        if not counts.any():
            return np.zeros_like(counts), 0.0
        losses, first = [], self.comm.rank * self.micro_batches
        try:
            for number, (batch, backward) in enumerate(zip(batches, self.backwards, strict=True), first):
                share = counts[number] / counts.sum()
                self._load(batch)
                self.array(self.program.adjoint[self.program.outputs[0]]).fill(share)
                self._draw(1 + self.step_number * MOST_MICRO_BATCHES + number)
                self._run("forward")
                if not self.two_pass:
                    updating.enter_context(self.completing("step"))
                self.runner(backward)
                losses.append(self.loss if share else 0.0)
        finally:
            self._draw(0)
        self._run("norm")
        return self._of_this_rank(losses), sum(x for terms in self._norms for x in terms.tolist())

    def _of_this_rank(self, numbers: Iterable[float]) -> Array:
        """Return an array over all micro-batches of a step, with a number for each of this rank and 0 for others."""
        found, first = np.zeros(self.micro_batches * self.comm.size), self.comm.rank * self.micro_batches
        found[first : first + self.micro_batches] = list(numbers)
        return found

    def _combined(self, *mine: Array) -> list[Array]:
        """Sum arrays over the ranks, of which one at most has a number other than 0 at a place."""
        if self.comm.size == 1:
            return [*mine]
        total = np.empty(sum(x.size for x in mine))
        self.comm.combine(total, np.concatenate(mine))
        return np.split(total, np.cumsum([x.size for x in mine])[:-1])

    @cached_property
    def two_pass(self) -> bool:
        """Return whether all gradients are known before the first weight is updated."""
        return two_pass(self.program)

    def rebound(self, bound: Bound, *kernels: registry.Kernel) -> list[Bound]:
        """Bind a call to other kernels, on the same arrays and with other scratch, which they share."""
        memory = arena.Arena(max(scratch_bytes(bound.call, k) for k in kernels))
        return self._loaded.rebound(bound, kernels, memory)

    def rescratched(self) -> dict[int, Bound]:
        """Bind every call again with scratch of its own size now, which all calls share; by the id of the call's."""
        bounds = {id(b): b for b in (*self.calls, *(b for backward in self.backwards for b in backward))}
        memory = arena.Arena(max(scratch_bytes(b.call, b.kernel) for b in bounds.values()))
        return {at: self._loaded.rebound(b, [b.kernel], memory)[0] for at, b in bounds.items()}

    @cached_property
    def optimizers(self) -> list[ops.Optimizer]:
        """The optimizers of its parameters in a step, each once."""
        optimizers = self.program.optimizers
        return list(dict.fromkeys(optimizers[p] for p in self.program.parameters if p in optimizers))

    @exclusive
    def save_weights(self, path: str | Path, overwrite: bool = False) -> None:
        """Write all parameters to a safetensors file, whole or not at all.

        Parameters
        ----------
        overwrite : whether a file that is there may be replaced.

        Raises
        ------
        UserError
            If it cannot be written, or is there already, or a parameter is neither float32 nor bfloat16.
        """
        arrays = self.parameters()
        if other := [name for name, x in arrays.items() if x.dtype.name not in (WIDE, NARROW)]:
            raise UserError(f"save_weights: {other[0]!r} is {arrays[other[0]].dtype}; expected {WIDE} or {NARROW}")
        if Path(path).suffix != ".safetensors":
            raise UserError(f"save_weights {str(path)!r}: expected a name that ends in .safetensors")
        if not overwrite and os.path.lexists(path):
            raise UserError(f"save_weights {str(path)!r}: it is there already; overwrite=True replaces it")
        shapes = {name: x.shape for name, x in arrays.items()}
        write_whole(Path(path), file_parts(shapes, arrays.__getitem__, stored_as(arrays)))

    @exclusive
    def load_weights(self, path: str | Path) -> None:
        """Fill all parameters from a safetensors file with the same names and shapes.

        Raises
        ------
        UserError
            If the file cannot be read, or holds other names or shapes; nothing is filled then.
        """
        file, arrays = TensorFile(Path(path)), self.parameters()
        if odd := arrays.keys() ^ file.tensors.keys():
            name = min(odd)
            raise UserError(
                f"load_weights {str(path)!r}: {name!r} is {'missing' if name in arrays else 'no parameter'}"
            )
        for name, x in arrays.items():
            if (there := file.tensors[name].shape) != x.shape:
                raise UserError(f"load_weights {str(path)!r}: {name!r} has the shape {there}; expected {x.shape}")
        read = {name: file.read(name) for name in arrays}
        with self.completing("load_weights"):
            for name, x in arrays.items():
                x[...] = read[name]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stops: Container[int] = (),
    ) -> Iterator[int]:
        """Yield the ids that follow a prompt, one after the other, from this engine's weights as they are now.

        The model must compute logits of the next token from one input of ids: it returns ``(loss, logits)``, or a loss
        by ``nn.CrossEntropyLoss``. There is no cache: for each token the whole row is computed, which is as long as the
        engine's rows. The text ends if the row is full.

        Parameters
        ----------
        prompt : ids, at least one.
        max_tokens : the most ids that are generated.
        temperature, top_k, top_p, seed : as the flags of ``cpuopt generate``.
        stops : ids that end the text.

        Raises
        ------
        UserError
            For a model that computes no such logits or is not causal, and for a prompt that is too long or holds an id
            that the model does not take.
        """
        sampler = Sampler(temperature, top_k, top_p, seed)
        if self._reader is None:
            how: dict[str, Any] = {"threads": self.threads, "dtype": self.options.dtype}
            choice = self.options.choice
            how |= {"variant": choice.variant, "swaps": [*map(str, choice.swaps)]}
            self._reader = Uncached(ModuleConfig(self.model, self.inputs), **how)
        for name, x in self.parameters().items():
            self._reader.parameters()[name][...] = dequantized(x)
        self._reader.restart()
        return generate(self._reader, prompt, sampler, max_tokens, stops)

    def profile(
        self,
        *,
        steps: int | None = None,
        warmup: int = 1,
        roofs: bool = True,
        lines: bool | str = False,
        **given: Any,
    ) -> Any:
        """Measure the time of each op and layer of a training step, after checking every kernel.

        The steps train; parameters and optimizer are then as they were before.

        Parameters
        ----------
        steps, warmup : the steps that are measured, and those before them, which are not. By default as many as take a
            second, 5 to 20.
        roofs : whether to show how far each op is from what the machine allows; the machine is measured once for that.
        lines : whether to sample the lines of source, of all ops or of an op or a family by name; steps then take 5 s.
        given : what `step` takes: inputs, by default those of the last step, and numbers such as ``lr``.

        Raises
        ------
        UserError
            For a kernel that is wrong, or an engine without a backward.
        """
        import cpuopt  # which opens `library.instruments`, of a layer above

        return cpuopt.profile(self, given, steps=steps, warmup=warmup, roofs=roofs, lines=lines)

    def ab(
        self,
        op: str,
        a: str,
        b: str,
        *,
        layer: str = "*",
        in_step: bool = False,
        flush: bool = False,
        rounds: int = 96,
        seed: int = 0,
        **given: Any,
    ) -> Any:
        """Compare two kernels of an op, alone on the shapes of this model or in its training steps.

        Both are checked before, during and after. They run in this process, so a kernel that crashes ends it;
        ``cpuopt ab`` uses a process of its own. This engine stays as it is.

        Parameters
        ----------
        op, a, b : the op, as ``cpuopt kernels`` lists it, the baseline variant, and the one that the verdict is about.
        layer : a glob of the layers to compare on.
        in_step : whether to compare in training steps, of an engine of its own with these weights.
        flush : whether other data fill the caches before each call; not with `in_step`.
        rounds : the largest number of rounds, 6 at least.
        seed : the random seed of the arrays and of the order.
        given : with `in_step`, what `step` takes: inputs, by default those of the last step, and numbers such as
            ``lr``.

        Raises
        ------
        UserError
            For an op or variant that does not exist, an op that the model does not call, or a kernel that is wrong.
        """
        how = {"layer": layer, "in_step": in_step, "flush": flush, "rounds": rounds, "seed": seed}
        import cpuopt

        return cpuopt.ab(self, op, a, b, given, **how)

    def _draw(self, counter: int) -> None:
        """Set what the random numbers of the next calls depend on; 0 turns dropout off."""
        for scalar, number in zip(DRAWS, (self.dropout_seed % 2**63, counter), strict=True):
            self._loaded.set(scalar, number)


load_kernels = kernels.load_all
