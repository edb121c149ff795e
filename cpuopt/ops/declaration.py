"""What a declaration of an op is: its arguments, their roles and shapes, its cost, its reference.

An op is declared once, in ``cpuopt/ops/``. The registry, the tracer, reverse mode, the arena, the profiler and the
checks read the declaration; none of them knows an op by name. This module needs neither NumPy nor numba.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from ..errors import UserError

Role = Literal["out", "acc", "state", "in", "index", "scalar"]
Shape = tuple[int, ...]


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

    def solve(self, value: int) -> tuple[str, int] | None:
        """For a multiple of one symbol, that symbol and the size that gives `value`; None where there is no such."""
        if len(self.terms) != 1:
            return None
        ((symbols, factor),) = self.terms.items()
        if len(symbols) != 1 or value % factor:
            return None
        return symbols[0], int(value // factor)


def as_dim(x: Dim | float) -> Dim:
    """Turn a number into a constant Dim."""
    return x if isinstance(x, Dim) else Dim({(): x})


ONE = as_dim(1)


def symbols(names: str) -> list[Dim]:
    """Declare size symbols, as in ``B, T = symbols("B T")``."""
    return [Dim({(n,): 1}) for n in names.split()]


B, T, C, OC, NH, V = symbols("B T C OC NH V")
maxT, BT, N = symbols("maxT BT N")
S, HS = symbols("S HS")
"""Positions that a cache has room for; channels of a head."""
MERGES = {"BT", "N"}
"""Symbols that stand for all leading axes of a value together: a (B, T, C) value is passed as (BT, C), or as (N,)."""


@dataclass(frozen=True)
class Arg:
    """One argument of an op.

    Parameters
    ----------
    name : as kernels and references call it.
    role : ``out`` is overwritten; ``acc`` is a gradient, added to or overwritten as the call says; ``state`` is updated
        in place; ``in`` is read; ``index`` holds int32 that have no adjoint; ``scalar`` is one float64 or int64.
    shape : of the array, in size symbols.
    optional : may be absent; a kernel then gets an array of length zero.
    reduces : how many terms each element sums, which sets the tolerance of its check.
    below : for an index, the size that its elements stay below.
    ignored : for an index, the scalar argument that an element may equal instead.
    integer : for a scalar, whether it is an int64.
    negative : whether an element may be below zero.
    """

    name: str
    role: Role
    shape: tuple[Dim, ...] = ()
    optional: bool = False
    reduces: Dim = ONE
    below: Dim | None = None
    ignored: str = ""
    integer: bool = False
    negative: bool = True

    @property
    def dtype(self) -> str:
        """NumPy's name of the type a kernel is given."""
        if self.role == "scalar":
            return "int64" if self.integer else "float64"
        return "int32" if self.role == "index" else "float32"


def out(name: str, *shape: Dim | int, reduces: Dim | int = 1, optional: bool = False) -> Arg:
    """Declare an array that the op overwrites."""
    return Arg(name, "out", tuple(map(as_dim, shape)), optional, as_dim(reduces))


def acc(name: str, *shape: Dim | int, reduces: Dim | int = 1, optional: bool = False) -> Arg:
    """Declare a gradient: added to where its ``_add`` flag is set, else overwritten."""
    return Arg(name, "acc", tuple(map(as_dim, shape)), optional, as_dim(reduces))


def state(name: str, *shape: Dim | int, reduces: Dim | int = 1, optional: bool = False) -> Arg:
    """Declare an array that the op updates in place."""
    return Arg(name, "state", tuple(map(as_dim, shape)), optional, as_dim(reduces))


def inp(name: str, *shape: Dim | int, optional: bool = False) -> Arg:
    """Declare a float32 array that the op reads."""
    return Arg(name, "in", tuple(map(as_dim, shape)), optional)


def index(name: str, *shape: Dim | int, below: Dim, ignored: str = "", optional: bool = False) -> Arg:
    """Declare an int32 array of indices below `below`, or equal to the scalar argument `ignored`."""
    return Arg(name, "index", tuple(map(as_dim, shape)), optional, below=below, ignored=ignored)


def scalar(name: str, integer: bool = False) -> Arg:
    """Declare one number."""
    return Arg(name, "scalar", integer=integer)


