"""The engine: a training program in memory, its batches, and its step; `building` says how it comes about."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from math import fsum, inf, prod, sqrt
from numbers import Integral
from threading import Event, Lock
from typing import Any, TypeVar, cast

import numpy as np

from . import kernels, nn, ops
from .building import (
    Array,
    Bound,
    BuildOptions,
    Built,
    Loaded,
    Progress,
    build,
    load,
    run_calls,
    scratch_bytes,
    two_pass,
)
from .errors import UserError
from .kernels import registry
from .kernels.toolkit import threads
from .nn.initial import initialize
from .ops.declaration import Spec
from .ops.rounding import draw_of
from .program import arena
from .program.optimizer import numbers
from .program.program import DRAWS, PHASES, Phase, Scalar, Value
from .program.tree import MOST_MICRO_BATCHES
from .signals import deferred
from .wording import nearest

F = TypeVar("F", bound=Callable[..., Any])


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


class Engine:
    """A model ready to train: one arena, bound kernels.

    Only one thread at a time may use it. A Ctrl-C in the update of a step takes effect when the update is complete.

    Parameters
    ----------
    model : its ``forward`` takes the inputs by name and returns the loss, alone or first in a tuple.
    inputs : shape and dtype of each input.
    options : how the model becomes calls.
    seed : the random seed of the initial weights and of dropout. A parameter's weights depend on the seed and its name
        alone. None leaves zeros, to be filled through `parameters`.
    progress : called with (compiled, to compile, kernel); by default a line on stderr.
    hint : function that returns advice when the memory does not suffice.
    ready : called with the program and the threads when the kernels are compiled and the weights drawn, before other
        memory is touched.
    reserved : the bytes that the process will need besides the arena.
    changes : fields of the options, in place of theirs.

    Raises
    ------
    UserError
        For a model that cannot be traced, a rule that matches nothing, or too little memory.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Spec],
        options: BuildOptions | None = None,
        *,
        seed: int | None = 0,
        progress: Progress | None = None,
        hint: Callable[[int], str] = lambda needed: "try a smaller batch",
        ready: Callable[[Built, int], None] = lambda built, threads: None,
        reserved: int = 0,
        **changes: Any,
    ) -> None:
        if not (seed is None or (isinstance(seed, Integral) and seed >= 0)):
            raise UserError(f"seed {seed!r}: expected a whole number of 0 or more, or None for weights of zeros")
        how = replace(options or BuildOptions(), **changes)
        arena.check_fits(sum(prod(p.shape) * how.least_bytes(p) for p in model.parameters()), hint)  # before the work
        built = build(model, inputs, how)
        self.model, self.options, self.program, self.notes = model, built.options, built.program, built.notes
        self.comm, self.micro_batches = self.options.comm, self.options.micro_batches
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
            with self._whole("collect"):
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
        """Return the gradient of every parameter that has one, by the parameter's name; valid after ``backward``."""
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
                updating.enter_context(self._whole("run"))
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
    def _whole(self, what: str) -> Iterator[None]:
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
            updating.enter_context(self._whole("step"))
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
                    updating.enter_context(self._whole("step"))
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

    def _draw(self, counter: int) -> None:
        """Set what the random numbers of the next calls depend on; 0 turns dropout off."""
        for scalar, number in zip(DRAWS, (self.dropout_seed % 2**63, counter), strict=True):
            self._loaded.set(scalar, number)


load_kernels = kernels.load_all
