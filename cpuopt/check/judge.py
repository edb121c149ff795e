"""The tolerance of all checks: the wanted results of a kernel, and the comparison with its own.

An element passes if its error divided by the expected rounding error is at most 1::

    ratio = |got - want| / (rtol * (|want| + scale) + half * |want|),   rtol = K * eps * sqrt(n)

n is the declared reduction: the rounding errors of a float32 sum of n terms grow as sqrt(n) times the sum's own size.
eps is that of the type in which a kernel computes. A type that stores fewer digits adds one rounding to nearest, half
of its own eps of the result.
The scale of an element comes from the reference, and has two parts. One is how far the element moves, relative to the
perturbation, when every float that the op reads is perturbed with a random sign: for a sum, the root of the sum of its
squared terms; for an ill-conditioned function, what no algorithm on rounded inputs can avoid. Intermediates that the
reference marks ``rounded`` are perturbed too. The other is the root mean square of the element's row (its last axis),
since float32 formulas cancel, as 1 + tanh(x) does. If both are zero (an ignored token, the row of an embedding that no
token names) the kernel must be exact.

Before any threshold: an element fails that is not written, that is NaN or infinite if the reference is not, or a
number if the reference is neither. Whole numbers have to be equal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import CHEATING, COMPILE_ERROR, WRONG, RefusedError, UserError
from ..isolate.serve import doing
from ..kernels.registry import BASE, DEFAULT, KERNELS, Kernel
from ..kernels.toolkit import threads as numba_threads
from ..kernels.watch import python_threads, scheduling
from ..machine import cores
from ..ops.declaration import Arg, Op, Spec, moving
from ..ops.rounding import nearest
from ..ops.storage import Storage, storage
from ..ops.update import drawn_bits
from .cases import NOT_FINITE, Arguments, Array, Case, reference, run_of
from .fit import Drawn, rounding_of, usual
from .memory import FILL, bits, origin, rooms
from .result import Result, worst

K = 8.0
"""Units of rounding for each term: a float32 formula of some ten operations, one of them a libm call.

Of a sum alone, the largest error among a million elements needs 1; tanh'(x) as 1 - tanh(x)^2 comes close to 8."""
LESS_PRECISE, LESS_ROUNDED = 4.0, 2.5
"""How many times as far off as the package's kernels one may be, and with results that a type rounds, of which nearly
all of the error is that rounding: one bit lost is allowed, and two are not."""
SUM, LONGEST_SUM = 0.25, 512.0
"""How far off a kernel may be whatever the package's are, as a share of the tolerance for the sum in it, which is `K` /
4 = 2 units of rounding times the root of its terms; and the root of the terms of the longest sum in one chain."""
STEP = 2.0**-20
"""Relative perturbation of the reference's inputs: far above float64's rounding, too small to bend a function."""
SAMPLES, FEW, MORE_SAMPLES = 3, 1 << 12, 16
"""The number of perturbations from which the scale is estimated; and up to FEW elements, where the few terms of a sum
could cancel in all of three by chance."""
OPERANDS = 4.0
"""Units of rounding to nearest for operands on the way. Such errors are spread evenly, so their root mean square is
half a unit in the last place by the root of 3, and 4 are 7 times that."""
DEAR_FLOPS, DEAR_FLOATS = 5e9, 1 << 23
"""Elements beyond which a single perturbation of the reference is used."""
EPS = float(np.finfo(np.float32).eps)
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package's own kernels."""
BLOCK = 1 << 17
"""Elements that are compared at one time, so that they stay in a core's cache."""


def noted(result: Result, given: Mapping[str, Any], declares: bool) -> Result:
    """Return a result that says on what inputs of an op of one's own it is, if they were scaled or it failed.

    Parameters
    ----------
    declares : whether the op declares its domain.
    """
    if not isinstance(given, Drawn) or (not result.refused and given.scale == 1):
        return result
    scaled = f" times {given.scale:g}, so that float32 holds all that it computes" if given.scale != 1 else ""
    said = f"on {'its inputs=' if declares else 'random inputs'}{scaled}"
    said += "" if declares else "; if its domain is another, declare it with inputs="
    return replace(result, reason=f"{result.reason}, {said}" if result.reason else said)


