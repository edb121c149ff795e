"""The engine, from a model to a step: trace, reverse, plan, resolve, bind; then one loop over bound calls."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from math import fsum, inf, prod, sqrt
from numbers import Integral
from typing import Any, Literal, TypeVar, cast

import numpy as np
from threadpoolctl import threadpool_limits

from . import kernels, nn, ops
from .comm import Comm, Serial
from .errors import UserError, blamed
from .kernels import registry
from .kernels.compile import jit
from .kernels.toolkit import threads
from .ops.declaration import ITEMSIZE, Spec
from .program import arena
from .program.distribute import distribute
from .program.fuse import BEFORE
from .program.fuse import fuse as apply_fusions
from .program.local import add_outer
from .program.optimizer import Choice as OptimizerChoice
from .program.optimizer import add_update
from .program.optimizer import freeze as freeze_parameters
from .program.program import DRAWS, PHASES, Call, Phase, Program, Scalar, Value
from .program.reverse import reverse
from .program.tables import cut_tables
from .signals import deferred
from .wording import nearest

F = TypeVar("F", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]
Reduce = Literal["exact", "fast"]
"""How gradients are added over micro-batches and ranks."""
SERIAL = Serial()
NONE: Mapping[Value, Value] = {}
MOST_MICRO_BATCHES = 1 << 20
"""More than a step ever has: each micro-batch of each step has random numbers of its own."""


@dataclass
class Bound:
    """A call with its kernel and the arguments of the kernel."""

    call: Call
    kernel: registry.Kernel
    args: list[Any]


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


def run_calls(calls: Iterable[Bound]) -> None:
    """Run bound calls in order. A profiler replaces this loop with its own."""
    for bound in calls:
        try:
            bound.kernel.function(*bound.args)
        except BaseException as e:
            raise blamed(e, bound.kernel.name, bound.call.layer) from e


@dataclass
class Built:
    """A program with the kernel of each call, and notes for the user on how they were chosen."""

    program: Program
    kernels: list[registry.Kernel]
    notes: list[str]
    adding: bool = False
    """Whether the kernels add up the gradients of several micro-batches, which then keep their place in memory."""
    rank: int = 0

    def plan(self) -> arena.Plan:
        """Plan the memory."""
        work = [k.work(c.sizes) for c, k in zip(self.program.calls, self.kernels, strict=True)]
        summed = [self.program.adjoint[p] for p in self.program.parameters if p in self.program.adjoint]
        return arena.plan(self.program, work, summed if self.adding else (), self.rank)

    @property
    def own_kernels(self) -> dict[Call, registry.Kernel]:
        """The kernel of each call that computes; a communicator runs the others."""
        pairs = zip(self.program.calls, self.kernels, strict=True)
        return {c: k for c, k in pairs if not isinstance(c.op, ops.Collective)}


def build(
    model: nn.Module,
    inputs: Mapping[str, Spec],
    *,
    choice: registry.Choice | None = None,
    fuse: Sequence[str] = (),
    train: bool = True,
    micro_batches: int = 1,
    reduce: Reduce = "exact",
    zero: int = 1,
    comm: Comm = SERIAL,
    alone: bool = False,
    optimizer: OptimizerChoice = ops.USUAL,
    freeze: Sequence[str] = (),
) -> Built:
    """Trace a model, generate its backward and its update, rewrite, and choose a kernel for each call.

    Raises
    ------
    UserError
        For a model that cannot be traced, a rule that matches nothing, or several micro-batches with the rewrite
        ``update``.
    """
    choice = choice or registry.Choice()
    program, notes = nn.trace_model(model, inputs), list[str]()
    cut_tables(program)
    before = list(program.calls)
    freeze_parameters(program, freeze)
    if train:
        notes = apply_fusions(program, [name for name in fuse if name in BEFORE], choice)
        reverse(program)
        add_update(program, optimizer)
        before += program.calls
        notes += apply_fusions(program, [name for name in fuse if name not in BEFORE], choice)
    choice.check_used((c.op.name, c.layer) for c in dict.fromkeys([*before, *program.calls]))
    several = train and (micro_batches * comm.size > 1 or alone)
    if several and not two_pass(program):
        raise UserError(
            "micro_batches: some weights are updated in the backward, before all is summed; fuse without 'update'"
        )
    if several and any(program.adjoint[p].group != "gradient" for p in program.parameters if p in program.adjoint):
        raise UserError("micro_batches: a parameter shares its gradient with a residual; fuse without 'residual'")
    if several and (reduce == "exact" or comm.size > 1 or alone):
        together = SERIAL if alone else comm
        buckets = distribute(program, together, local=micro_batches, exact=reduce == "exact", zero=zero)
        if alone:
            add_outer(program, comm, buckets)
    run_by = collectives(comm)
    chosen = [run_by.get(c.op.name) or choice.resolve(c.op.name, c.layer).of(c.types) for c in program.calls]
    for call, kernel in zip(program.calls, chosen, strict=True):
        for name in kernel.whole(call.absent):  # an array that nobody reads
            of = call.op.by_name[name]
            call.args[name] = program.value(f"unused {name}", tuple(d(call.sizes) for d in of.shape), dtype=of.dtype)
            call.adds[name] = False
    return Built(program, chosen, notes, several and reduce == "fast" and micro_batches > 1, comm.rank)


def collectives(comm: Comm) -> dict[str, registry.Kernel]:
    """Return what runs each collective in place of a kernel, by the op's name."""
    return {op.name: registry.Kernel(op, comm.name, getattr(comm, op.name)) for op in ops.COLLECTIVES}


