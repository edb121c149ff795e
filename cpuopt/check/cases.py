"""Test cases of kernels: awkward sizes, random arguments, and the results of the float64 reference."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as once
from inspect import signature
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import UserError
from ..ops.declaration import Arg, Op
from ..ops.storage import is_float, storage
from ..program.program import Call
from ..wording import text_of
from .fit import beyond, drawn, scaled_as
from .scalars import A_CLASS, START, Numbers, numbers

Array = np.ndarray[Any, Any]
Arguments = dict[str, Any]
"""Arguments by name: an array (of NaN if the op only writes), a number, or None if absent."""


@dataclass(frozen=True)
class Case:
    """A call of a kernel on which it is judged or timed.

    Parameters
    ----------
    sizes : the sizes of all symbols in the op's shapes, by symbol; and numbers of a call that it should have.
    kind : the kind of the inputs: a name in `KINDS`; in `ADJOINTS` for a backward; in `IGNORING` for an op with
        ``ignore_index``; `REPEATS` for an op with indices; or `START`.
    absent : optional arguments that are not given.
    types : the types of the arguments that do not have their usual one.
    adds : the ``_add`` flags of the gradients; None for each mixture of `modes` in turn.
    layers : the layers of a model with this call, each once.
    sized : whether it is judged at its size, by the op's formula in float32, and not by the float64 reference.
    """

    sizes: Mapping[str, int]
    kind: str = "normal"
    absent: frozenset[str] = frozenset()
    types: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, bool] | None = None
    layers: tuple[str, ...] = ()
    sized: bool = False

    @staticmethod
    def of(call: Call) -> Case:
        """Return a program's call."""
        return Case(call.counted, "normal", frozenset(call.absent), call.types, dict(call.adds), (call.layer,), True)

    def plain(self) -> Case:
        """Return the case that stands for all flags, by the float64 reference."""
        return replace(self, adds=None, layers=(), sized=False)

    def __str__(self) -> str:
        words = [text_of(self.sizes)]
        words += [f"{name} {dtype}" for name, dtype in self.types.items()]
        words += [f"no {name}" for name in sorted(self.absent)] + [self.kind] * (self.kind != "normal")
        return ", ".join(words + [f"{n}_add" for n, on in (self.adds or {}).items() if on])


def calls_alike(calls: Iterable[Call]) -> list[Case]:
    """List the distinct calls of an op in a program, each with the layers that make it."""
    found: dict[str, Case] = {}
    for c in calls:
        one = Case.of(c)
        before = found.get(str(one))
        found[str(one)] = replace(one, layers=(*before.layers, c.layer)) if before else one
    return list(found.values())


KINDS: dict[str, Callable[[Array], Array]] = {
    "normal": lambda x: x,
    "large": lambda x: 30 * x,  # saturates tanh, peaks softmax; exp overflows unless the maximum is taken off
    "offset": lambda x: x + 100,  # a mean far above the deviation: E[x^2] - E[x]^2 loses the variance
    "tiny": lambda x: x * 1e-6,  # an epsilon of the formula, far below other numbers, decides
    "constant": lambda x: np.full_like(x, 2),  # no variance at all; state starts from zero
    "zeros": lambda x: np.where(x > 0.5, x, np.copysign(0.0, x)),  # of both signs, between others
    "symmetric": lambda x: _mirrored(x, 1),
    "thousands": lambda x: np.copysign(np.minimum(1e3 * (1 + 3 * np.abs(x)), 1e4), x),
    "outliers": lambda x: x * np.where(np.arange(x.size).reshape(x.shape) % 97 == 70, 100, 1),  # few, and late
    "nan": lambda x: x,
    "infinity": lambda x: x,
}
"""Functions from standard normal numbers to an op's inputs, by kind; adjoints stay normal."""
ADJOINTS: dict[str, Callable[[Array], Array]] = {
    "small adjoints": lambda x: x * 1e-6,  # as of a mean over many tokens
    "equal adjoints": lambda x: np.full_like(x, 0.5),  # as of a sum
    "symmetric adjoints": lambda x: _mirrored(x, 1),
    "adjoints of sum 0": lambda x: _mirrored(x, -1),
}
"""Functions from standard normal numbers to a backward's adjoints, by kind; its other inputs are normal then."""
NOT_FINITE = {"nan": np.nan, "infinity": np.inf}
"""Values put into one element of every array that is read; each must come out wherever the reference has it."""
PLANTED = {**NOT_FINITE, "three": 3.0}
"""By the kind of a case; the last is the result without it."""
IGNORING: dict[str, Callable[[int], Array]] = {
    "one counts": lambda n: np.arange(n) != n // 2,
    "none counts": lambda n: np.ones(n, bool),
    "all count": lambda n: np.zeros(n, bool),
}
"""Functions that choose which of n indices are ``ignore_index``, a quarter by default; in `A_CLASS` it is an id."""
REPEATS = "repeats"
"""The kind of a case in which almost all indices are the same."""