class Op:
    """The declaration of one op.

    Parameters
    ----------
    name : ``layernorm_forward``.
    args : in call order, what is written first.
    label : the row of the profile that it is counted in.
    flops : floating-point operations of one call, in size symbols; what the mathematics needs, whatever a variant does.
    reference : float64 NumPy function of the arguments it names; returns a dict of what is written, by name.
    source : paper, equation or function that it follows.
    inverts : for a backward op, the forward op whose adjoints it gives.
    nbytes : bytes moved at the least, where roles and shapes mislead.
    fuses : for a fused op, the ops that it stands for.
    unfit : kinds of inputs, as checks call them, that it does not promise to be right for, each with the reason.
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
        nbytes: Dim | None = None,
        fuses: tuple[Op, ...] = (),
        unfit: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.args, self.label, self.flops = name, args, label, flops
        self.reference, self.source, self.inverts, self.nbytes = reference, source, inverts, nbytes
        self.fuses, self.unfit = fuses, dict(unfit or {})
        self.backwards: list[Op] = []
        self.by_name = {a.name: a for a in args}
        if inverts:
            inverts.backwards.append(self)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.params)})"

    @property
    def params(self) -> list[str]:
        """A kernel's parameters: the arguments, each gradient followed by its flag ``<name>_add``."""
        return [p for a in self.args for p in ([a.name, f"{a.name}_add"] if a.role == "acc" else [a.name])]

    @property
    def arrays(self) -> list[Arg]:
        """The arguments that are arrays."""
        return [a for a in self.args if a.role != "scalar"]

    @property
    def written(self) -> list[Arg]:
        """The arguments that a call writes."""
        return [a for a in self.args if a.role in ("out", "acc", "state")]

    def bind(self, shapes: Mapping[str, Shape | None], **given: int) -> dict[str, int]:
        """Find the size of each symbol from the shapes of arguments (None: absent), and check that they agree.

        Raises
        ------
        UserError
            Where an argument's shape disagrees with its declaration or with another argument.
        """
        sizes = dict(given)
        fixed_by = dict.fromkeys(given, "the call")
        args = [a for a in self.arrays if shapes.get(a.name) is not None]
        for arg in args:
            shape = merge(arg, shapes[arg.name] or ())
            for dim, n in zip(arg.shape, shape, strict=len(shape) == len(arg.shape)):
                solved = dim.solve(n)
                if solved and solved[0] not in sizes:
                    sizes[solved[0]], fixed_by[solved[0]] = solved[1], f"'{arg.name}'"
        for arg in args:
            shape = merge(arg, shapes[arg.name] or ())
            known = all(d.symbols <= sizes.keys() for d in arg.shape)
            want = tuple(d(sizes) for d in arg.shape) if known else None
            if shape != want:
                because = [f"{fixed_by[s]} fixes {s} = {sizes[s]}" for d in arg.shape for s in d.symbols if s in sizes]
                because = [b for b in dict.fromkeys(because) if not b.startswith(f"'{arg.name}'")]
                raise UserError(
                    f"{self.name}: argument '{arg.name}' has shape {shapes[arg.name]}; expected "
                    f"({', '.join(map(str, arg.shape))}){f' = {want}' if want else ''}"
                    + (f", because {' and '.join(because)}" if because else "")
                )
        return sizes

    def bytes(self, sizes: Mapping[str, int], adds: Mapping[str, bool], absent: set[str] | None = None) -> int:
        """Count the bytes that one call must move: each array once, twice where it is read and written."""
        if self.nbytes is not None:
            return self.nbytes(sizes)
        total = 0
        for a in self.arrays:
            if a.name not in (absent or set()):
                twice = a.role == "state" or (a.role == "acc" and adds.get(a.name, False))
                total += 4 * prod(d(sizes) for d in a.shape) * (2 if twice else 1)
        return total


def merge(arg: Arg, shape: Shape) -> Shape:
    """Merge the leading axes of a value's shape where the declaration has one symbol for them all."""
    surplus = len(shape) - len(arg.shape)
    if surplus > 0 and arg.shape and arg.shape[0].symbols & MERGES:
        return (prod(shape[: surplus + 1]), *shape[surplus + 1 :])
    return shape
