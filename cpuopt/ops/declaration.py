"""The declaration of an op: its arguments, their kinds and shapes, its cost, its reference.

An op is declared once, in ``cpuopt/ops/``. The registry, the tracer, reverse mode, the arena, the profiler and the
checks read the declaration; none of them knows an op or an argument by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from math import prod
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal

from ..errors import UserError
from .storage import TYPES, WIDE

Kind = Literal["out", "acc", "state", "in", "index", "scalar"]
Role = Literal["product", "sum", "activation", "gate", "normalization", "loss"]
"""The role of an op, for the rewrites: a ``product`` of rows with a weight; a ``sum``, whose backward hands one
gradient on to all terms; an ``activation`` or a ``normalization``, which cost little to compute again; a ``gate``,
which multiplies two values element by element; a ``loss``. Each makes its first argument from its operand, the first
array that it reads."""
Shape = tuple[int, ...]
Spec = tuple[Shape, str]
"""Shape and dtype of an array."""
Types = tuple[str, ...]
FLOAT32: Types = (WIDE,)
HALF: Types = (WIDE, "bfloat16")
"""The types of what products, attention and activations read, and of what is stored for them."""


class Dim:
    """A polynomial in size symbols, such as ``3*C`` or ``2*BT*C*OC``; calling it with sizes gives its value."""

    def __init__(self, terms: Mapping[tuple[str, ...], float]) -> None:
        self.terms = {k: v for k, v in sorted(terms.items()) if v}

    def __add__(self, other: Dim | float) -> Dim:
        terms = dict(self.terms)
        for k, v in as_dim(other).terms.items():
            terms[k] = terms.get(k, 0) + v
        return Dim(terms)

    def __mul__(self, other: Dim | float) -> Dim:
        terms: dict[tuple[str, ...], float] = {}
        for k1, v1 in self.terms.items():
            for k2, v2 in as_dim(other).terms.items():
                k = tuple(sorted(k1 + k2))
                terms[k] = terms.get(k, 0) + v1 * v2
        return Dim(terms)

    def __sub__(self, other: Dim | float) -> Dim:
        return self + as_dim(other) * -1

    __radd__ = __add__
    __rmul__ = __mul__

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """Evaluate for sizes by symbol."""
        return int(sum(v * prod(sizes[s] for s in k) for k, v in self.terms.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __str__(self) -> str:
        words = []
        for k, v in self.terms.items():
            number = [f"{v:g}"] if v != 1 or not k else []
            words.append("*".join(number + list(k)))
        return " + ".join(words) or "0"

    __repr__ = __str__

    @property
    def symbols(self) -> set[str]:
        """The size symbols it contains."""
        return {s for k in self.terms for s in k}

    def solve(self, value: int, known: Mapping[str, int] = MappingProxyType({})) -> tuple[str, int] | None:
        """Return the one symbol that is not known in a multiple plus a number, and its size at `value`, or None."""
        terms = {k: v for k, v in self.terms.items() if k}
        if len(terms) != 1:
            return None
        value -= int(self.terms.get((), 0))
        ((symbols, factor),) = terms.items()
        left = [s for s in symbols if s not in known]
        factor *= prod(known[s] for s in symbols if s in known)
        if len(left) != 1 or not factor or value % factor or value < 0:
            return None
        return left[0], int(value // factor)


def as_dim(x: Dim | float) -> Dim:
    """Turn a number into a constant Dim."""
    return x if isinstance(x, Dim) else Dim({(): x})


ONE = as_dim(1)


def symbols(names: str) -> list[Dim]:
    """Declare size symbols, as in ``B, T = symbols("B T")``."""
    return [Dim({(n,): 1}) for n in names.split()]


B, T, C, OC, NH, V = symbols("B T C OC NH V")
maxT, BT, N = symbols("maxT BT N")
S, HS, NKV = symbols("S HS NKV")
"""Symbols for the positions of a cache, the channels of a head, and the heads of keys and values."""
G, P, R = symbols("G P R")
"""Symbols for the groups of channels in a row, the pairs of channels in a head, and the rank of an adapter."""
MERGES = {"BT", "N"}
"""Symbols that stand for all leading axes of a value together: a (B, T, C) value is passed as (BT, C), or as (N,)."""


@dataclass(frozen=True)
class Arg:
    """One argument of an op.

    Parameters
    ----------
    name : its name in kernels and references.
    kind : ``out`` is overwritten; ``acc`` is a gradient, added to or overwritten as the call says; ``state`` is updated
        in place; ``in`` is read; ``index`` holds integers that have no adjoint; ``scalar`` is one number.
    shape : of the array, in size symbols.
    optional : whether it may be absent; a kernel then gets an array of length zero.
    reduces : the number of terms in the sum of each element, which sets the tolerance of its check.
    below : for an index, the size that its elements stay below.
    ignored : for an index, the scalar argument that an element may equal instead.
    rising : for an index, whether an element names a place in its row that is at or before its own, and none is less
        than the one before it.
    types : the types that its elements may have, by NumPy's names; the first is the usual one, and that of an ``out``.
        Every kernel of the op takes each of them.
    operand : of an array that is read and has several types, whether it should have the narrow one, as in a product;
        else it has that only where a value is stored in no other.
    negative : whether an element may be below zero.
    needed : for a gradient, False if kernels may do without it when what it is of is frozen. Such a kernel says so
        where it registers (``skips``); others get an array that nobody reads.
    start : the value of every element before a first step, if a model has one; the checks try it.
    fan_in : for a weight, the number of terms in a sum that its elements take part in. Where checks need the numbers of
        a model, they have a standard deviation of 1 / sqrt(fan_in).
    shown : whether a program's text names it if it is absent, or a number that is 0.
    drawn : for a state, whether a store in bfloat16 is rounded at random, as ``rounding.py`` says.
    copies : for what has a state's numbers in a narrower type, that state; if the state is narrow, it is absent.
    low, high, usual : for a scalar, the ends of its range, from which the checks draw it, and the value that most calls
        have. A range may end at a size.
    """

    name: str
    kind: Kind
    shape: tuple[Dim, ...] = ()
    optional: bool = False
    reduces: Dim = ONE
    below: Dim | None = None
    ignored: str = ""
    rising: bool = False
    types: Types = FLOAT32
    operand: bool = True
    negative: bool = True
    needed: bool = True
    start: float | None = None
    fan_in: Dim | None = None
    shown: bool = True
    drawn: bool = False
    copies: str = ""
    low: float = 0.0
    high: float | Dim = 0.0
    usual: float = 0.0

    @property
    def dtype(self) -> str:
        """The usual type."""
        return self.types[0]


def _sizes(name: str, sizes: Sequence[Dim | int]) -> tuple[Dim, ...]:
    """Return sizes as polynomials; refuse what is none."""
    for size in sizes:
        if not (isinstance(size, Dim) or (isinstance(size, Integral) and size > 0 and size is not True)):
            raise UserError(
                f"'{name}' has the size {size!r}; expected a whole number above 0, or a symbol such as N, from "
                "cpuopt.ops.declaration or made by symbols"
            )
    return tuple(s if isinstance(s, Dim) else as_dim(int(s)) for s in sizes)


def out(name: str, *shape: Dim | int, reduces: Dim | int = 1, optional: bool = False, types: Types = FLOAT32) -> Arg:
    """Declare an array that the op overwrites."""
    return Arg(name, "out", _sizes(name, shape), optional, as_dim(reduces), types=types)


def acc(
    name: str,
    *shape: Dim | int,
    reduces: Dim | int = 1,
    optional: bool = False,
    types: Types = FLOAT32,
    needed: bool = True,
) -> Arg:
    """Declare a gradient: added to where its ``_add`` flag is set, else overwritten."""
    return Arg(name, "acc", _sizes(name, shape), optional, as_dim(reduces), types=types, needed=needed)


def state(name: str, *shape: Dim | int, reduces: Dim | int = 1, optional: bool = False, types: Types = FLOAT32) -> Arg:
    """Declare an array that the op updates in place."""
    return Arg(name, "state", _sizes(name, shape), optional, as_dim(reduces), types=types)


def inp(
    name: str,
    *shape: Dim | int,
    optional: bool = False,
    types: Types = FLOAT32,
    operand: bool = True,
    start: float | None = None,
    fan_in: Dim | None = None,
) -> Arg:
    """Declare an array that the op reads."""
    dims = _sizes(name, shape)
    return Arg(name, "in", dims, optional, types=types, operand=operand, start=start, fan_in=fan_in)


def index(
    name: str,
    *shape: Dim | int,
    below: Dim | int,
    ignored: str = "",
    optional: bool = False,
    rising: bool = False,
    shown: bool = True,
) -> Arg:
    """Declare an int32 array of indices below `below`, or equal to the scalar argument `ignored`."""
    dims, (end,), types = _sizes(name, shape), _sizes(name, (below,)), ("int32",)
    return Arg(name, "index", dims, optional, below=end, ignored=ignored, rising=rising, types=types, shown=shown)


def scalar(
    name: str,
    integer: bool = False,
    *,
    low: float | None = None,
    high: float | Dim | None = None,
    usual: float = 0.0,
    shown: bool = True,
) -> Arg:
    """Declare one number, float64 or int64.

    Parameters
    ----------
    low, high : the ends of its range, from which the checks draw it; by default 0.25 and 0.75, of an integer 1 and 3.
    usual : the value that most calls have; the checks use it too.
    """
    if low is None or high is None:
        low, high, usual = (1, 3, 2) if integer else (0.25, 0.75, 0.5)
    dtype = "int64" if integer else "float64"
    return Arg(name, "scalar", types=(dtype,), low=low, high=high, usual=usual, shown=shown)


EPS = scalar("eps", low=1e-4, high=0.1, usual=1e-5)
IGNORE_INDEX = scalar("ignore_index", integer=True, low=-1000, high=-1, usual=-100)


_moved: ContextVar[Callable[[Any], Any]] = ContextVar("moved", default=lambda x: x)


def rounded(x: Any) -> Any:
    """Mark a number inside a reference that kernels store before a difference cancels its leading digits.

    As 1 - p of a probability close to 1. The judge moves it as it moves the inputs, so that the scale of the result
    contains its rounding.
    """
    return _moved.get()(x)


_read: ContextVar[Callable[[Any], Any]] = ContextVar("read", default=lambda x: x)


def operand(x: Any) -> Any:
    """Mark a number inside a reference that a product reads: kernels of a narrower type round it to that type.

    The judge moves it apart from all others, so that the result may differ by as much as such a rounding explains.
    """
    return _read.get()(x)


_spared: ContextVar[Callable[[Any, Any], Any]] = ContextVar("spared", default=lambda x, hidden: x)


def spared(x: Any, hidden: Any) -> Any:
    """Mark numbers inside a reference that a kernel may leave out where a mask hides them, because they count as zero.

    Zero times NaN is NaN, so only a kernel that computes them has it from there. The judge takes both.
    """
    return _spared.get()(x, hidden)


@contextmanager
def sparing(how: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Apply a function to all numbers that references mark as `spared`, and to what hides them."""
    token = _spared.set(how)
    try:
        yield
    finally:
        _spared.reset(token)