SMALL = {"B": 2, "T": 5, "C": 9, "NH": 3, "OC": 7, "V": 11, "G": 2}
ODD = {"B": 3, "T": 13, "C": 35, "NH": 5, "OC": 17, "V": 29, "NKV": 5}
ONE_ROW = {"B": 1, "T": 1, "C": 66, "NH": 2, "OC": 37, "V": 19, "maxT": 1}
MORE = {"B": 1, "T": 65, "C": 48, "NH": 3, "OC": 33, "V": 130}
"""One more than whole tiles."""
BLOCKS = {"B": 1, "T": 130, "C": 520, "NH": 8, "OC": 300, "V": 1000, "NKV": 2}
"""More than one cache block."""
BELOW = {"B": 1, "T": 1, "C": 4095, "NH": 63, "OC": 31, "V": 33}
ABOVE = {"B": 1, "T": 1, "C": 1025, "NH": 25, "OC": 65, "V": 63}
"""One less and one more than blocks of any power of 2, of which there are several."""
MANY = {"B": 3, "T": 100, "C": 24, "NH": 2, "OC": 20, "V": 40, "G": 3}
"""More than one block of tokens."""
SIZES = [
    SMALL,
    ODD,
    ONE_ROW,
    {"B": 2, "T": 3, "C": 3, "NH": 3, "OC": 1, "V": 2},  # heads of one channel
    MORE,
    {"B": 2, "T": 64, "C": 64, "NH": 1, "OC": 128, "V": 256, "maxT": 64},  # whole tiles
    BLOCKS,
    BELOW,
    ABOVE,
    MANY,
]
WHOLE = {"B": 1, "T": 32, "C": 32, "NH": 1, "OC": 32, "V": 32, "maxT": 32}
HARD = (*NOT_FINITE, "large", "offset", "tiny", "thousands")
"""Sizes of whole vectors, and the kinds of values that are tried at them too: elsewhere such values have tails. Sums of
more than a few dozens of products of thousands are so large that exp of their perturbed differences is infinite."""
GROUPS = {"B": 2, "T": 6, "C": 24, "NH": 6, "OC": 10, "V": 12, "NKV": 2}
"""Two groups of three heads: with one group, or groups of one head, any rule finds a query head's key head."""
LONG = [sizes for sizes in SIZES if sizes["T"] >= 64]
"""Whole blocks of tokens, in which what a kernel does for a usual call may differ from that for a limited one."""
VOCABULARY = {"B": 1, "T": 3, "C": 8, "NH": 1, "OC": 50257, "V": 50257}
FEW = 1 << 19
"""Elements beyond which an array is drawn in float32, by the fastest generator. No array of `cases` has as many."""
INTERPRETED = 1 << 17
"""Turns of the loops of a reference in plain Python, which a case calls some 20 times; a turn takes microseconds."""
BOUND = {"NH", "HS", "NKV", "G", "P"}
"""Symbols whose sizes depend on others."""
PART = (1 << 21) - 9
"""Elements beyond which the saved inputs of a backward are computed in float32."""
USUAL_INT8 = 40
"""The deviation of int8, which then reach the ends of their range."""
SOME = 6
"""The size of a symbol that bounds an index and is in no shape."""
BEGINS = 1 / 16
"""The share of tokens at which an example begins, in rows of several."""
BEHIND = 3
"""The tokens that come before those of a call, in cases with room for more than it adds."""


