"""From a module to bound calls in memory: trace, reverse, rewrite, choose kernels; then plan, compile and bind.

`build` makes the program and chooses its kernels, and `load` puts some builds into one arena. Training, evaluation and
generation go this way; a decoder is some builds in one arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from threading import Event
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from . import nn, ops
from .comm import SERIAL, Comm
from .errors import UserError, blamed
from .kernels import doubles, registry
from .kernels.compile import jit
from .kernels.toolkit import threads
from .ops.declaration import Arg, Spec
from .ops.dequantize import ROWS, Quantized
from .ops.storage import TYPES, WIDE
from .program import arena
from .program.distribute import distribute
from .program.fuse import BEFORE, fuse
from .program.fuse import chosen as rewrites
from .program.optimizer import Choice as OptimizerChoice
from .program.optimizer import add_update, freeze
from .program.precision import NARROW, store_operands, weights_of_products
from .program.program import Call, Phase, Placed, Program, Scalar, Value
from .program.quantize import INT8, copy_trained, left_out, quantizable, quantize
from .program.recompute import recompute_blocks
from .program.reverse import reverse
from .program.schedule import schedule
from .program.tables import cut_tables

Array = np.ndarray[Any, Any]
Reduce = Literal["exact", "fast"]
"""How gradients are added over micro-batches and ranks."""
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class BuildOptions:
    """How a module becomes calls: what is passed on from whoever builds to whatever does a part of it.

    Parameters
    ----------
    choice : the variant of each op; vanilla by default.
    fuse : rewrites to apply, out of ``cpuopt.program.fuse.FUSIONS``; without `train` there are none.
    recompute : how many blocks, or "all", are computed again in the backward of a training step, to need less memory.
    train : whether to generate backward and update.
    micro_batches : how many a step is given on this rank.
    reduce : "exact" to add the gradients of micro-batches and ranks in a fixed tree, so that the bits do not depend on
        the ranks; "fast" to add those of a rank in the kernels, in less memory, and of ranks in the library's order.
    zero : 1 if a rank keeps the optimizer's states of its slice alone, 0 if of all parameters.
    comm : the ranks; this process alone by default.
    optimizer : the name of one in ``cpuopt.ops.OPTIMIZERS``; or names by patterns of parameters, of which the last that
        matches wins, as in ``{"*": "adamw", "*.bias": "sgd"}``.
    freeze : patterns of parameters that steps leave as they are; they have no gradient and no states.
    dtype : "bfloat16" to store in it what products, attention and activations read, but not the weights of an update,
        sums and states; "int8" to do so and to multiply weights of linear layers in blocks as integers.
    base : "int8", "q8_0" or "w8a8" to store in int8 the frozen weights that products in blocks read, and with the last
        to multiply them as integers; by default as `dtype` says, and the last with that of "int8".
    bf16_layers : globs of layers whose products stay as they are where others are multiplied as integers.
    moments : "bfloat16" to store the optimizers' states in it, rounded at random.
    weights : "bfloat16" to store in it alone those trained weights that products read, as frozen ones are. A step
        rounds them at random. It needs a `dtype` of bfloat16 or int8.
    threads : the number for all kernels; numba's own by default.
    processes : how many processes compile what the cache lacks; one a core by default.
    kernel_files : the files of kernels that these processes import.
    """

    choice: registry.Choice = field(default_factory=registry.Choice)
    fuse: Sequence[str] = ()
    recompute: int | str = 0
    train: bool = True
    micro_batches: int = 1
    reduce: Reduce = "exact"
    zero: int = 1
    comm: Comm = SERIAL
    optimizer: OptimizerChoice = ops.USUAL
    freeze: Sequence[str] = ()
    dtype: str = WIDE
    base: str = ""
    bf16_layers: Sequence[str] = ()
    moments: str = WIDE
    weights: str = WIDE
    threads: int | None = None
    processes: int | None = None
    kernel_files: Sequence[str] = ()

    @classmethod
    def from_words(
        cls,
        variant: str | registry.Choice = registry.DEFAULT,
        swap: Sequence[str] = (),
        fuse: str | Iterable[str] = "auto",
        *,
        plan: Sequence[str] = (),
        two_pass: str = "",
        **more: Any,
    ) -> BuildOptions:
        """Return the options that the words of a command or of a script mean, with the defaults of both.

        Parameters
        ----------
        variant : the variant of every op that has it, or a `Choice` with its rules.
        swap, plan : the rules of the choice.
        fuse : ``"auto"``, ``"all"``, ``"none"``, or names of rewrites.
        two_pass : what needs all gradients before the first update, such as a flag; several micro-batches do as well.
        more : the other options.

        Raises
        ------
        UserError
            For a word that does not exist, and for words that exclude each other.
        """
        if isinstance(variant, registry.Choice):
            if swap:
                raise UserError("swap: give the rules to the Choice, or a variant's name with swap")
            choice = variant
        else:
            choice = registry.Choice(variant, swap, plan)
        options = cls(choice, **more)
        needed = two_pass or f"micro_batches={options.micro_batches}" * options.several
        return replace(options, fuse=rewrites(fuse, choice.variant, needed))

    def __post_init__(self) -> None:
        """Refuse what is no number of micro-batches, and types that do not exist or exclude each other."""
        if not isinstance(self.micro_batches, Integral) or self.micro_batches < 1:
            raise UserError(f"micro_batches {self.micro_batches!r}: expected 1 or more")
        for name in ("dtype", "moments", "weights"):
            allowed = [WIDE, NARROW, INT8] if name == "dtype" else [WIDE, NARROW]
            if (word := getattr(self, name)) not in allowed:
                raise UserError(f"{name} {word!r}: expected {' or '.join(map(repr, allowed))}")
        if self.weights == NARROW and self.dtype == WIDE:
            raise UserError(
                f"weights '{NARROW}': products read them so with dtype='{NARROW}' or '{INT8}' alone; add one"
            )

    @property
    def several(self) -> bool:
        """Whether the gradients of a step are those of several micro-batches or ranks."""
        return self.train and self.micro_batches * self.comm.size > 1

    @property
    def divided(self) -> bool:
        """Whether gradients lie in buckets, which a pass adds in a fixed tree or divides among ranks."""
        return self.several and (self.reduce == "exact" or self.comm.size > 1)

    def takes(self, call: Call, arg: Arg) -> bool:
        """Return whether the kernel of a call takes an argument in bfloat16."""
        return self.choice.resolve(call.op.name, call.layer).takes(arg, NARROW)

    def least_bytes(self, p: nn.Parameter) -> int:
        """Return the least bytes of each number of a parameter."""
        narrow = [self.weights] if p.trained else [self.dtype, INT8 if self.base else self.dtype]
        return min(TYPES[t].bytes for t in (p.dtype, *narrow))

    @property
    def at_random(self) -> bool:
        """Whether a step rounds weights or states at random."""
        return self.train and (self.moments, self.weights) != (WIDE, WIDE)

    @property
    def adding(self) -> bool:
        """Whether the kernels add up the gradients of micro-batches, which then keep their place in memory."""
        return self.train and self.reduce == "fast" and self.micro_batches > 1


@dataclass
class Bound:
    """A call with its kernel and the arguments of the kernel."""

    call: Call
    kernel: registry.Kernel
    args: list[Any]


def run_calls(calls: Iterable[Bound], tick: Callable[[], None] | None = None) -> None:
    """Run bound calls in order: the one loop. A profiler's `tick` reads the clock after each."""
    for bound in calls:
        try:
            bound.kernel.function(*bound.args)
        except BaseException as e:
            raise blamed(e, bound.kernel.name, bound.call.layer) from e
        if tick:
            tick()