@contextmanager
def moving(how: Callable[[Any], Any], operands: bool = False) -> Iterator[None]:
    """Apply a function to all numbers that references mark as rounded, or to those that they mark as operands."""
    mark = _read if operands else _moved
    token = mark.set(how)
    try:
        yield
    finally:
        mark.reset(token)


@dataclass(frozen=True)
class Updates:
    """How an op that makes gradients of parameters can apply an optimizer's step in their place.

    For each optimizer, `updated` derives an op from it.

    Parameters
    ----------
    name : the first words of the derived ops' names.
    gradients : those gradients, that of a weight first. The weight decay of other parameters is a number of its own.
    rows : the index that names the rows of the gradient that are not zero, if the op is a lookup. What is derived from
        it finishes the rows that another op has put aside.
    aside : the argument like which those rows are, one for each element of the index, if the op can put rows aside.
    fits : whether a call of some sizes can be replaced.
    """

    name: str
    gradients: tuple[str, ...]
    rows: str = ""
    aside: str = ""
    fits: Callable[[Mapping[str, int]], bool] = lambda sizes: True

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters."""
        return [name[1:] for name in self.gradients]


class Op:
    """The declaration of one op.

    Parameters
    ----------
    name : ``layernorm_forward``.
    args : the arguments in call order, written ones first.
    label : the row of the profile that it is counted in.
    flops : floating-point operations of one call that the mathematics needs, in size symbols.
    without : those of them that an argument saves if it is absent, by its name; or that a number saves if it is above
        0 and below the end of its range, with the number's name as a symbol.
    asked : if `flops` depend on the data of a call and are the most that they can be: function of the arguments that it
        names, as a kernel gets them, that returns the share of them that the data ask for.
    fixed : those of `flops` that do not depend on the data.
    reference : float64 NumPy function of the arguments it names; returns a dict of the written arrays by name.
    source : the paper, equation or function that it follows.
    inverts : for a backward op, the forward op whose adjoints it computes.
    moves : elements of an argument that are read or written, if fewer than its shape suggests. A number of
        `without` may be a symbol of it, and is the end of its range if a call has none.
    role : its part in a model; a backward op has that of the op that it inverts.
    fuses : for a fused op, the ops that it stands for, in the order of their calls.
    renames : for a fused op, its names of the last part's arguments, if they differ.
    unfit : kinds of inputs, named as in the checks, for which it need not be right, each with the reason.
    inputs : function from random inputs by name to those in its domain, for the checks; None if any number will do.
    updates : for an op that makes gradients of parameters, how it can apply an optimizer's step in their place.
    """

    def __init__(
        self,
        name: str,
        *args: Arg,
        label: str,
        flops: Dim,
        reference: Callable[..., Mapping[str, Any]],
        source: str,
        inverts: Op | None = None,
        moves: Mapping[str, Dim] | None = None,
        without: Mapping[str, Dim] | None = None,
        role: Role | None = None,
        fuses: tuple[Op, ...] = (),
        renames: Mapping[str, str] | None = None,
        unfit: Mapping[str, str] | None = None,
        inputs: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        updates: Updates | None = None,
        asked: Callable[..., float] | None = None,
        fixed: Dim | int = 0,
    ) -> None:
        self.name, self.args, self.label, self.flops = name, args, label, flops
        self.reference, self.source, self.inverts, self.moves = reference, source, inverts, dict(moves or {})
        self.fuses, self.renames, self.unfit = fuses, dict(renames or {}), dict(unfit or {})
        self.role: Role | None = role or (inverts.role if inverts else None)
        self.inputs, self.without, self.updates = inputs, dict(without or {}), updates
        self.asked, self.fixed = asked, as_dim(fixed)
        self.backwards: list[Op] = []
        self.fusions: list[Op] = []
        self.by_name = {a.name: a for a in args}
        if inverts:
            inverts.backwards.append(self)
        if fuses:
            fuses[0].fusions.append(self)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.params)})"

    @property
    def params(self) -> list[str]:
        """A kernel's parameters: the arguments, each gradient followed by its flag ``<name>_add``."""
        return [p for a in self.args for p in ([a.name, f"{a.name}_add"] if a.kind == "acc" else [a.name])]

    @property
    def arrays(self) -> list[Arg]:
        """The arguments that are arrays."""
        return [a for a in self.args if a.kind != "scalar"]

    @property
    def written(self) -> list[Arg]:
        """The arguments that a call writes."""
        return [a for a in self.args if a.kind in ("out", "acc", "state")]

    @cached_property
    def symbols(self) -> list[str]:
        """The size symbols of its shapes and of its FLOPs, in the order of their first use."""
        dims = [*(d for a in self.arrays for d in a.shape), self.flops]
        return list(dict.fromkeys(s for d in dims for k in d.terms for s in k))

    @property
    def operand(self) -> str:
        """The first array that it reads."""
        return next(a.name for a in self.args if a.kind == "in")

    def bind(self, shapes: Mapping[str, Shape | None], **given: int) -> dict[str, int]:
        """Find the size of each symbol from the shapes of arguments (None: absent), and check that they agree.

        Parameters
        ----------
        given : sizes that the shapes need not fix.

        Raises
        ------
        UserError
            If an argument's shape disagrees with its declaration or with another argument.
        """
        sizes: dict[str, int] = {}
        fixed_by = dict.fromkeys(given, "the call")
        args = [a for a in self.arrays if shapes.get(a.name) is not None]
        for others in ({}, sizes):  # first those that stand alone, then those in a product with them
            for arg in args:
                shape = merge(arg, shapes[arg.name] or ())
                for dim, n in zip(arg.shape, shape, strict=len(shape) == len(arg.shape)):
                    solved = dim.solve(n, others)
                    if solved and solved[0] not in sizes:
                        sizes[solved[0]] = given.get(*solved)
                        fixed_by.setdefault(solved[0], f"'{arg.name}'")
            sizes |= given
        for arg in args:
            shape = merge(arg, shapes[arg.name] or ())
            known = all(d.symbols <= sizes.keys() for d in arg.shape)
            want = tuple(d(sizes) for d in arg.shape) if known else None
            if shape != want:
                because = [
                    f"{fixed_by[s]} fixes {s} = {sizes[s]}" for d in arg.shape for s in sorted(d.symbols & sizes.keys())
                ]
                because = [b for b in dict.fromkeys(because) if not b.startswith(f"'{arg.name}'")]
                raise UserError(
                    f"{self.name}: argument '{arg.name}' has shape {shapes[arg.name]}; expected "
                    f"({', '.join(map(str, arg.shape))}){f' = {want}' if want else ''}"
                    + (f", because {' and '.join(because)}" if because else "")
                )
        return sizes

    def stands_for(self, parts: Sequence[Op]) -> bool:
        """Return whether it stands for some ops: all that it fuses, but for those whose gradients are not needed."""

        def may_lack(part: Op) -> bool:
            ours = [self.by_name[a.name] for a in part.args if a.kind == "acc" and a.name in self.by_name]
            return bool(ours) and not any(a.needed for a in ours)

        return [*parts] == [op for op in self.fuses if op in parts or not may_lack(op)]

    @cached_property
    def counted(self) -> list[str]:
        """The numbers that a call's work depends on."""
        return [name for name in self.without if self.by_name[name].kind == "scalar"]

    def _numbered(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return sizes with the numbers in `counted`, of which 0 stands for the end of its range."""
        ends = {n: as_dim(self.by_name[n].high)(sizes) for n in self.counted}
        return {**sizes, **{n: min(sizes.get(n) or end, end) for n, end in ends.items()}}

    def work(self, sizes: Mapping[str, int], absent: Collection[str] = ()) -> int:
        """Count the floating-point operations of a call.

        Parameters
        ----------
        sizes : those of all symbols, and the numbers in `counted` that are not 0.
        """
        known = self._numbered(sizes)
        saved = [x for name, x in self.without.items() if name in absent or name in self.counted]
        return self.flops(known) - sum(x(known) for x in saved)

    def operands(self, types: Mapping[str, str]) -> str:
        """Return the storage type of what a call's products multiply: int8 or bfloat16 if it reads an operand of it.

        Parameters
        ----------
        types : the types of the arguments that do not have their usual one.
        """
        read = {types.get(a.name, a.dtype) for a in self.arrays if a.kind == "in" and a.operand}
        return next((t for t in ("int8", "bfloat16") if t in read), WIDE)

    def bytes(
        self,
        sizes: Mapping[str, int],
        adds: Mapping[str, bool],
        absent: Collection[str] = (),
        types: Mapping[str, str] | None = None,
    ) -> int:
        """Count the bytes that one call must move: each array once, twice if it is read and written.

        Parameters
        ----------
        sizes : as those of `work`.
        types : the types of the arguments that do not have their usual one.
        """
        types, known = types or {}, self._numbered(sizes)

        def moved(a: Arg) -> int:
            itemsize = TYPES[types.get(a.name, a.dtype)].bytes
            if a.name in self.moves:
                return self.moves[a.name](known) * itemsize
            twice = a.kind == "state" or (a.kind == "acc" and adds.get(a.name, False))
            return prod(d(sizes) for d in a.shape) * itemsize * (2 if twice else 1)

        return sum(moved(a) for a in self.arrays if a.name not in absent)


def merge(arg: Arg, shape: Shape) -> Shape:
    """Merge the leading axes of a value's shape if the declaration has one symbol for them all."""
    surplus = len(shape) - len(arg.shape)
    if surplus > 0 and arg.shape and arg.shape[0].symbols & MERGES:
        return (prod(shape[: surplus + 1]), *shape[surplus + 1 :])
    return shape