def rounding(stored: Storage, n: int) -> float:
    """Return the largest relative rounding error of a sum of n terms, in the type in which kernels sum it."""
    return K * stored.eps * sqrt(n)


def ours(kernel: Kernel) -> bool:
    """Return whether a kernel is the package's own."""
    return kernel.where.startswith(str(PACKAGE))


def unsuspicious(op: Op, result: Result) -> float:
    """Return the ratio up to which a result is not compared with that of the package's kernels.

    The tolerance is `K` units of rounding for each term, as if each were a function's, times the root of their number.
    A sum loses less, and in a long one the tolerance hides that whole terms are left out.
    """
    arg = op.by_name.get(result.argument)
    if arg is None or storing(storage(result.case.types.get(arg.name, arg.dtype))):
        return 1.0
    root = sqrt(arg.reduces(result.case.sizes))
    return min(1.0, 1 / root + SUM * min(1.0, LONGEST_SUM / root))


def imprecise(op: Op, usual: Result, mine: Result) -> str:
    """Return that a kernel is much farther off than the package's on the same numbers; or ""."""
    arg = op.by_name.get(mine.argument)
    rounds = arg is not None and storing(storage(mine.case.types.get(arg.name, arg.dtype))) > 0
    if mine.ratio <= max(unsuspicious(op, mine), (LESS_ROUNDED if rounds else LESS_PRECISE) * usual.ratio):
        return ""
    at = f"{mine.argument}{list(mine.index)} = {mine.got:.9g}, expected {mine.want:.9g}"
    return (
        f"{mine.kernel} is {mine.ratio:.2g} times as far off as rounding explains, and {usual.kernel} "
        f"{usual.ratio:.2g} times: {at}"
    )


def beside_usual(kernel: Kernel, result: Result, run: Callable[[Kernel], Result]) -> Result:
    """Return a result that fails if the kernel is much farther off than the package's, or a user's own, by `run`.

    The package's kernels are what others are compared with, so they are held to the tolerance alone.
    """
    if ours(kernel) or result.refused or result.ratio <= unsuspicious(kernel.op, result):
        return result
    known = [k for v in (BASE, DEFAULT) if (k := KERNELS.get((kernel.op.name, v)))]
    known = [k for k in known if ours(k)] or known[:1]
    with rooms():  # nothing of theirs lies where a sandbox could find it
        found = [run(k) for k in known if k.function is not kernel.function and k.takes_all(result.case.types)]
    usual = [r for r in found if not r.refused]
    said = imprecise(kernel.op, worst(usual), result) if usual else ""
    return replace(result, fault=WRONG, reason=said) if said else result


def storing(stored: Storage) -> float:
    """Return the largest relative error of a store that rounds to nearest; 0 if it does not round."""
    return 0.0 if stored.name == stored.computes else float(stored.limits.eps) / 2


def least(stored: Storage) -> float:
    """Return the scale below which numbers are subnormal, and rounding errors do not shrink with them."""
    summed = np.finfo(stored.computes)
    return max(float(summed.tiny) / float(summed.eps), float(stored.limits.smallest_subnormal) / float(summed.eps))


def row_size(x: Array) -> Array:
    """Return the root mean square of the usual elements of each row."""
    return np.asarray(np.sqrt(np.mean(np.square(x, where=usual(x), out=np.zeros_like(x)), axis=-1, keepdims=True)))