def two_pass(program: Program) -> bool:
    """Return whether all gradients are known before the first weight is updated."""
    return not any(c.phase == "backward" and any(a.role == "state" for a in c.op.args) for c in program.calls)


def exclusive(method: F) -> F:
    """Refuse a call of an engine's method while another one runs, or after one that left the weights half updated."""

    @wraps(method)
    def call(self: Engine, *args: Any, **given: Any) -> Any:
        if self._busy.locked():  # two threads that both get past this take turns
            raise UserError(
                f"{method.__name__}: this engine is in a call already, of another thread or one that called this; "
                "give each thread an engine of its own, or let them take turns"
            )
        with self._busy:
            if self.torn:
                raise UserError(
                    f"{method.__name__}: {self.torn}() ended within its update, so the weights are partly those "
                    "before it and partly those after; build a new engine, and go on from weights that were saved"
                )
            return method(self, *args, **given)

    return cast(F, call)


class Engine:
    """A model ready to train: one arena, bound kernels.

    Only one thread at a time may use it. A Ctrl-C in the update of a step takes effect when the update is complete.

    Parameters
    ----------
    model : its ``forward`` takes the inputs by name and returns the loss, alone or first in a tuple.
    inputs : shape and dtype of each input.
    choice : the variant of each op; vanilla by default.
    threads : the number for all kernels; numba's own by default.
    seed : the random seed of the initial weights and of dropout. A parameter's weights depend on the seed and its name
        alone. None leaves zeros, to be filled through `parameters`.
    fuse : rewrites to apply, out of ``cpuopt.program.fuse.FUSIONS``.
    train : whether to generate backward and update.
    micro_batches : how many `step` is given on this rank.
    reduce : "exact" to add the gradients of micro-batches and ranks in a fixed tree, so that the bits do not depend on
        the ranks; "fast" to add those of a rank in the kernels, in less memory, and of ranks in the library's order.
    zero : 1 if a rank keeps the optimizer's states of its slice alone, 0 if of all parameters.
    comm : the ranks; this process alone by default.
    alone : whether each rank trains for itself until all call `outer_step` (DiLoCo).
    optimizer : the name of one in ``cpuopt.ops.OPTIMIZERS``; or names by patterns of parameters, of which the last that
        matches wins, as in ``{"*": "adamw", "*.bias": "sgd"}``.
    freeze : patterns of parameters that steps leave as they are; they have no gradient and no states.
    processes : how many processes compile what the cache lacks; one a core by default.
    progress : called with (compiled, to compile, kernel); by default a line on stderr.
    hint : function that returns advice when the memory does not suffice.
    ready : called with the program and the threads when the kernels are compiled and the weights drawn, before other
        memory is touched.

    Raises
    ------
    UserError
        For a model that cannot be traced, a rule that matches nothing, or too little memory.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Spec],
        *,
        choice: registry.Choice | None = None,
        threads: int | None = None,
        seed: int | None = 0,
        fuse: Sequence[str] = (),
        train: bool = True,
        micro_batches: int = 1,
        reduce: Reduce = "exact",
        zero: int = 1,
        comm: Comm = SERIAL,
        alone: bool = False,
        optimizer: OptimizerChoice = ops.USUAL,
        freeze: Sequence[str] = (),
        processes: int | None = None,
        kernel_files: Sequence[str] = (),
        progress: Callable[[int, int, str], None] | None = None,
        hint: Callable[[int], str] = lambda needed: "try a smaller batch",
        ready: Callable[[Built, int], None] = lambda built, threads: None,
    ) -> None:
        if not (seed is None or (isinstance(seed, Integral) and seed >= 0)):
            raise UserError(f"seed {seed!r}: expected a whole number of 0 or more, or None for weights of zeros")
        arena.check_fits(sum(prod(p.shape) * ITEMSIZE[p.dtype] for p in model.parameters()), hint)  # before the work
        how: dict[str, Any] = {"micro_batches": micro_batches, "reduce": reduce, "zero": zero, "comm": comm}
        how |= {"alone": alone, "freeze": freeze}
        built = build(model, inputs, choice=choice, fuse=fuse, train=train, optimizer=optimizer, **how)
        self.comm, self.micro_batches, self.alone = comm, micro_batches, alone
        self.divided = comm.size > 1 and (zero == 1 or alone)
        """Whether ranks keep different states of optimizers."""
        self._left = False  # whether the weights may differ from those of other ranks
        self._busy = threading.Lock()
        self.torn = ""
        """The method that ended within an update, which left the weights partly updated; else empty."""
        self.program, self.notes = built.program, built.notes
        self.kernels = list(built.own_kernels.values())
        """The kernels of the program's calls, without what the communicator runs."""
        self.threads = set_threads(threads, self.kernels)
        self.plan = built.plan()
        arena.check_fits(self.plan.total_bytes + self.plan.window_bytes, hint)
        self._arena = arena.Arena(self.plan.total_bytes)
        weights: dict[str, Array] = self.parameters() if seed is not None else {}
        with ThreadPoolExecutor(1) as beside:  # kernels load while NumPy draws, which needs no lock of Python's
            ended = threading.Event()
            drawn = None if seed is None else beside.submit(initialize, model, weights, seed, self.threads, ended)
            try:
                self.compiled = jit.compile_kernels(
                    list(dict.fromkeys(self.kernels)), processes=processes, files=kernel_files, progress=progress
                )
                if drawn:
                    drawn.result()
            finally:
                ended.set()  # after an error or a Ctrl-C nothing more is drawn
        ready(built, self.threads)
        self.base_bytes = arena.resident_bytes() - sum(w.nbytes for w in weights.values())
        self.step_number, self.dropout_seed = 0, seed or 0
        self.runner: Callable[[Iterable[Bound]], None] = run_calls
        if self.plan.window_bytes:
            self._arena.window = comm.memory(self.plan.window_bytes)
        self._scalars: dict[Scalar, list[tuple[list[Any], int]]] = {}
        self.calls = [self._bind(c, k) for c, k in zip(self.program.calls, built.kernels, strict=True)]
        self.phases = {p: [b for b in self.calls if b.call.phase == p] for p in PHASES}
        self.backwards = self._micro_batches(built)
        self._by_name = {v.name: v for v in self.program.values}
        self._norms = [self.array(v) for v in self.program.norm_terms]
        adjoints = set(self.program.adjoint.values())
        self._wanted = [v for v in self.program.inputs if v not in adjoints]
        for value, make in self.program.constants.items():
            np.copyto(self.array(value), make())
        if self.program.adjoint:
            self.array(self.program.adjoint[self.program.outputs[0]]).fill(1)
        for parameter, states in self.program.states.items():
            for state in self.program.optimizers[parameter].states:
                if state.start:  # fresh memory is zero, and is not allocated before it is written
                    self.array(states[state.name]).fill(state.start)

    @property
    def predicted_peak_bytes(self) -> int:
        """The predicted peak memory of the process: its use before the arena, and the arena."""
        return self.base_bytes + self.plan.total_bytes + self.plan.window_bytes

    def array(self, value: Value | str) -> Array:
        """Return the array of a value, or of the name of one. A pooled value holds its numbers only while it lives."""
        if isinstance(value, str):
            if value not in self._by_name:
                raise UserError(f"no value {value!r} in the program; {nearest(value, self._by_name)}")
            value = self._by_name[value]
        if value not in self.plan.offsets:
            raise UserError(f"{value} is not a value of this engine's program")
        return self._arena.view(value, self.plan.offsets[value], value.shape)

    def parameters(self) -> dict[str, Array]:
        """Return every parameter by name: views, so writing to them changes the model."""
        return {p.name: self.array(p) for p in self.program.parameters}

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
        self._load(**batch)

    def _load(self, **batch: Array) -> None:
        for v, given in self._checked(batch).items():
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
        return found

    @exclusive
    def run(self, *phases: Phase) -> None:
        """Run the calls of some phases, on this engine's threads."""
        with ExitStack() as updating:
            if {*phases} & {"update", "outer", *([] if self.two_pass else ["backward"])}:
                updating.enter_context(self._whole("run"))
            self._run(*phases)

    def _run(self, *phases: Phase) -> None:
        threads.set_threads(self.threads)
        for phase in phases:
            self.runner(self.phases[phase])

    def counted(self, batch: Mapping[str, Array]) -> int:
        """Return how many terms the loss of a batch is the mean of: targets that are not ignored; else 1.

        Raises
        ------
        UserError
            For a wrong batch, as in `load`.
        """
        given = self._checked(batch)
        if self.program.counted is None:
            return 1
        targets, ignored = self.program.counted
        return int(np.count_nonzero(given[targets] != ignored))

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Run a block that changes weights or states to its end: signals wait. After an error, later calls are refused.

        Parameters
        ----------
        what : the method's name, for the message.
        """
        with deferred():
            self.torn = what
            yield
            self.torn = ""

    @exclusive
    def forward(self, **batch: Array) -> float:
        """Run the forward on a batch and return the loss; NaN if all targets are ignored, as in PyTorch."""
        self._load(**batch)
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
        changes. If ranks train alone, the norm is a mean over them, so that all of them `accept` the same.

        Parameters
        ----------
        vector_decay : the weight decay of parameters of one axis, biases and normalizations; None: that of the others.
        clip : the largest global norm of the gradients, which are scaled down to it; None: no limit.
        more : further micro-batches of this rank.
        accept : called before the update; where it returns False, nothing changes and `step_number` stays.
        given : the model's inputs, by name; numbers of the optimizer, such as ``beta1``, in place of their defaults.
            Where there are several optimizers, ``sgd={"lr": 0.1}`` is for one of them.

        Raises
        ------
        UserError
            For a number that no optimizer has, a wrong input, or an engine that was built for other steps.
        """
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
        micro_batches = self._set_numbers(given, lr, vector_decay), *more
        first, ranks = self.micro_batches * self.comm.rank, self.comm.size
        losses, counts = np.zeros((2, self.micro_batches * ranks))
        squares = np.zeros(ranks)
        counts[first : first + self.micro_batches] = [self.counted(micro) for micro in micro_batches]
        together = counts if self.alone else self._combined(counts)[0]
        if self.alone and not self._left:
            self._run("start")
            self._left = True
        with ExitStack() as updating:
            if together.any():
                try:
                    for number, (micro, backward) in enumerate(zip(micro_batches, self.backwards, strict=True), first):
                        self._load(**micro)
                        share = counts[number] / together.sum()
                        self.array(self.program.adjoint[self.program.outputs[0]]).fill(share)
                        self._draw(1 + self.step_number * MOST_MICRO_BATCHES + number)
                        self._run("forward")
                        threads.set_threads(self.threads)
                        if not self.two_pass:
                            updating.enter_context(self._whole("step"))
                        self.runner(backward)
                        losses[number] = self.loss if share else 0.0
                finally:
                    self._draw(0)
                self._run("norm")
                squares[self.comm.rank] = sum(float(x) for terms in self._norms for x in terms)
            own = sqrt(squares[self.comm.rank])
            losses, squares, counts = self._combined(losses, squares, counts)
            norm = sqrt(fsum(squares) / ranks) if self.alone else own
            done = Step(mean_of(losses, counts), norm, int(counts.sum()))
            if not done.counted or (accept and not accept(done)):
                return done
            updating.enter_context(self._whole("step"))
            self.step_number += 1
            for optimizer in self.optimizers:
                self._set(optimizer, grad_scale=min(1.0, clip / (own + 1e-6)) if clip else 1.0)
            if together.any():
                self._run("update")
        return done

    def _combined(self, *mine: Array) -> list[Array]:
        """Sum arrays over the ranks, of which one at most has a number other than 0 at a place."""
        total = np.empty(sum(x.size for x in mine))
        self.comm.combine(total, np.concatenate(mine))
        return np.split(total, np.cumsum([x.size for x in mine])[:-1])

    @exclusive
    def outer_step(self, *, lr: float = 0.7, momentum: float = ops.OUTER.defaults["momentum"]) -> None:
        """Move all ranks, which have trained alone since the last time, to the same weights.

        The mean over ranks of how far each has come, the start less its weights, is the gradient of a step with
        Nesterov momentum from the start.

        Raises
        ------
        UserError
            For an engine that was not built for it.
        """
        if not self.alone:
            raise UserError("outer_step: the ranks of this engine take every step together; build it with alone=True")
        exact = {"lr": in_range(ops.Number("lr", 0.7), lr), "momentum": in_range(ops.OUTER.numbers[0], momentum)}
        if self._left:
            with self._whole("outer_step"):
                self._set(ops.OUTER, **exact, grad_scale=1 / self.comm.size)
                self._run("outer")
                self._left = False

    @cached_property
    def two_pass(self) -> bool:
        """Return whether all gradients are known before the first weight is updated."""
        return two_pass(self.program)

    def _bind(self, call: Call, kernel: registry.Kernel, **how: Any) -> Bound:
        if call.phase == "backward" and self.comm.size > 1 and not self.comm.shared:
            kernel = replace(kernel, function=followed(kernel.function, self.comm.progress))
        return bind(call, kernel, self.plan, self._arena, self._scalars, **how)

    def _micro_batches(self, built: Built) -> list[list[Bound]]:
        """Bind the backward of each micro-batch, and the sums that follow it."""
        backward = self.phases["backward"]
        last = [b for b in self.calls if b.call.phase in ("backward", "reduce")]
        if built.adding:
            adding = [self._bind(b.call, b.kernel, add=True) for b in backward]
            with_sums = [b if b.call.phase == "reduce" else next(again) for again in [iter(adding)] for b in last]
            return [backward, *[adding] * (self.micro_batches - 2), with_sums]
        kernels = built.own_kernels
        found = []
        for micro in self.program.micro_batches[:-1]:
            elsewhere = [self._bind(b.call, b.kernel, instead=micro.targets) for b in backward]
            sums = [self._bind(call, kernels[call], instead=instead) for call, instead in micro.sums]
            found.append([*(elsewhere if micro.targets else backward), *sums])
        return [*found, last]

    def rebound(self, bound: Bound, *kernels: registry.Kernel) -> list[Bound]:
        """Bind a call to other kernels, on the same arrays and with other scratch, which they share."""
        return self._rebound(bound, kernels, arena.Arena(max(scratch_bytes(bound.call, k) for k in kernels)))

    def rescratched(self) -> dict[int, Bound]:
        """Bind every call anew with scratch of its own size now, which all calls share; by the id of the call's."""
        bounds = {id(b): b for b in (*self.calls, *(b for backward in self.backwards for b in backward))}
        memory = arena.Arena(max(scratch_bytes(b.call, b.kernel) for b in bounds.values()))
        return {at: self._rebound(b, [b.kernel], memory)[0] for at, b in bounds.items()}

    def _rebound(self, bound: Bound, kernels: Sequence[registry.Kernel], memory: arena.Arena) -> list[Bound]:
        ours, found = len(bound.call.op.params), []
        work = [scratch_of(bound.call, k) for k in kernels]
        for kernel, mine in zip(kernels, work, strict=True):
            kernel.require(bound.call.absent)
            ends = np.cumsum([0, *(arena.align(v.nbytes) for v in mine)]).tolist()
            args = [*bound.args[:ours], *(memory.view(v, end, v.shape) for v, end in zip(mine, ends, strict=False))]
            for places in self._scalars.values():
                places += [(args, i) for known, i in places if known is bound.args]
            found.append(Bound(bound.call, kernel, args))
        return found

    @cached_property
    def optimizers(self) -> list[ops.Optimizer]:
        """The optimizers of its parameters in a step, each once."""
        optimizers = self.program.optimizers
        return list(dict.fromkeys(optimizers[p] for p in self.program.parameters if p in optimizers))

    def _set_numbers(self, given: Mapping[str, Any], lr: float, vector_decay: float | None) -> dict[str, Array]:
        """Set the optimizers' numbers for the next step; return the other arguments, which are inputs."""
        names = {n for o in self.optimizers for n in (o.name, *o.defaults)}
        for n in (n for n in given if n not in names and n not in self._by_name):
            if any(n in (o.name, *o.defaults) for o in ops.OPTIMIZERS.values()):
                raise UserError(f"{n}: {' and '.join(o.name for o in self.optimizers)} has no such number")
        for o in self.optimizers:
            own = given.get(o.name, {})
            if not isinstance(own, Mapping) or not own.keys() <= {"lr", *o.defaults}:
                raise UserError(
                    f"{o.name}: {str(own)[:60]}; expected numbers by name, of {', '.join(['lr', *o.defaults])}"
                )
            numbers = {n: given.get(n, x) for n, x in o.defaults.items()} | {"lr": lr, **own}
            numbers["vector_decay"] = numbers.get("weight_decay", 0.0) if vector_decay is None else vector_decay
            ranges = {n.name: n for n in o.numbers}
            exact = {n: in_range(ranges.get(n) or ops.Number(n, 0.0), x) for n, x in numbers.items()}
            self._set(o, **exact, step=self.step_number + 1)
        return {n: x for n, x in given.items() if n not in names}

    def _draw(self, counter: int) -> None:
        """Set what the random numbers of the next calls depend on; 0 turns dropout off."""
        for scalar, number in zip(DRAWS, (self.dropout_seed % 2**63, counter), strict=True):
            for args, i in self._scalars.get(scalar, []):
                args[i] = number

    def _set(self, optimizer: ops.Optimizer, **scalars: float) -> None:
        for name, number in scalars.items():
            for args, i in self._scalars.get(Scalar(name, optimizer.name), []):
                args[i] = number