@dataclass
class Built:
    """A program with the kernel of each call, and notes for the user on how they were chosen."""

    program: Program
    kernels: list[registry.Kernel]
    notes: list[str]
    options: BuildOptions

    def plan(self) -> arena.ArenaPlan:
        """Plan the memory."""
        work = [k.work(c.sizes) for c, k in zip(self.program.calls, self.kernels, strict=True)]
        summed = [self.program.adjoint[p] for p in self.program.parameters if p in self.program.adjoint]
        return arena.plan(self.program, work, summed if self.options.adding else (), self.options.comm.rank)

    @cached_property
    def own_kernels(self) -> dict[Call, registry.Kernel]:
        """The kernel of each call that computes; a communicator runs the others."""
        pairs = zip(self.program.calls, self.kernels, strict=True)
        return {c: k for c, k in pairs if not isinstance(c.op, ops.Collective)}


def build(
    model: nn.Module,
    inputs: Mapping[str, Spec],
    options: BuildOptions | None = None,
    *,
    rewrite: Callable[[Program], None] | None = None,
    **changes: Any,
) -> Built:
    """Trace a model, generate its backward and its update, rewrite, and choose a kernel for each call.

    Parameters
    ----------
    rewrite : function that changes the traced forward, as for generation. Whether each rule of the choice matches a
        call is then for the caller to check.
    changes : fields of the options, in place of theirs.

    Raises
    ------
    UserError
        For a model that cannot be traced, a rule that matches nothing, or several micro-batches with the rewrite
        ``update``.
    """
    how = replace(options or BuildOptions(), **changes)
    program, notes = nn.trace_model(model, inputs), list[str]()
    freeze(program, how.freeze)
    alone = [p for p in weights_of_products(program) if not p.trained or how.weights == NARROW]
    if rewrite:
        rewrite(program)
    cut_tables(program)
    before = list(program.calls)
    if how.train:
        notes = fuse(program, [name for name in how.fuse if name in BEFORE], how.choice)
        reverse(program)
        add_update(program, how.optimizer, how.moments, how.at_random)
        before += program.calls
        notes += fuse(program, [name for name in how.fuse if name not in BEFORE], how.choice)
    before += program.calls
    if how.several:
        require_sums(program)
    without = left_out(program, how.bf16_layers)
    if how.dtype == INT8:
        copy_trained(program, not how.divided, without)
    if how.dtype != WIDE:
        store_operands(program, how.takes, inline=not how.divided, alone=alone)
    if how.train:
        recompute_blocks(program, how.recompute)
    frozen = [p for p in alone if not p.trained]
    if how.base or (how.dtype == INT8 and quantizable(program, frozen, ROWS, without)):
        quantize(program, frozen, how.base or ROWS, without)
    if not rewrite:
        how.choice.check_used((c.op.name, c.layer) for c in dict.fromkeys([*before, *program.calls]))
    if how.divided:
        distribute(program, how.comm, local=how.micro_batches, exact=how.reduce == "exact", zero=how.zero)
    schedule(program, how.micro_batches, how.adding)
    kernels = chosen(program, how)
    notes += filter(None, (doubles.note(k) for k in dict.fromkeys(kernels)))
    return Built(program, kernels, notes, how)