@dataclass
class Wanted:
    """The wanted results of a call.

    Attributes
    ----------
    values : the values by argument.
    scale : the scale of each element, or of each row.
    adds : the flags of gradients.
    spared : where NaN or infinity was put in, values and scales of what it would be without them, in all arrays or in
        one: a kernel may leave out what the formula multiplies by zero, as a token that is masked, and its result is
        then as if a number stood there.
    rounded : how many of the two sides have rounding errors.
    drawn : the random bits by which a state in bfloat16 is rounded; a kernel has to draw the same.
    operands : the scale of each element by the numbers on the way that products read, which a narrower type rounds.
    contents : what the arrays hold before the call.
    rows : the rows of updated arrays that the call changes, if these are few.
    """

    op: Op
    case: Case
    values: dict[str, Array]
    scale: dict[str, Array]
    adds: Mapping[str, bool] = field(default_factory=dict)
    spared: Mapping[str, Sequence[tuple[Array, Array]]] = field(default_factory=dict)
    rounded: int = 1
    operands: Mapping[str, Array] = field(default_factory=dict)
    drawn: Mapping[str, Array] = field(default_factory=dict)
    contents: Mapping[str, Array] = field(default_factory=dict)
    rows: Mapping[str, Array] = field(default_factory=dict)

    def added_to(self, starts: Mapping[str, Array], adds: Mapping[str, bool]) -> Wanted:
        """Return the same for gradients that hold `starts` before the call."""
        spared = {
            n: [(x + starts.get(n, 0), s + np.abs(starts.get(n, 0))) for x, s in found]
            for n, found in self.spared.items()
        }
        values = self.values | {n: self.values[n] + x for n, x in starts.items()}
        scale = self.scale | {n: self.scale[n] + np.abs(x) for n, x in starts.items()}
        return replace(self, values=values, scale=scale, adds=adds, spared=spared)

    def narrow(self) -> Wanted:
        """Return the same in float32 if the call writes no finer type: it takes half the memory."""
        types = {a.name: np.result_type(np.float32, self.case.types.get(a.name, a.dtype)) for a in self.op.written}
        every = self.values, self.scale, self.operands
        values, scale, operands = ({n: x.astype(types[n]) for n, x in of.items()} for of in every)
        return replace(self, values=values, scale=scale, operands=operands)

    def judge(self, kernel: Kernel, got: Mapping[str, Array], then: str = "") -> Result:
        """Compare a kernel's results, element by element, and return the result of the worst.

        Parameters
        ----------
        got : the arrays by argument.
        then : the circumstances, for the reason.
        """
        written = [a for a in self.op.written if a.name in self.values]
        exact = Result(kernel.name, self.case, 0.0)
        return worst([exact, *(self._judge(kernel, a, got[a.name], then) for a in written)])

    def tolerance(self, arg: Arg) -> tuple[float, float, float]:
        """Return the tolerance relative to the scale, and in its units that of a result, and that of its operands."""
        types = {n: t for n, t in self.case.types.items() if n not in self.drawn}
        allowed = self.rounded * rounding(storage(types.get(arg.name, arg.dtype)), arg.reduces(self.case.sizes))
        narrow = max((storing(storage(t)) for t in types.values()), default=0.0)
        return allowed, 1 + storing(storage(types.get(arg.name, arg.dtype))) / allowed, OPERANDS * narrow / allowed

    def whole_scale(self, arg: Arg) -> Array:
        """Return the scale of an argument with what its operands on the way explain."""
        scale = self.scale[arg.name]
        if arg.name not in self.operands:
            return scale
        more = self.tolerance(arg)[2] * self.operands[arg.name]
        return scale + (more if more.shape == scale.shape else more.reshape(-1, more.shape[-1]))  # it may be of rows

    def _judge(self, kernel: Kernel, arg: Arg, got: Array, then: str) -> Result:
        if not storage(got).is_float:
            return self._judge_whole(kernel, arg, got, then)
        want, scale = self.values[arg.name], self.whole_scale(arg)
        spare = np.isfinite(got) & ~np.isfinite(want) if self.spared else False
        for value, size in self.spared.get(arg.name, ()):
            with np.errstate(invalid="ignore"):
                nearer = spare & np.isfinite(value) & ~(np.abs(got - want) <= np.abs(got - value))
            want, scale = np.where(nearer, value, want), np.where(nearer, size, scale)
        columns = want.shape[-1]
        shown = got
        if arg.name in self.drawn:
            got = nearest(want, got, self.drawn[arg.name]).astype(np.float32)
        stored, lowest = storage(got), least(storage(got))
        allowed, beyond, _ = self.tolerance(arg)
        mine, right = got.reshape(-1, columns), want.reshape(-1, columns)
        scales = scale.reshape(len(right), -1)

        def compared(block: tuple[slice, slice]) -> tuple[float, int]:
            """Return the largest ratio of a block, and where it is."""
            g, w = mine[block], right[block]
            if stored.name != stored.computes:
                g = g.astype(stored.computes)
            start = block[0].start * columns + block[1].start
            if np.array_equal(g, w):
                return 0.0, start
            with np.errstate(invalid="ignore", over="ignore"):
                size = beyond * np.abs(w)
                size += np.maximum(scales[block if scales.shape[1] == columns else block[0]], lowest)
                ratio = g - w
                np.abs(ratio, out=ratio)
                ratio /= size
            if not np.isfinite(ratio.flat[ratio.argmax()]):
                same = np.isnan(g) & np.isnan(w) | (g == w)
                if self.case.kind in NOT_FINITE:  # which of the two comes of the other depends on the order of a sum
                    same |= ~np.isfinite(g) & ~np.isfinite(w)
                ratio[same & (bits(mine[block]) << 1 >> 1 != stored.nan(FILL))] = 0
                ratio[np.isnan(ratio)] = inf
            row, column = divmod(int(ratio.argmax()), g.shape[1])
            return float(ratio[row, column]) / allowed, start + row * columns + column

        blocks = list(_blocks(*right.shape))
        if len(blocks) > 1:
            with ThreadPoolExecutor(cores()) as pool:
                found = list(pool.map(compared, blocks))
        else:
            found = [compared(block) for block in blocks]
        ratio, place = max(found, key=lambda f: f[0])
        index = tuple(map(int, np.unravel_index(place, want.shape)))
        where = arg.name, index, float(shown[index]), float(self.values[arg.name][index])
        text = f"{arg.name}{list(index)} = {where[2]:.9g}, expected {where[3]:.9g}{flags(self.adds)}{then}"
        if ratio == inf:
            text += origin(shown[index])
        return Result(kernel.name, self.case, ratio, *where, text if ratio > 1 else "")

    def _judge_whole(self, kernel: Kernel, arg: Arg, got: Array, then: str) -> Result:
        """Compare whole numbers, which have to be equal."""
        want = self.values[arg.name]
        off = np.argwhere(got != want)
        index = tuple(map(int, off[0])) if len(off) else (0,) * want.ndim
        where = arg.name, index, float(got[index]), float(want[index])
        text = f"{arg.name}{list(index)} = {where[2]:g}, expected {where[3]:g}{then}" if len(off) else ""
        return Result(kernel.name, self.case, inf if len(off) else 0.0, *where, text)