def in_range(number: ops.Number, x: Any) -> float:
    """Return a number of an optimizer as a float; a `UserError` where it is none, or out of range."""
    try:
        wrong = number.wrong(exact := float(x))
    except (TypeError, ValueError):
        exact, wrong = 0.0, "a number"
    if wrong:
        raise UserError(f"{number.name} {str(x)[:60]}: expected {wrong}")
    return exact


def initialize(
    model: nn.Module,
    parameters: Mapping[str, Array],
    seed: int,
    workers: int = 1,
    ended: threading.Event | None = None,
) -> None:
    """Fill parameters of a model with initial weights: each depends on the seed and its name alone.

    Parameters
    ----------
    parameters : by name, all of them or some.
    ended : when it is set, the parameters that have not been begun are left as they are.
    """

    def fill(name: str, p: nn.Parameter) -> None:
        if ended and ended.is_set():
            return
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
        drawn = parameters[name] if p.dtype == "float32" else np.empty(p.shape, np.float32)
        p.init(rng, drawn)
        if drawn is not parameters[name]:
            np.copyto(parameters[name], drawn, casting="same_kind")

    with ThreadPoolExecutor(workers) as pool:  # NumPy draws without Python's lock
        list(pool.map(lambda named: fill(*named), [(n, p) for n, p in model.named_parameters() if n in parameters]))