def elements(op: Op, case: Case) -> int:
    """Count the elements of all arrays."""
    return sum(prod(d(case.sizes) for d in a.shape) for a in op.arrays if a.name not in case.absent)


def case(
    op: Op,
    sizes: Mapping[str, int],
    kind: str = "normal",
    absent: Iterable[str] = (),
    types: Mapping[str, str] | None = None,
) -> Case:
    """Make a case of an op from the sizes B, T, C, NH, OC and V; any other symbol is as large as C."""
    rows = sizes["B"] * sizes["T"]
    known = {
        "BT": rows,
        "N": rows * sizes["C"],
        "maxT": sizes["T"] + 2,
        "S": sizes["T"] + BEHIND,
        "HS": sizes["C"] // sizes["NH"],
        "NKV": 1,
        "G": 1,
        "P": max(1, sizes["C"] // sizes["NH"] // 2),
        "R": max(1, sizes["C"] // 8),
        **sizes,
    }
    types = types or {}
    absent = {*absent, *(a.name for a in op.arrays if a.copies in types)}
    types = {n: t for n, t in types.items() if n not in absent}
    found = {s: known.get(s, sizes["C"]) for s in op.symbols}
    return Case(affordable(found) if run_of(op) else found, kind, frozenset(absent), types)


def affordable(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of a case whose loops a reference in plain Python gets through in seconds, as odd as they are.

    Of half a size, one less than a power of 2 is one again.
    """
    while prod(sizes.values()) > INTERPRETED and not BOUND & set(sizes):
        largest = max(sizes, key=lambda s: sizes[s])
        sizes = sizes | {largest: sizes[largest] // 2 | sizes[largest] & 1}
    return sizes


def cases(op: Op, skips: Sequence[str] = ()) -> list[Case]:
    """List the awkward cases of an op: sizes, optional arguments, extreme inputs.

    Parameters
    ----------
    skips : the gradients that the kernel can do without.
    """
    kinds = [*KINDS, START, *(ADJOINTS if adjoints(op) else ())][1:]
    kinds += [*IGNORING, A_CLASS] * any(a.ignored for a in op.args)
    found = [case(op, sizes) for sizes in SIZES]
    found += [case(op, GROUPS)] * ("NKV" in op.symbols)
    found += [case(op, VOCABULARY)] * bool({"OC", "V"} & set(op.symbols))
    found += [case(op, sizes, REPEATS) for sizes in (MORE, MANY) if has_ids(op)]
    found += [case(op, sizes, START, absent=limits(op)) for sizes in LONG if limits(op)]
    found += [case(op, sizes, types=types) for types in other_types(op) for sizes in (SMALL, ODD)]
    found += [case(op, sizes, absent=gone) for gone in absences(op, skips) for sizes in (SMALL, ODD, ONE_ROW)]
    at = {"outliers": [BLOCKS]}  # in rows so long that a kernel may look at a part of one
    found += [case(op, WHOLE, k) for k in HARD if k not in op.unfit]
    return found + [case(op, sizes, k) for k in kinds if k not in op.unfit for sizes in at.get(k, (SMALL, ODD))]


def quick_cases(op: Op, types: Mapping[str, str] | None = None, skips: Sequence[str] = ()) -> list[Case]:
    """List the few cases that a kernel has to pass, for arguments of some types, before its speed is reported."""
    kinds = [(ODD, "normal"), (MORE, "normal"), (SMALL, "zeros"), (SMALL, "nan"), (SMALL, START)]
    kinds += [(GROUPS, "normal")] * ("NKV" in op.symbols)
    kinds += [(MORE, REPEATS)] * has_ids(op)
    kinds += [(ODD, "all count")] * any(a.ignored for a in op.args)
    kinds += [(SMALL, kind) for kind in (ADJOINTS if adjoints(op) else ("symmetric",))]
    kinds += [(WHOLE, "nan"), (WHOLE, "thousands")]
    found = [case(op, sizes, kind, types=types) for sizes, kind in kinds if kind not in op.unfit]
    found += [case(op, MORE, START, limits(op), types)] * bool(limits(op))
    absent = [[n for n in gone if n not in (types or {})] for gone in absences(op, skips)]
    return found + [case(op, SMALL, absent=gone, types=types) for gone in absent if gone]


def absences(op: Op, skips: Sequence[str]) -> list[list[str]]:
    """List the arguments that may be absent together: all that are optional, and each gradient that is skipped."""
    optional = [a.name for a in op.arrays if a.optional]
    return [optional] * bool(optional) + [[name] for name in skips]


def other_types(op: Op) -> list[dict[str, str]]:
    """List the types that arguments may have besides their usual ones.

    Each comes with all the arguments that take it, and with those alone that are read: a product of bfloat16 may write
    float32. Weights that are updated, and states of optimizers, are float32 beside bfloat16 too.
    """
    found = []
    for t in dict.fromkeys(t for a in op.arrays for t in a.types[1:]):
        takes = [a for a in op.arrays if t in a.types[1:]]
        read = [a for a in takes if a.kind not in ("out", "acc")]
        drawn = [a for a in takes if a.drawn]
        weights = [a for a in drawn if any(a.name == copy.copies for copy in takes)]
        others = [a for a in drawn if a not in weights]
        some = [takes, *([a for a in takes if a not in wide] for wide in (weights, others, drawn))]
        found += [{a.name: t for a in of} for of in (*some, *([] if drawn else [read])) if of]
    return [types for i, types in enumerate(found) if types not in found[:i]]


def modes(op: Op) -> list[dict[str, bool]]:
    """List the values of the ``_add`` flags to try: none, all, and each one alone, so that no two are always equal."""
    names = [a.name for a in op.args if a.kind == "acc"]
    alone = [{n: n == name for n in names} for name in names] if len(names) > 1 else []
    return [dict.fromkeys(names, False), *([dict.fromkeys(names, True)] if names else []), *alone]


def adjoints(op: Op) -> list[str]:
    """List the inputs of a backward that its forward does not have: the adjoints."""
    known = {a.name for a in op.inverts.args} if op.inverts else set()
    return [a.name for a in op.args if op.inverts and a.kind == "in" and a.name not in known]


def has_ids(op: Op) -> bool:
    """Return whether an op, or the forward that it inverts, reads ids, which any element may repeat."""
    return any(a.below is not None and not a.rising for of in (op, op.inverts) if of for a in of.args)


def limits(op: Op) -> list[str]:
    """List the arguments that limit what a token reads, and that most calls of models do not have."""
    return [a.name for a in op.args if a.rising]


def scalars(op: Op, case: Case, rng: np.random.Generator) -> Numbers:
    """Draw the numbers of a case, without changing what the generator draws next."""
    return numbers(op, case.sizes, case.kind, str(case.plain()), rng, elements(op, case) > FEW)


def arguments(
    op: Op,
    case: Case,
    rng: np.random.Generator,
    alter: Callable[[Array], Array] = lambda x: x,
    given_scalars: Numbers | None = None,
) -> Arguments:
    """Draw an op's arguments; the saved inputs of a backward op come from its forward's reference.

    Parameters
    ----------
    alter : function from each array that is drawn to the one to use.
    given_scalars : the numbers of the call and of the forward that it inverts; by default drawn too.

    Returns
    -------
    The arguments by name. Those of an op of one's own are a `Drawn`, scaled until float32 holds what its formula
    computes from them.
    """
    known = scalars(op, case, rng) if given_scalars is None else given_scalars

    def draw(scale: float) -> Arguments:
        def scaled(x: Array) -> Array:
            return alter(x) if x.dtype.kind == "i" else alter(x) * x.dtype.type(scale)

        return _arguments(op, case, rng, scaled, known)

    run = run_of(op)
    if run is None:
        return _arguments(op, case, rng, alter, known)
    return drawn(op.name, rng, lambda given: beyond(run, given), draw)


def _arguments(
    op: Op, case: Case, rng: np.random.Generator, alter: Callable[[Array], Array], known: Numbers
) -> Arguments:
    given: Arguments = {}
    if op.inverts:
        gone = {a.name for a in op.inverts.arrays if a.optional and {a.name, f"d{a.name}"} & case.absent}
        given = arguments(op.inverts, replace(case, absent=frozenset(gone)), rng, alter, known)
        if {a.name for a in op.args} & {a.name for a in op.inverts.written}:  # else nothing would change
            with np.errstate(invalid="ignore"):
                found = reference(op.inverts, given, np.float64 if _elements(given) <= PART else np.float32)
            types = {a.name: case.types.get(a.name, a.dtype) for a in op.inverts.args}
            given |= {n: x.astype(types[n]) for n, x in found.items()}
    if op.inputs:
        given = _in_domain(op, case, rng, alter, known)
    there = known | given
    made = {a.name: there[a.name] if a.name in there else _drawn(op, a, case, rng, alter, known) for a in op.args}
    return scaled_as(given, made)


def _in_domain(
    op: Op, case: Case, rng: np.random.Generator, alter: Callable[[Array], Array], known: Numbers
) -> Arguments:
    """Draw the inputs of an op that has a domain of its own.

    Raises
    ------
    UserError
        If its function returns others than the inputs that it was given, or other shapes.
    """
    assert op.inputs
    normal = replace(case, kind="normal")
    drawn = {a.name: _drawn(op, a, normal, rng, alter, known) for a in op.args if a.kind in ("in", "index")}
    drawn |= {a.name: known[a.name] for a in op.args if a.kind == "scalar"}
    moved = {n: np.asarray(x) for n, x in op.inputs(widened(drawn)).items()}
    for name, x in moved.items():
        if name not in drawn or x.shape != np.shape(drawn[name]):
            raise UserError(
                f"{op.name}: inputs= returned '{name}' of shape {x.shape}; expected some of "
                + ", ".join(f"'{n}' {np.shape(x)}" for n, x in drawn.items())
            )
    single = {n: type(x)(moved.get(n, x)) for n, x in drawn.items() if not isinstance(x, np.ndarray)}
    found = {n: moved.get(n, x).astype(x.dtype) for n, x in drawn.items() if n not in single}
    return single | {a.name: _planted(a, found[a.name], case) for a in op.args if a.name in found}


def altered(rng: np.random.Generator) -> Callable[[Array], Array]:
    """Return a function that changes some elements of an array, at least one, and keeps it in its domain."""

    def alter(x: Array) -> Array:
        some = (rng.random(x.size) < 1 / 16) | (np.arange(x.size) == rng.integers(max(x.size, 1)))
        other = np.roll(x, 1) if x.dtype.kind == "i" else (x / 2).astype(x.dtype)
        return np.where(some.reshape(x.shape), other, x)

    return alter


def _drawn(
    op: Op, arg: Arg, case: Case, rng: np.random.Generator, alter: Callable[[Array], Array], known: Numbers
) -> Any:
    x = _draw(op, arg, case, rng, known)
    if isinstance(x, np.ndarray) and arg.kind in ("in", "index", "state"):
        x = alter(_planted(arg, x, case))
    return risen(x) if arg.rising and x is not None else x


def risen(x: Array) -> Array:
    """Return the nearest places in rows (B, T) that are at or before their own, and none less than the one before."""
    return np.minimum(np.maximum.accumulate(x, axis=-1), np.arange(x.shape[-1], dtype=x.dtype))


def _planted(arg: Arg, x: Array, case: Case) -> Array:
    """Return an input with the number that the kind of the case puts into one of its elements."""
    if case.kind in PLANTED and is_float(x):
        x = x.copy()
        x.flat[zlib.crc32(arg.name.encode()) % x.size] = PLANTED[case.kind]  # another place in each array
    return x


def _draw(op: Op, arg: Arg, case: Case, rng: np.random.Generator, known: Numbers) -> Any:
    if arg.name in case.absent:
        return None
    shape, dtype = tuple(d(case.sizes) for d in arg.shape), case.types.get(arg.name, arg.dtype)
    if arg.below is not None:
        below = arg.below({**dict.fromkeys(arg.below.symbols, SOME), **case.sizes})
        if arg.rising:  # at each place, a new start or none
            return np.where(rng.random(shape) < BEGINS, np.arange(shape[-1], dtype=np.int32), np.int32(0))
        return _draw_ids(below, shape, case.kind, known.get(arg.ignored), rng)
    if arg.kind in ("out", "acc"):
        return np.full(shape, np.nan if storage(dtype).is_float else 0, dtype)
    x = normal(shape, rng)
    if case.kind in ADJOINTS and arg.name in adjoints(op):
        x = ADJOINTS[case.kind](x)
    elif not op.inverts:
        x = KINDS.get(case.kind, np.asarray)(x) * (arg.kind != "state" or case.kind != "constant")
    if case.kind == START and arg.start is not None:
        x = np.full_like(x, arg.start)
    if dtype == "int8":
        x = np.clip(np.rint(x * USUAL_INT8), -128, 127)
    return (x if arg.negative else np.square(x)).astype(dtype, copy=False)


def _mirrored(x: Array, sign: int) -> Array:
    """Return an array that is the same, or its negative, when the rows or the columns are reversed."""
    x = (x + sign * x[..., ::-1]) / np.sqrt(2)
    return np.asarray((x + x[::-1]) / np.sqrt(2) if x.ndim > 1 else x)


def normal(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Draw standard normal numbers, each by itself: a kernel may use whatever relates two rows of a large array."""
    if prod(shape) <= FEW:
        return rng.standard_normal(shape)
    return np.random.Generator(np.random.SFC64(rng.integers(1 << 62))).standard_normal(shape, np.float32)


def _elements(given: Arguments) -> int:
    return sum(x.size for x in given.values() if isinstance(x, np.ndarray))


def _draw_ids(below: int, shape: tuple[int, ...], kind: str, ignored: int | None, rng: np.random.Generator) -> Array:
    ids = rng.integers(0, below, shape, dtype=np.int32)
    if kind == REPEATS:
        ids[rng.random(shape) < 0.9] = below // 2
    ids.flat[0] = below - 1
    if ignored is not None:
        quarter = (rng.random(ids.size) < 0.25) & (np.arange(ids.size) > 0)
        ids[(IGNORING[kind](ids.size) if kind in IGNORING else quarter).reshape(shape)] = ignored
    return ids


def run_of(op: Op) -> Callable[..., dict[str, Array]] | None:
    """Return the reference of an op of one's own as a function of arguments and the type of all numbers, or None."""
    run = getattr(op.reference, "run", None)
    return run and (lambda given, dtype: run(widened(given, dtype), dtype=dtype))


def widened(given: Arguments, dtype: DTypeLike = np.float64) -> Arguments:
    """Convert the arrays of floats to another type."""
    floats = {n for n, x in given.items() if is_float(x)}
    return {n: x.astype(dtype, copy=False) if n in floats else x for n, x in given.items()}


def reference(op: Op, given: Arguments, dtype: DTypeLike = np.float64) -> dict[str, Array]:
    """Call an op's reference, in float64 by default; return its results by name, without absent ones."""
    wide = widened(given, dtype)
    found = op.reference(**{n: wide[n] for n in _parameters(op.reference)})
    return {n: np.asarray(x) for n, x in found.items() if given.get(n) is not None}


@once
def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(signature(function).parameters)