def require_sums(program: Program) -> None:
    """Refuse a program whose gradients cannot be summed before the first update."""
    if not two_pass(program):
        raise UserError(
            "micro_batches: some weights are updated in the backward, before all is summed; fuse without 'update'"
        )
    if any(program.adjoint[p].group != "gradient" for p in program.parameters if p in program.adjoint):
        raise UserError("micro_batches: a parameter shares its gradient with a residual; fuse without 'residual'")


def two_pass(program: Program) -> bool:
    """Return whether all gradients are known before the first weight is updated."""
    return not any(c.phase == "backward" and any(a.kind == "state" for a in c.op.args) for c in program.calls)


def chosen(program: Program, how: BuildOptions) -> list[registry.Kernel]:
    """Choose the kernel of each call; one that needs a gradient that the call lacks gets an array that nobody reads."""
    run_by = collectives(how.comm)
    found = [run_by.get(c.op.name) or how.choice.resolve(c.op.name, c.layer).of(c.types) for c in program.calls]
    for call, kernel in zip(program.calls, found, strict=True):
        for name in kernel.whole(call.absent):
            of = call.op.by_name[name]
            call.args[name] = program.value(f"unused {name}", tuple(d(call.sizes) for d in of.shape), dtype=of.dtype)
            call.adds[name] = False
    return found


def collectives(comm: Comm) -> dict[str, registry.Kernel]:
    """Return what runs each collective in place of a kernel, by the op's name."""
    return {op.name: registry.Kernel(op, comm.name, getattr(comm, op.name)) for op in ops.COLLECTIVES}


