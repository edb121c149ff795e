"""The traced program: values, calls in order, a check of both, and their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import UserError
from ..ops.declaration import Op, Shape
from ..ops.optimizer import Optimizer
from ..ops.storage import TYPES, WIDE
from .arithmetic import OPEN, ValueArithmetic

Group = Literal["parameter", "copy", "constant", "gradient", "moment", "input", "activation", "adjoint"]
Phase = Literal["convert", "forward", "evaluate", "backward", "reduce", "norm", "update", "collect"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The parts of a program. A training step leaves out ``evaluate``, calls that only an evaluation needs because the
backward computes the loss itself. An evaluation runs the first two. The calls of ``reduce``, which add the gradients of
micro-batches and ranks, lie between those of the last backward of a step. ``convert`` writes the copies of weights in a
narrower type, if they are out of date. ``collect`` brings a rank's weights up to date, if the other ranks sent it their
copies alone."""
RECOMPUTE = "recompute"
"""What is shown in place of ``backward`` for a call that repeats one of the forward."""
PARTS: dict[str, str] = dict.fromkeys(PHASES[:3], "forward") | dict.fromkeys((RECOMPUTE, "backward"), "backward")
PARTS |= dict.fromkeys(PHASES[4:], "update")
"""The part of a step that each phase counts in: forward, backward or update, which has the gradient's norm."""
BLOCK = re.compile(r"(.*?\.\d+)(?:\.|$)")
"""The name of a layer inside a block, a module in a list."""


def block_of(layer: str) -> str:
    """Return the block that a layer lies in, or the layer itself if it lies in none."""
    block = BLOCK.match(layer)
    return block[1] if block else layer


@dataclass(eq=False)
class Value(ValueArithmetic["Value"]):
    """An array that a program reads or writes; the arena assigns its memory.

    Parameters
    ----------
    name : unique in its program: a parameter's own name, or layer and op for the result of a call.
    group : the purpose; parameters, constants, moments and inputs live through all steps.
    below : for indices, the size that they must stay below.
    allowed : for indices, one more value that is allowed (``ignore_index``).
    rising : for indices, whether each is a place in its row at or before its own, and none less than the one before.
    trained : for a parameter, whether steps change it.
    """

    name: str
    shape: Shape
    group: Group = "activation"
    dtype: str = WIDE
    below: int | None = None
    allowed: int | None = None
    rising: bool = False
    trained: bool = True

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * TYPES[self.dtype].bytes

    def __str__(self) -> str:
        return self.name

    if not TYPE_CHECKING:  # it would admit every name

        def __getattr__(self, name: str) -> Any:
            trace = OPEN.get()
            if trace is None or name.startswith("_"):
                raise AttributeError(name)
            trace.meaning["missing"](self, name)


class ReshapedValue(Value):
    """The elements of a value in another shape, while a model is traced.

    A program has none of them. A call has the value itself, and the shape in which it reads it.
    """

    def __init__(self, of: Value, shape: Shape) -> None:
        super().__init__(of.name, shape, of.group, of.dtype)
        self.of: Value = base(of)


def base(x: Any) -> Any:
    """Return the value that a view shows; anything else as it is."""
    return x.of if isinstance(x, ReshapedValue) else x


@dataclass(frozen=True)
class Scalar:
    """A number that the engine sets before each step, such as the learning rate, and its optimizer, if it has one."""

    name: str
    optimizer: str = ""

    def __str__(self) -> str:
        return self.name


DRAWS = Scalar("seed"), Scalar("counter")
"""What random numbers of a step depend on besides their call: the run's seed, and the micro-batch since its start."""


@dataclass(frozen=True)
class Place:
    """The place of a value inside another.

    Parameters
    ----------
    start : the element at which it begins.
    peer : the rank in whose memory it lies; None: this one.
    """

    host: Value
    start: int
    peer: int | None = None