def flags(adds: Mapping[str, bool]) -> str:
    """Name the flags of gradients, for a reason."""
    return "".join(f", {n}_add={on}" for n, on in adds.items())


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into rows that are compared at one time; a row that is too long is cut as well."""
    height = max(1, BLOCK // columns)
    for i in range(0, rows, height):
        for j in range(0, columns, BLOCK):
            yield slice(i, i + height), slice(j, j + BLOCK)


def steps(shape: tuple[int, ...], rng: np.random.Generator, dtype: DTypeLike = np.float64) -> Array:
    """Draw the factors of one perturbation, 1 - `STEP` or 1 + `STEP`: one random bit each, since there are many."""
    n = prod(shape)
    drawn = np.unpackbits(np.frombuffer(rng.bytes(-(-n // 8)), np.uint8), count=n)
    return np.array([1 - STEP, 1 + STEP], dtype)[drawn].reshape(shape)


def expected(op: Op, case: Case, given: Arguments, rng: np.random.Generator) -> Wanted:
    """Return the results of the float64 reference, and the scale of each element."""
    floats = sum(x.size for x in given.values() if isinstance(x, np.ndarray))
    samples = 1 if op.flops(case.sizes) > DEAR_FLOPS or floats > DEAR_FLOATS else SAMPLES
    samples = MORE_SAMPLES if floats <= FEW else samples
    with np.errstate(invalid="ignore", over="ignore"):  # where NaN and infinity go in
        with marked() as marks:
            want = reference(op, given)
        read = [a.name for a in op.arrays if a.kind in ("in", "state") and given[a.name] is not None]

        def nudge(x: Array) -> Array:
            return np.asarray(x * steps(np.shape(x), rng))

        def nudged(_: int) -> dict[str, Array]:
            with moving(nudge):
                return reference(op, given | {n: nudge(given[n]) for n in read})

        scale = moved(want, samples, nudged)
        if samples == 1:
            scale = {n: np.maximum(x, row_size(x)) for n, x in scale.items()}
        scale = {n: x + row_size(want[n]) for n, x in scale.items()}
        if run := run_of(op):
            scale = {n: scale[n] + x for n, x in rounding_of(run, given, want).items()}
            least = max((float(row_size(given[n].ravel())[0]) for n in read), default=0.0) * EPS
            scale = {
                n: np.where(x == 0, least, x) for n, x in scale.items()
            }  # what cancels in one order may not in all
        operands: dict[str, Array] = {}
        if marks and case.types:
            many = MORE_SAMPLES if op.flops(case.sizes) < DEAR_FLOPS / 50 else samples
            operands = operand_scale(op, given, want, rng, many)
        return Wanted(op, case, want, scale, operands=operands, drawn=drawn_bits(op, given))


@contextmanager
def marked() -> Iterator[list[bool]]:
    """Yield a list that is not empty once a reference has marked an operand."""
    marks: list[bool] = []

    def mark(x: Any) -> Any:
        marks.append(True)
        return x

    with moving(mark, operands=True):
        yield marks


def operand_scale(
    op: Op, given: Arguments, want: Mapping[str, Array], rng: np.random.Generator, samples: int
) -> dict[str, Array]:
    """Return how far the results move, relative to the perturbation, with the operands that a reference marks."""

    def nudged(_: int) -> dict[str, Array]:
        with moving(lambda x: x * steps(np.shape(x), rng, x.dtype), operands=True):
            return reference(op, dict(given), np.result_type(*want.values()))

    return {n: np.maximum(x, row_size(x)) for n, x in moved(want, samples, nudged).items()}  # a few signs may cancel


def moved(want: Mapping[str, Array], samples: int, nudged: Callable[[int], Mapping[str, Array]]) -> dict[str, Array]:
    """Return how far results move, relative to the perturbation: the root mean square over perturbed ones."""
    squares = {n: np.zeros_like(x) for n, x in want.items()}
    for i in range(samples):
        for n, x in nudged(i).items():
            squares[n] += ((x - want[n]) / STEP) ** 2 / samples
    return {n: np.sqrt(x) for n, x in squares.items()}


SCRATCH = 1 << 17
"""Elements of scratch that a kernel may have for each thread, besides those for its arrays."""


def prepare(kernel: Kernel, sizes: Mapping[str, int], cut: int | None = None) -> dict[str, Spec]:
    """Compile a kernel, and return the scratch that it asks for, by name.

    Parameters
    ----------
    cut : the number of threads that a kernel, compiled before, cuts its work for; None: compile it, for all threads.
    """
    try:
        if cut is None:
            kernel.compile()
        with numba_threads.planned_for(cut or numba_threads.most_threads()):
            found = kernel.work(sizes)
    except KeyboardInterrupt:
        raise
    except UserError as e:
        said = str(e).removeprefix(f"{kernel.name} at {kernel.where} ")
        raise RefusedError(said, getattr(e, "word", COMPILE_ERROR)) from e
    except BaseException as e:
        said = f"does not compile, or has no scratch size: {type(e).__name__}: {e}"
        raise RefusedError(said, COMPILE_ERROR) from e
    require_usual(kernel, sizes, found)
    return found


def require_usual(kernel: Kernel, sizes: Mapping[str, int], scratch: Mapping[str, Spec]) -> None:
    """Raise `RefusedError` for more scratch, all arrays together, than a kernel can need."""
    known = [a for a in kernel.op.arrays if all(d.symbols <= sizes.keys() for d in a.shape)]  # absent arguments are not
    least = max(1 << 22, SCRATCH * numba_threads.most_threads())
    most = least + 64 * sum(prod(d(sizes) for d in a.shape) for a in known)
    asked = sum(n for (n,), _ in scratch.values())
    if asked > most:
        where = f"'{next(iter(scratch))}'" if len(scratch) == 1 else f"in {len(scratch)} arrays"
        raise RefusedError(
            f"asks for {asked:,} elements of scratch {where}; expected up to {most:,}: 64 for each element of its "
            f"arrays, and {SCRATCH:,} for each thread",
            COMPILE_ERROR,
        )


def called(kernel: Kernel, args: Sequence[Any], n: int, then: str = "") -> None:
    """Call a kernel on n threads, which are set; raise `RefusedError` if it raises, or changes the process."""
    numba_threads.set_threads(n)
    doing(kernel.name)
    before, seen = surroundings(), views(args)
    try:
        with np.errstate(all="ignore"):  # of a kernel in Python
            kernel.function(*args)
    except (KeyboardInterrupt, RefusedError):  # the latter of a kernel in another process
        raise
    except BaseException as e:
        raise RefusedError(f"raised {type(e).__name__}: {e}{then}") from e
    require_surroundings(before | {"numba threads": n})
    if views(args) != seen:
        raise RefusedError("changed the shape, the strides, the type or the flags of an array that it was given")


def views(args: Sequence[Any]) -> list[Any]:
    """Return how a call's arrays see their memory, which a kernel in Python can change."""
    return [(x.shape, x.strides, x.dtype, x.flags.writeable) for x in args if isinstance(x, np.ndarray)]