@dataclass
class Loaded:
    """A build whose calls are bound to memory.

    Attributes
    ----------
    threads : the number on which its kernels run.
    calls : of the program, in its order.
    """

    built: Built
    plan: arena.ArenaPlan
    memory: arena.Arena
    threads: int
    calls: list[Bound] = field(default_factory=list)
    _scalars: dict[Scalar, list[tuple[list[Any], int]]] = field(default_factory=dict)

    def array(self, value: Value, shape: tuple[int, ...] | None = None) -> Array:
        """Return the array of a value, in a shape of its own if one is given."""
        return self.memory.view(value, self.plan.offsets[value], value.shape if shape is None else shape)

    def weight(self, value: Value) -> Array:
        """Return the array of a parameter, to which numbers can be assigned whatever its type."""
        found, scales = self.array(value), self.built.program.scales.get(value)
        return found if scales is None else Quantized.of(found, self.array(scales))

    def set(self, scalar: Scalar, number: float) -> None:
        """Set a number in all calls that are given it."""
        for args, i in self._scalars.get(scalar, ()):
            args[i] = number

    def of(self, *phases: Phase) -> list[Bound]:
        """Return the calls of some phases, in their order."""
        return [b for b in self.calls if b.call.phase in phases]

    def backwards(self) -> list[list[Bound]]:
        """Bind the program's schedule: what runs behind the forward of each micro-batch."""
        own = dict(zip(self.built.program.calls, self.calls, strict=True))
        bound: dict[tuple[Any, ...], Bound] = {}

        def of(placed: Placed) -> Bound:
            if not placed.add and not placed.instead:
                return own[placed.call]
            key = placed.call, placed.add, id(placed.instead)
            if key not in bound:
                bound[key] = self.bind(placed.call, own[placed.call].kernel, placed.add, placed.instead)
            return bound[key]

        return [[of(placed) for placed in micro] for micro in self.built.program.backwards]

    def bind(
        self,
        call: Call,
        kernel: registry.Kernel,
        add: bool = False,
        instead: Mapping[Value, Value] | None = None,
    ) -> Bound:
        """Make the arguments of a call's kernel from its values, in order.

        Parameters
        ----------
        add : whether every parameter's gradient is added to.
        instead : the value that takes another's place.
        """
        args: list[Any] = []
        for a in call.op.args:
            v = call.args[a.name]
            v = (instead or {}).get(v, v) if isinstance(v, Value) else v
            if a.kind == "scalar":
                if isinstance(v, Scalar):
                    self._scalars.setdefault(v, []).append((args, len(args)))
                    v = 0
                args.append(int(v) if a.dtype == "int64" else float(v))
                continue
            if v is None:
                args.append(np.empty((0,) * len(a.shape), a.dtype))
            else:
                args.append(self.array(v, tuple(d(call.sizes) for d in a.shape)))
            if a.kind == "acc":
                args.append(call.adds[a.name] or (add and v is not None and v.group == "gradient"))
        args += [self.array(v) for v in self.plan.scratch[call].values()]
        return Bound(call, kernel.direct(), args)

    def rebound(self, bound: Bound, kernels: Sequence[registry.Kernel], memory: arena.Arena) -> list[Bound]:
        """Bind a call to other kernels, on the same arrays and with scratch in another memory, which they share."""
        ours, found = len(bound.call.op.params), []
        for kernel in kernels:
            kernel.require(bound.call.absent)
            mine = scratch_of(bound.call, kernel)
            ends = np.cumsum([0, *(arena.align(v.nbytes) for v in mine)]).tolist()
            args = [*bound.args[:ours], *(memory.view(v, end, v.shape) for v, end in zip(mine, ends, strict=False))]
            for places in self._scalars.values():
                places += [(args, i) for known, i in places if known is bound.args]
            found.append(Bound(bound.call, kernel.direct(), args))
        return found


def load(
    builts: Sequence[Built],
    *,
    hint: Callable[[int], str],
    progress: Progress | None = None,
    draw: Callable[[Loaded, Event], None] | None = None,
    ready: Callable[[Loaded], None] = lambda loaded: None,
    reserved: int = 0,
) -> list[Loaded]:
    """Plan the memory of some builds in one arena, compile their kernels, and bind their calls.

    Parameters
    ----------
    hint : function that returns advice when the memory does not suffice.
    progress : called with (compiled, to compile, kernel); by default a line on stderr.
    draw : fills the parameters of the first build while kernels load, until an event is set.
    ready : called when kernels and parameters are there, before other memory is touched.
    reserved : the bytes that the process will need besides the arena.

    Raises
    ------
    UserError
        For too little memory.
    """
    how, plans = builts[0].options, [built.plan() for built in builts]
    kernels = list(dict.fromkeys(k for built in builts for k in built.own_kernels.values()))
    count = set_threads(how.threads, kernels)
    arena.check_fits(max(plan.total_bytes + plan.window_bytes for plan in plans) + reserved, hint)
    memory = arena.Arena(max(plan.total_bytes for plan in plans))
    loaded = [Loaded(built, plan, memory, count) for built, plan in zip(builts, plans, strict=True)]
    with ThreadPoolExecutor(1) as beside:  # kernels load while NumPy draws, which needs no lock of Python's
        ended = Event()
        drawn = beside.submit(draw, loaded[0], ended) if draw else None
        try:
            jit.compile_kernels(kernels, processes=how.processes, files=how.kernel_files, progress=progress)
            if drawn:
                drawn.result()
        finally:
            ended.set()  # after an error or a Ctrl-C nothing more is drawn
    ready(loaded[0])
    if window := max(plan.window_bytes for plan in plans):
        memory.window = how.comm.memory(window)
    for one in loaded:
        for call, kernel in zip(one.built.program.calls, one.built.kernels, strict=True):
            if call.phase == "backward" and how.comm.size > 1 and not how.comm.shared:
                kernel = replace(kernel, function=followed(kernel.function, how.comm.progress))
            one.calls.append(one.bind(call, kernel))
        for value, make in one.built.program.constants.items():
            np.copyto(one.array(value), make())
    return loaded


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
    """Set the threads of numba, and of NumPy's BLAS if a kernel uses it."""
    count = threads.set_threads(n)
    on_blas = any(k.variant == "blas" for k in chosen)
    threadpool_limits(count if on_blas else 1, user_api="blas")
    return count