def types_of(op: Op, layer: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of the arguments that do not have their usual one.

    Raises
    ------
    UserError
        For an argument of a type that the op does not take.
    """
    found = {a.name: v.dtype for a in op.arrays if isinstance(v := args.get(a.name), Value) and v.dtype != a.dtype}
    for name, dtype in found.items():
        if dtype not in op.by_name[name].types:
            expected = " or ".join(op.by_name[name].types)
            raise UserError(f"{op.name} in layer {layer!r}: argument '{name}' is {dtype}; expected {expected}")
    return found


@dataclass(eq=False)
class Call:
    """One op applied to values, in a layer.

    Parameters
    ----------
    args : the arguments by the op's names; None is an absent optional argument.
    adds : for each gradient argument, whether it is added to (a later writer) or overwritten (the first).
    inverts : for a backward call, the forward call whose adjoints it gives.
    given : sizes that its arguments need not fix, by symbol; a backward call has those of its forward call.
    views : the shapes of the arguments that it takes in another shape than the value's; a backward call has those of
        its forward call, for their adjoints too.
    repeats : for a call of the backward that computes again what a call of the forward did, that call.

    Attributes
    ----------
    sizes : the sizes of all symbols that the arguments fix or that are given.
    types : the types of the arguments that do not have their usual one.
    """

    op: Op
    layer: str
    args: dict[str, Any]
    phase: Phase = "forward"
    adds: dict[str, bool] = field(default_factory=dict)
    inverts: Call | None = None
    given: dict[str, int] = field(default_factory=dict)
    views: dict[str, Shape] = field(default_factory=dict)
    repeats: Call | None = None
    sizes: dict[str, int] = field(init=False)
    types: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        given = (self.inverts.given if self.inverts else {}) | self.given
        self.given = {s: n for s, n in given.items() if s in self.op.symbols}
        if self.inverts:
            of = {a.name: a.name if a.name in self.inverts.args else a.name[1:] for a in self.op.arrays}
            self.views = {n: self.inverts.views[f] for n, f in of.items() if f in self.inverts.views} | self.views
        shapes = {a.name: self.shape(a.name) for a in self.op.arrays}
        self.sizes = self.op.bind(shapes, **self.given)
        self.retype()

    @property
    def shown_phase(self) -> str:
        """Its phase, or ``recompute`` for a call of the backward that repeats one of the forward."""
        return RECOMPUTE if self.repeats else self.phase

    def retype(self) -> None:
        """Take the types of its values again."""
        self.types = types_of(self.op, self.layer, self.args)

    def shape(self, name: str) -> Shape | None:
        """Return the shape in which it takes an argument; None if that is absent."""
        v = self.args[name]
        return None if v is None else self.views.get(name, v.shape)

    @property
    def reads(self) -> list[Value]:
        """The values that it reads, those it adds to included."""
        read = [
            self.args[a.name]
            for a in self.op.arrays
            if a.kind in ("in", "index", "state") or (a.kind == "acc" and self.adds[a.name])
        ]
        return [v for v in read if v is not None]

    @property
    def writes(self) -> list[Value]:
        """The values that it writes, wholly or in part."""
        return [self.args[a.name] for a in self.op.written if self.args[a.name] is not None]

    @property
    def absent(self) -> set[str]:
        """The optional arguments that are absent."""
        return {n for n, v in self.args.items() if v is None}

    @property
    def counted(self) -> dict[str, int]:
        """The sizes, and the numbers other than 0 that its work depends on."""
        return self.sizes | {n: self.args[n] for n in self.op.counted if self.args[n]}

    @property
    def flops(self) -> int:
        """Floating-point operations that the mathematics needs."""
        return self.op.work(self.counted, self.absent)

    def asked(self, given: Mapping[str, Any]) -> float:
        """Return the share of `flops` that the data of its arguments ask for, which are given by name."""
        if not self.op.asked:
            return 1.0
        part = self.op.asked(**{name: given[name] for name in signature(self.op.asked).parameters})
        return 1 - (1 - part) * (1 - self.op.fixed(self.sizes) / self.flops)

    @property
    def operands(self) -> str:
        """The storage type of what its products multiply: bfloat16 if it reads an array of it."""
        return self.op.operands(self.types)

    @property
    def bytes(self) -> int:
        """The least number of bytes that must move."""
        return self.op.bytes(self.counted, self.adds, self.absent, self.types)

    def __str__(self) -> str:
        words = []
        for a in (a for a in self.op.args if a.shown or self.args[a.name] not in (None, 0)):
            v = "-" if self.args[a.name] is None else self.args[a.name]
            mark = {True: " +=", False: " ="}.get(self.adds.get(a.name, False)) if a in self.op.written else ""
            shape = f" {list(self.shape(a.name) or ())}" if isinstance(v, Value) else ""
            words.append(f"{a.name}{mark} {v}{shape}" if mark else f"{a.name}: {v}{shape}")
        return f"{self.layer:<20} {self.op.name}({', '.join(words)})"


@dataclass(frozen=True)
class Placed:
    """A call in the schedule of a step.

    Parameters
    ----------
    add : whether it adds to the gradients of parameters, if it would overwrite them.
    instead : the values that take the place of its own.
    """

    call: Call
    add: bool = False
    instead: Mapping[Value, Value] = field(default_factory=dict)


class Program:
    """Calls in the order in which they run, with the values that they share.

    Attributes
    ----------
    outputs : what the model returns, its loss first.
    constants : the values that never change, such as tables of angles, each with the function that makes its array.
    adjoint : the gradient of each value that the loss depends on.
    norm_terms : the values whose elements sum to the square of the gradient's global norm.
    within : the values that lie inside others, such as gradients in a bucket.
    kept : the values that live through all steps besides parameters and states, each with memory of its own.
    filled : those of them that are defined before a step, or written part by part.
    window : the values that all ranks see.
    owned : of parameters whose states this rank keeps in part, the first element and the end of that part.
    copied : of parameters that a step gets from other ranks as copies alone, these copies.
    scales : of parameters in int8, the scales of their blocks.
    heads : weights that the logits of a text are products with, in this program or in others with the same memory.
    backwards : the calls behind the forward of each micro-batch of a step.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.parameters: list[Value] = []
        self.constants: dict[Value, Callable[[], Any]] = {}
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.adjoint: dict[Value, Value] = {}
        self.norm_terms: list[Value] = []
        self.optimizers: dict[Value, Optimizer] = {}
        self.states: dict[Value, dict[str, Value]] = {}
        """The optimizer's states of each parameter, by name."""
        self.within: dict[Value, Place] = {}
        self.kept: list[Value] = []
        self.filled: set[Value] = set()
        self.window: list[Value] = []
        self.owned: dict[Value, tuple[int, int]] = {}
        self.copied: dict[Value, Value] = {}
        self.scales: dict[Value, Value] = {}
        self.heads: list[Value] = []
        self.backwards: list[list[Placed]] = []
        self._names: set[str] = set()

    def value(self, name: str, shape: Shape, group: Group = "activation", **kw: Any) -> Value:
        """Make a value under a name that is not taken yet."""
        unique, n = name, 1
        while unique in self._names:
            n += 1
            unique = f"{name}.{n}"
        self._names.add(unique)
        return Value(unique, shape, group, **kw)

    @property
    def trained(self) -> list[Value]:
        """The parameters that steps change."""
        return [p for p in self.parameters if p.trained]

    @property
    def moments(self) -> list[Value]:
        """All states of the optimizers."""
        return [v for states in self.states.values() for v in states.values()]

    @property
    def counted(self) -> tuple[Value, int] | None:
        """The input of targets over which the loss is a mean, and the id that does not count; None if it is no such."""
        for call in self.calls:
            if self.outputs[0] in call.writes:
                ids = {call.args[a.name]: call.args[a.ignored] for a in call.op.arrays if a.ignored}
                return next(((v, ignored) for v, ignored in ids.items() if v in self.inputs), None)
        return None

    @property
    def values(self) -> list[Value]:
        """Every value, each once, in the order of first mention."""
        seen = dict.fromkeys([*self.parameters, *self.constants, *self.inputs, *self.moments, *self.kept])
        for call in self.calls:
            seen.update(dict.fromkeys([*call.writes, *call.reads]))
        return list(seen)

    def phase(self, *phases: Phase) -> Iterator[Call]:
        """Iterate over the calls of some phases."""
        return (c for c in self.calls if c.phase in phases)

    @property
    def step_calls(self) -> list[Call]:
        """The calls of a training step: all but those of evaluations, and of weights between steps."""
        return [c for c in self.calls if c.phase not in ("evaluate", "convert", "collect")]

    @property
    def work(self) -> dict[str, int]:
        """Floating-point operations of one step, by the storage type of what they multiply; what is repeated is not."""
        found: dict[str, int] = {}
        for c in self.step_calls:
            if not c.repeats:
                found[c.operands] = found.get(c.operands, 0) + c.flops
        return found

    @property
    def repeated_flops(self) -> int:
        """Floating-point operations of one step that compute again what the forward did."""
        return sum(c.flops for c in self.step_calls if c.repeats)

    @property
    def flops(self) -> int:
        """Floating-point operations of one step."""
        return sum(self.work.values())

    def verify(self) -> None:
        """Check that the program is valid; run after every pass.

        Each value is defined before it is read; no ``out`` is written twice; a gradient's first writer overwrites and
        the later ones add; no call is given one array twice if it writes it; what a repeated call reads again has not
        changed since. (Shapes are checked as calls are made.)

        Raises
        ------
        UserError
            Naming the call and the value.
        """
        known = {*self.parameters, *self.constants, *self.inputs, *self.moments, *self.filled}
        evaluated: set[Value] = set()
        written: dict[Value, int] = {}
        place: dict[Call, int] = {}
        for number, call in enumerate(self.calls):
            defined = known | evaluated if call.phase == "evaluate" else known
            where = f"program, call {number}, {call.op.name} in layer {call.layer!r}"
            for v in call.reads:
                if v not in defined and not defined.issuperset(self._gradients_in(v)):
                    raise UserError(f"{where}: reads {v}, which no earlier call has written")
            if call.repeats:
                since = place.get(call.repeats, number)
                for v in call.reads:
                    if written.get(v, 0) > since and v in call.repeats.reads:
                        raise UserError(f"{where}: repeats call {since} and reads {v}, which has changed since")
            place[call] = number
            written |= dict.fromkeys(call.writes, number)
            given = [v for v in call.args.values() if isinstance(v, Value)]
            for v in call.writes:
                if given.count(v) > 1:
                    raise UserError(f"{where}: {v} is given twice and written; a kernel's arrays must be distinct")
            for a in call.op.written:
                v = call.args[a.name]
                fresh = a.kind == "out" or (a.kind == "acc" and not call.adds[a.name])
                if v is not None and fresh and v in defined and v not in self.filled:
                    raise UserError(f"{where}: '{a.name}' overwrites {v}, which an earlier call has written")
            (evaluated if call.phase == "evaluate" else known).update(call.writes)

    def _gradients_in(self, v: Value) -> set[Value]:
        """Return the gradients that must be there where a bucket of them, or a part of one, is read; else itself."""
        place = self.within.get(v, Place(v, 0))
        if place.host in self.filled:
            return set()
        if place.peer is not None or place.host not in self.kept or v in self.adjoint.values():
            return {v}
        end = place.start + prod(v.shape)
        inside = {g: at for g in self.adjoint.values() if (at := self.within.get(g)) and at.host is place.host}
        return {g for g, at in inside.items() if at.start < end and place.start < at.start + prod(g.shape)}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, *phases: Phase, note: Callable[[Call], str] = lambda call: "") -> list[str]:
        """Show one line a call; backward lines stand below the forward line that they invert.

        Parameters
        ----------
        phases : the phases to show; all if none is given.
        note : function that returns an addition to a call's line.
        """
        shown: list[str] = []
        above: Call | None = None
        for call in self.phase(*(phases or PHASES)):
            if call.inverts is not None and call.inverts is not above:
                shown.append(f"# inverts {call.inverts}")
            above = call.inverts
            shown.append(f"{call}{note(call)}")
        return shown