def surroundings() -> dict[str, Any]:
    """Return what later calls of other kernels depend on besides their arguments."""
    found = {
        "numba threads": numba_threads.get_threads(),
        "floating-point mode": floating_point(),
        "working folder": os.getcwd(),
        "signal handlers": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
    }
    if threading.current_thread() is threading.main_thread():  # else others start some, as ranks do
        found["threads"] = python_threads()
    return found | {"cores or priorities": scheduling()}


def floating_point() -> list[float]:
    """Return sums that depend on the rounding mode, and products that are 0 if subnormal numbers are flushed."""
    return [*(ONES + TINY).tolist(), *(SMALLEST * HALVES).tolist()]


ONES, TINY = np.array([1, -1, 1], np.float32), np.array([1e-9, -1e-9, -1e-9], np.float32)
SMALLEST, HALVES = np.array([2.0**-126, 2.0**-140], np.float32), np.array([0.5, 1], np.float32)


def require_surroundings(before: Mapping[str, Any]) -> None:
    """Raise if a kernel changed its process, as by another rounding mode."""
    found = surroundings()
    for what, known in before.items():
        now = found.get(what, known)
        if now - known if isinstance(now, set) else now != known:
            raise RefusedError(f"left its process with other {what} ({now} instead of {before[what]})", CHEATING)


def counts_up_to(most: int, threads: Sequence[int]) -> list[int]:
    """List the numbers of threads that a check runs on, if numba was started with `most`."""
    return [n for n in threads if n <= most] or [most]


@contextmanager
def keeping_threads() -> Iterator[int]:
    """Yield the largest number of threads; restore the current number at the end."""
    before = numba_threads.get_threads()
    try:
        yield numba_threads.set_threads(None)
    finally:
        numba_threads.set_threads(before)