def bind(
    call: Call,
    kernel: registry.Kernel,
    plan: arena.Plan,
    memory: arena.Arena,
    scalars: dict[Scalar, list[tuple[list[Any], int]]],
    add: bool = False,
    instead: Mapping[Value, Value] = NONE,
) -> Bound:
    """Make the arguments of a call's kernel from its values, in order.

    Parameters
    ----------
    scalars : receives the place of each number that is set later.
    add : whether every parameter's gradient is added to.
    instead : the value that takes another's place.
    """
    args: list[Any] = []
    for a in call.op.args:
        v = call.args[a.name]
        v = instead.get(v, v) if isinstance(v, Value) else v
        if a.role == "scalar":
            if isinstance(v, Scalar):
                scalars.setdefault(v, []).append((args, len(args)))
                v = 0
            args.append(int(v) if a.dtype == "int64" else float(v))
            continue
        if v is None:
            args.append(np.empty((0,) * len(a.shape), a.dtype))
        else:
            args.append(memory.view(v, plan.offsets[v], tuple(d(call.sizes) for d in a.shape)))
        if a.role == "acc":
            args.append(call.adds[a.name] or (add and v is not None and v.group == "gradient"))
    for v in plan.scratch[call].values():
        args.append(memory.view(v, plan.offsets[v], v.shape))
    return Bound(call, kernel, args)


def scratch_of(call: Call, kernel: registry.Kernel) -> list[Value]:
    """List the scratch of a call's kernel."""
    return [Value(n, shape, dtype=of) for n, (shape, of) in kernel.work(call.sizes).items()]


def scratch_bytes(call: Call, kernel: registry.Kernel) -> int:
    """Return the bytes of a call's scratch."""
    return sum(arena.align(v.nbytes) for v in scratch_of(call, kernel))


def followed(function: Callable[..., None], then: Callable[[], None]) -> Callable[..., None]:
    """Return a function that calls another one after it."""

    def both(*args: Any) -> None:
        function(*args)
        then()

    return both


def set_threads(n: int | None, chosen: Iterable[registry.Kernel]) -> int:
    """Set the threads of numba, and of NumPy's BLAS where a kernel uses it."""
    count = threads.set_threads(n)
    on_blas = any(k.variant == "blas" for k in chosen)
    threadpool_limits(count if on_blas else 1, user_api="blas")
    return count


load_kernels = kernels.load_all
