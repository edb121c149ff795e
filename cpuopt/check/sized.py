"""Whether a kernel is right at the very size that it is timed or trained at.

`check` compares with a float64 reference on small awkward sizes. That cannot see a kernel that is wrong only where an
axis is long. A float64 reference of a model's largest calls takes seconds and gigabytes; so here the op's own NumPy
formula is computed in float32, or in float64 where the call writes that, which shares no code with the kernels, and
every element is compared. Both sides round, so the tolerance is twice that of `check`; the scale of an element is the
root mean square of its row, and no less than one unit of rounding of the array's. What is left to `check` is what this
cannot see: errors below that tolerance, and extreme inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod, sqrt
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..kernels.registry import Kernel
from ..kernels.toolkit import threads as numba_threads
from ..ops.declaration import Arg, Op
from .cases import Arguments, Array, Case, arguments, reference
from .check import (
    FILL,
    FLIP,
    GUARD,
    OUTSIDE,
    SCRATCH,
    BrokenKernelError,
    Result,
    bits,
    called,
    filled,
    keeping_threads,
    least,
    origin,
    pattern,
    prepare,
    rounding,
)

MOST = 1 << 27
"""Elements of a call up to which it is judged: the arrays, what they must become, and the formula's own take 16 bytes
each."""
TWICE = 1 << 24
"""Elements up to which a kernel is called a second time, on what it left behind."""
BLOCK = 1 << 20
"""Elements that are compared at one time."""


@dataclass(frozen=True)
class Sized:
    """What a program calls a kernel on: sizes, what is absent, and the flags of its gradients."""

    kernel: Kernel
    case: Case
    adds: Mapping[str, bool]

    @property
    def elements(self) -> int:
        """Of all arrays."""
        there = (a for a in self.kernel.op.arrays if a.name not in self.case.absent)
        return sum(prod(d(self.case.sizes) for d in a.shape) for a in there)

    def __str__(self) -> str:
        return f"{self.kernel.name}  {self.case}" + "".join(f", {n}_add" for n, on in self.adds.items() if on)


class Standard:
    """What a call must give, by the op's formula in float32 or in the finest type that it writes.

    Parameters
    ----------
    given : the arguments before the call; of a gradient that is added to, what it holds. They are not changed.
    """

    def __init__(self, op: Op, case: Case, given: Arguments, adds: Mapping[str, bool], threads: int = 1) -> None:
        self.op, self.case, self.adds = op, case, adds
        with threadpool_limits(threads, user_api="blas"), np.errstate(invalid="ignore", over="ignore"):
            finest = np.result_type(np.float32, *(given[a.name] for a in op.written if given[a.name] is not None))
            found = reference(op, given, finest)
        self.want = {n: np.asarray(x + given[n] if adds.get(n) else x, finest) for n, x in found.items()}

    def judge(self, name: str, got: Mapping[str, Array], then: str = "") -> Result:
        """Compare what a kernel gave with that, element by element; a result of its worst.

        Parameters
        ----------
        name : of the kernel.
        got : by name, what the call wrote.
        then : in which circumstances, for the reason.

        Raises
        ------
        BrokenKernelError
            For what no tolerance excuses: an element that is not written, or not finite where it must be.
        """
        worst = Result(name, self.case, 0.0)
        for a in self.op.written:
            if a.name in self.want:
                worst = max(worst, self._judge(name, a, got[a.name], then), key=lambda r: r.ratio)
        return worst

    def _judge(self, name: str, arg: Arg, got: Array, then: str) -> Result:
        want = self.want[arg.name]
        columns = want.shape[-1] if want.ndim else 1
        allowed, filling = 2 * rounding(got.dtype.name, arg.reduces(self.case.sizes)), pattern(FILL, got.itemsize)
        flat = want.reshape(-1)
        size = float(np.finfo(got.dtype).eps) * sqrt(float(np.vdot(flat, flat)) / max(flat.size, 1))
        lowest = max(size, least(got.dtype.name))  # in a row that is all but 0
        worst, place = -1.0, 0
        for some, mine, start in _blocks(want.reshape(-1, columns), got.reshape(-1, columns)):
            with np.errstate(invalid="ignore", over="ignore"):
                rms = np.sqrt(np.mean(np.square(some), axis=-1, keepdims=True))
                tolerance = np.abs(some)
                tolerance += np.fmax(rms, lowest)
                tolerance *= allowed
                ratio = np.abs(mine - some)
                ratio /= tolerance
            if not np.isfinite(ratio.max(initial=0)):
                same = np.isnan(mine) & np.isnan(some) & (bits(mine) != filling) | (mine == some)
                ratio[same] = 0
                ratio[np.isnan(ratio)] = inf
            at = int(ratio.argmax())
            if ratio.flat[at] > worst:
                worst, place = float(ratio.flat[at]), start + at
        index = tuple(map(int, np.unravel_index(place, want.shape)))
        where = arg.name, index, float(got[index]), float(want[index])
        flags = "".join(f", {n}_add={on}" for n, on in self.adds.items())
        text = f"{arg.name}{list(index)} = {where[2]:.9g}, expected {where[3]:.9g}{flags}{then}"
        if worst == inf:
            raise BrokenKernelError(text + origin(int(bits(got)[index] << 1 >> 1), got.itemsize), *where)
        return Result(name, self.case, worst, *where, text if worst > 1 else "")


def _blocks(want: Array, got: Array) -> Iterator[tuple[Array, Array, int]]:
    """Cut two matrices into rows that are compared at one time; a row that is too long is cut as well."""
    rows, columns = want.shape
    height, width = max(1, BLOCK // max(columns, 1)), BLOCK
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            yield want[i : i + height, j : j + width], got[i : i + height, j : j + width], i * columns + j


def check_sized(sized: Sized, threads: int, seed: int = 0) -> Result:
    """Judge a kernel at one size on some number of threads; what it does wrong is in the result.

    It is called with poison in what it writes and in scratch, and, where the arrays are not too large, once more in the
    same arrays on what it left behind there, with an element changed in each.
    """
    kernel, case, op = sized.kernel, sized.case, sized.kernel.op
    rng = np.random.default_rng(seed)
    given = arguments(op, case, rng)
    for a in op.args:
        if a.name == "weight" and len(a.shape) == 2:  # as in a model: logits of 1, not of 30, whose exp is no number
            given[a.name] *= np.float32(1 / sqrt(given[a.name].shape[1]))
        if sized.adds.get(a.name) and given[a.name] is not None:
            given[a.name] = arguments_like(given[a.name], rng)
    standard = Standard(op, case, given, sized.adds, threads)
    with keeping_threads() as most:
        n = min(threads, most)
        try:
            rooms = {a.name: Room(given[a.name], kernel.dtype(a), len(a.shape)) for a in op.arrays}
            fresh = [a.name for a in op.written if a.role != "state" and not sized.adds.get(a.name)]
            for name in fresh:
                bits(rooms[name].array)[...] = pattern(FILL, rooms[name].array.itemsize)
            work = {name: Room(filled(*spec, SCRATCH)) for name, spec in prepare(kernel, case.sizes).items()}
            args: list[Any] = []
            for a in op.args:
                args.append(given[a.name] if a.role == "scalar" else rooms[a.name].array)
                args += [sized.adds.get(a.name, False)] if a.role == "acc" else []
            args += [room.array for room in work.values()]
            read = {a.name: rooms[a.name].sum() for a in op.arrays if a.role in ("in", "index")}

            def call() -> None:
                numba_threads.set_threads(n)
                called(kernel, args, n)
                for name, room in {**rooms, **work}.items():
                    if not room.whole:
                        raise BrokenKernelError(f"wrote outside its arrays: around '{name}'", name)
                for name, total in read.items():
                    if rooms[name].sum() != total:
                        raise BrokenKernelError(f"changed '{name}', which it may only read", name)

            call()
            got = {a.name: rooms[a.name].array for a in op.written}
            result = standard.judge(kernel.name, got)
            if len(fresh) == len(op.written) and sized.elements <= TWICE:
                for name in fresh:
                    if (x := rooms[name].array).size:
                        bits(x).flat[rng.integers(x.size)] ^= FLIP[x.itemsize]
                call()
                again = standard.judge(kernel.name, got, ", in a second call on what the first left in its arrays")
                result = max(result, again, key=lambda r: r.ratio)
        except BrokenKernelError as e:
            return replace(Result(kernel.name, case, inf, *e.where), reason=str(e))
    return result


def arguments_like(x: Array, rng: np.random.Generator) -> Array:
    """Give numbers to add to."""
    return np.resize(rng.standard_normal(min(x.size, BLOCK + 7), np.float32).astype(x.dtype, copy=False), x.shape)


class Room:
    """An array on a cache line, between guard words."""

    def __init__(self, x: Array | None, dtype: str = "float32", axes: int = 1) -> None:
        x = np.empty((0,) * axes, dtype) if x is None else x
        n = -(-x.nbytes // 4)
        room = np.empty(n + 2 * GUARD + 16, np.uint32)
        start = GUARD + -(room.ctypes.data // 4 + GUARD) % 16
        self._before, self._words, self._after = room[:start], room[start : start + n], room[start + n :]
        self.array: Array = np.ndarray(x.shape, x.dtype, room, 4 * start)
        bits(self.array)[...] = bits(x)
        self._guard = 0 if x.dtype.kind == "i" else OUTSIDE
        self._before[...] = self._after[...] = self._guard

    @property
    def whole(self) -> bool:
        """Whether nobody wrote around it."""
        return bool((self._before == self._guard).all() and (self._after == self._guard).all())

    def sum(self) -> int:
        """A sum of its bits."""
        return int(self._words.sum(dtype=np.uint64))
