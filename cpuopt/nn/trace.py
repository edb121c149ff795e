"""Front-end calls to a program: while a trace is open, every functional call adds one call to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from ..errors import UserError
from ..ops.declaration import MERGES, Op, Shape, merge
from ..program.arithmetic import OPEN, open_trace
from ..program.program import Call, Program, ReshapedValue, Value, base, types_of


class Array(Protocol):
    """The argument of a functional: a value or a parameter."""

    @property
    def shape(self) -> Shape:
        """Its sizes."""


ROOT = "model"
"""The layer of calls that a model makes outside its submodules."""


class Trace:
    """A program under construction, and the layer that is being traced.

    Attributes
    ----------
    meaning : what the operators of values do, by name.
    values : the value of each parameter.
    paths : the dotted path of each module.
    """

    def __init__(self, meaning: Mapping[str, Callable[..., Any]]) -> None:
        self.meaning = meaning
        self.program = Program()
        self.layer = ROOT
        self.values: dict[Any, Value] = {}
        self.paths: dict[Any, str] = {}

    @contextmanager
    def inside(self, module: Any) -> Iterator[None]:
        """Count calls to a module's layer."""
        outer, self.layer = self.layer, self.paths.get(module) or ROOT
        try:
            yield
        finally:
            self.layer = outer

    def value(self, x: Any) -> Any:
        """Return the value of a parameter or a buffer; anything else as it is."""
        return self.values.get(x, x)

    def is_one(self, x: Array, y: Array) -> bool:
        """Return whether two arguments are one value, maybe in two shapes."""
        return base(self.value(x)) is base(self.value(y))

    def emit(self, op: Op, args: Mapping[str, Any], shape: Shape | None = None, /, **sizes: int) -> Value:
        """Add a call, making its outputs; return the first of them.

        Parameters
        ----------
        args : the inputs by name: values, parameters, numbers, or None if absent.
        shape : that of the first output, if it has other axes than the op declares.
        sizes : the sizes of symbols that the arguments do not fix, such as NH; the call keeps them.
        """
        where = f"{op.name} in layer {self.layer!r}"
        for a in op.arrays:
            v = args.get(a.name)
            if v is not None and (not isinstance(getattr(v, "shape", None), tuple) or hasattr(type(v), "tobytes")):
                raise UserError(
                    f"{where}: '{a.name}' is {type(v).__name__}; expected a value or a parameter of the model"
                )
        args = {name: self.value(v) for name, v in args.items()}
        shapes = {a.name: v.shape if (v := args.get(a.name)) is not None else None for a in op.arrays}
        for a in op.arrays:
            if a.kind in ("in", "index") and args.get(a.name) is None and not a.optional:
                raise UserError(f"{where}: argument '{a.name}' is missing")
        types_of(op, self.layer, args)
        known = op.bind(shapes, **sizes)
        for a in op.arrays:
            if args.get(a.name) is not None and not isinstance(args[a.name], Value):
                raise UserError(f"{where}: '{a.name}' is no parameter of the model; make its module in __init__")
        needed = [op.flops, *(d for a in op.args if a.kind == "out" for d in a.shape)]
        needed += [a.below for a in op.arrays if args.get(a.name) is not None and a.below is not None]
        if unknown := [s for d in needed for s in d.symbols if s not in known]:
            raise UserError(f"{where}: no argument fixes {unknown[0]}; give its size: emit(..., {unknown[0]}=...)")
        lead = _leading_axes(op, args)
        views = {
            a.name: v.shape
            for a in op.arrays
            if isinstance(v := args.get(a.name), ReshapedValue) and merge(a, v.shape) != merge(a, v.of.shape)
        }
        args = {name: base(v) for name, v in args.items()}
        made: dict[str, Value] = {}
        for a in op.args:
            if a.kind == "out":
                own = tuple(d(known) for d in a.shape)
                if a.shape and a.shape[0] in lead:
                    own = (*lead[a.shape[0]], *own[1:])
                if shape is not None and not made and shape != own:
                    views[a.name], own = own, shape
                name = f"{self.layer}.{op.name.removesuffix('_forward')}.{a.name}"
                made[a.name] = self.program.value(name, own, dtype=a.dtype)
        for a in op.arrays:
            v = args.get(a.name)
            if a.kind == "index" and v is not None and a.below is not None:
                ignored, first_use = args.get(a.ignored), v.below is None
                v.allowed = ignored if first_use or v.allowed == ignored else None
                v.below = a.below(known) if first_use else min(v.below, a.below(known))
                v.rising = v.rising or a.rising
        args = {a.name: made.get(a.name, args.get(a.name)) for a in op.args}
        self.program.calls.append(Call(op, self.layer, args, given=sizes, views=views))
        return next(iter(made.values()))


def _leading_axes(op: Op, args: Mapping[str, Any]) -> dict[Any, tuple[int, ...]]:
    """Find which axes a merged symbol stands for, from the first argument that has it."""
    lead: dict[Any, tuple[int, ...]] = {}
    for a in op.arrays:
        v = args.get(a.name)
        if v is not None and a.shape and a.shape[0].symbols & MERGES and len(merge(a, v.shape)) == len(a.shape):
            lead.setdefault(a.shape[0], v.shape[: len(v.shape) - len(a.shape) + 1])
    return lead


def current() -> Trace:
    """Return the open trace.

    Raises
    ------
    UserError
        If a functional is called outside a trace.
    """
    trace: Trace = open_trace()
    return trace


@contextmanager
def tracing(meaning: Mapping[str, Callable[..., Any]]) -> Iterator[Trace]:
    """Open a trace, in which the operators of values mean these functions."""
    trace = Trace(meaning)
    token = OPEN.set(trace)
    try:
        yield trace
    finally:
        OPEN.reset(token)
