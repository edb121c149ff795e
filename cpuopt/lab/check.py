"""Is a kernel right? Judged by its op's float64 reference, and driven by the declaration alone.

A check calls a kernel on random arguments, in every mixture of adding and overwriting, and compares::

    ratio = |got - want| / (rtol * (|want| + scale)),   rtol = K * eps * sqrt(n)

n is the declared reduction: the rounding errors of a float32 sum of n terms grow as sqrt(n) times the sum's own size.
The scale of an element comes from the reference, and has two parts. One is how far the element moves, relative to the
perturbation, when every float that the op reads is perturbed with a random sign: for a sum, the root of the sum of its
squared terms; for an ill-conditioned function, what no algorithm on rounded inputs can avoid. The other is the root
mean square of the element's row (its last axis), since float32 formulas cancel, as 1 + tanh(x) does. Where both are
zero (an ignored token, the row of an embedding that no token names) the kernel must be exact.

Before any threshold: a kernel fails that raises, that changes what it may only read, that writes outside its arrays,
that leaves an element unwritten, that gives NaN or infinity where the reference does not, or whose bits differ from one
call to the next or from one number of threads to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, nan, sqrt
from typing import Any, Literal

import numpy as np

from ..kernels import threads as numba_threads
from ..op import Arg, Op
from ..registry import Kernel
from .cases import Arguments, Array, Case, arguments, cases, modes, quick_cases, reference

K = 8.0
"""Units of rounding for each term: a float32 formula of some ten operations, one of them a libm call.

Of a sum alone, the largest error among a million elements needs 1; tanh'(x) as 1 - tanh(x)^2 comes close to 8."""
MARGIN = 10.0
"""A ratio up to here is MARGINAL: more than rounding explains, less than a wrong formula gives."""
EPS, TINY = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)
STEP = 2.0**-20
"""Relative perturbation of the reference's inputs: far above float64's rounding, too small to bend a function."""
SAMPLES = 3
"""Perturbations that the scale is estimated from."""


GUARD = 512
"""Words between two arrays, one half for each."""
FILL, SCRATCH, OUTSIDE = 0x7FC0F111, 0x7FC05C7A, 0x7FD00000  # quiet NaNs: arithmetic keeps their low bits
"""What is there before a call. Guard words count up from `OUTSIDE`: a loop that runs too far computes with those it
reads, and writes one of them back, which would go unseen if they were all the same."""
ORIGIN = {
    FILL: ": as filled before the call, so not written, or added to though told to overwrite",
    SCRATCH: ": from scratch that was read before it was written",
}


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes
    ----------
    ratio : the worst of all elements and modes; infinite where no threshold applies.
    argument, index : where the worst element is.
    got, want : its value, and the reference's.
    reason : of a verdict that is not PASS.
    """

    kernel: str
    case: Case
    ratio: float
    argument: str = ""
    index: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    reason: str = ""

    @property
    def verdict(self) -> Literal["PASS", "MARGINAL", "FAIL"]:
        """PASS, MARGINAL or FAIL."""
        return "PASS" if self.ratio <= 1 else "MARGINAL" if self.ratio <= MARGIN else "FAIL"

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.ratio:8.3g}  {self.kernel}  {self.case}{self.reason and ': ' + self.reason}"

    def describe(self) -> dict[str, Any]:
        """For a run's record."""
        told = {"kernel": self.kernel, "case": str(self.case), "status": self.verdict, "reason": self.reason}
        return told | {"ratio": self.ratio if self.ratio < inf else None}

    def to_json(self) -> dict[str, Any]:
        """All of it; an infinite ratio is None, and so are values that are not finite."""
        where = {"argument": self.argument, "index": list(self.index), "got": self.got, "want": self.want}
        return {
            k: None if isinstance(v, float) and not isfinite(v) else v for k, v in (self.describe() | where).items()
        }

    @staticmethod
    def from_json(d: Mapping[str, Any], case: Case) -> Result:
        """Read what `to_json` gave."""
        ratio, got, want = (nan if d[k] is None else float(d[k]) for k in ("ratio", "got", "want"))
        at = tuple(d["index"])
        return Result(d["kernel"], case, inf if isnan(ratio) else ratio, d["argument"], at, got, want, d["reason"])


def check_all(
    kernels: Iterable[Kernel], *, quick: bool = False, threads: Sequence[int] = (1, 2), seed: int = 0
) -> list[Result]:
    """Check kernels on all cases of their ops, or on the quick ones."""
    choose = quick_cases if quick else cases
    return [check(k, case, threads=threads, seed=seed) for k in kernels for case in choose(k.op)]


def check(kernel: Kernel, case: Case | Mapping[str, int], *, threads: Sequence[int] = (1, 2), seed: int = 0) -> Result:
    """Check one kernel on one case. What the kernel does wrong is in the result; nothing is raised for it.

    Parameters
    ----------
    case : or its sizes alone, by symbol.
    threads : numbers of threads that must give the same bits; those that numba was not started with are left out.
    seed : of the arguments; equal for all variants of an op.
    """
    case = case if isinstance(case, Case) else Case(case)
    rng = np.random.default_rng(seed)
    given = arguments(kernel.op, case, rng)
    wanted = expected(kernel.op, given, rng)
    worst = Result(kernel.name, case, 0.0)
    with keeping_threads() as most:
        counts = [n for n in threads if n <= most] or [most]
        counts = counts if kernel.same_bits else counts[:1]
        try:
            scratch = prepare(kernel, case.sizes)
            for adds in modes(kernel.op):
                result = Trial(kernel, case, given, wanted, adds, scratch, rng).run(counts)
                worst = max(worst, result, key=lambda r: r.ratio)
        except BrokenKernelError as e:
            return replace(Result(kernel.name, case, inf, *e.where), reason=str(e))
    return worst


@contextmanager
def keeping_threads() -> Iterator[int]:
    """Give the most threads there are; bring the number back to what it was."""
    before = numba_threads.get_threads()
    try:
        yield numba_threads.set_threads(None)
    finally:
        numba_threads.set_threads(before)


def expected(op: Op, given: Arguments, rng: np.random.Generator) -> tuple[dict[str, Array], dict[str, Array]]:
    """Give what the reference gives, and the scale of each element."""
    want = reference(op, given)
    read = [a.name for a in op.arrays if a.role in ("in", "state") and given[a.name] is not None]
    moved = {n: np.zeros(x.shape) for n, x in want.items()}
    for _ in range(SAMPLES):
        signs = {n: rng.choice(np.array([-STEP, STEP]), given[n].shape) for n in read}
        nudged = reference(op, given | {n: given[n].astype(np.float64) * (1 + signs[n]) for n in read})
        for n, x in nudged.items():
            moved[n] += ((x - want[n]) / STEP) ** 2 / SAMPLES
    return want, {n: np.sqrt(moved[n]) + row_size(x) for n, x in want.items()}


def row_size(x: Array) -> Array:
    """Root mean square of each row."""
    return np.asarray(np.sqrt(np.mean(x**2, axis=-1, keepdims=True)))


class BrokenKernelError(Exception):
    """A kernel does what no tolerance excuses; `where` has the argument to blame, its index and both values, if any."""

    def __init__(self, reason: str, *where: Any) -> None:
        super().__init__(reason)
        self.where = where


def prepare(kernel: Kernel, sizes: Mapping[str, int]) -> dict[str, int]:
    """Compile a kernel, and return how many floats of scratch it asks for, by name."""
    try:
        kernel.compile()
        return {s.name: s.floats(sizes) for s in kernel.scratch}
    except Exception as e:
        raise BrokenKernelError(f"does not compile, or has no scratch size: {type(e).__name__}: {e}") from e


class Memory:
    """The arrays of one call, absent ones too, in one buffer: each on a cache line, guard words before and after it."""

    def __init__(self, contents: Mapping[str, Array]) -> None:
        self.spans: dict[str, slice] = {}
        end = GUARD
        for name, x in contents.items():
            self.spans[name] = slice(end, end + x.size)
            end += -(-(x.size + GUARD) // 16) * 16
        room = np.empty(end + 16, np.uint32)
        start = -room.ctypes.data // 4 % 16
        self.words = room[start : start + end]
        guards = np.ones(end, bool)
        for span in self.spans.values():
            guards[span] = False
        self.before = np.empty(end, np.uint32)
        self.before[guards] = OUTSIDE + np.arange(np.count_nonzero(guards), dtype=np.uint32)
        self.arrays: dict[str, Array] = {}
        for name, x in contents.items():
            span = self.spans[name]
            if x.dtype.kind == "i":  # a stray index must not be wild
                self.before[span.start - GUARD // 2 : span.stop + GUARD // 2] = 0
            self.before[span] = x.view(np.uint32).ravel()
            self.arrays[name] = np.ndarray(x.shape, x.dtype, buffer=self.words, offset=4 * span.start)

    def reset(self) -> None:
        """Bring every word back to what it was before the call."""
        np.copyto(self.words, self.before)

    def require_unchanged(self, but: Iterable[str]) -> None:
        """Raise where a word changed outside the arrays that a call may write."""
        changed = self.words != self.before
        for name in but:
            changed[self.spans[name]] = False
        if changed.any():
            at = int(changed.argmax())
            name, span = min(self.spans.items(), key=lambda s: max(s[1].start - at, at - s[1].stop + 1, 0))
            if span.start <= at < span.stop:
                raise BrokenKernelError(f"changed '{name}', which it may only read, at element {at - span.start}", name)
            past = at - span.stop + 1
            where = f"{past} past the end" if past > 0 else f"{span.start - at} before the beginning"
            raise BrokenKernelError(f"wrote outside its arrays: {where} of '{name}'", name)


def filled(shape: tuple[int, ...], bits: int) -> Array:
    """Return float32 of given bits."""
    return np.full(shape, bits, np.uint32).view(np.float32)


class Trial:
    """A kernel on one case in one mode: several calls with the same arguments."""

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        given: Arguments,
        expected: tuple[dict[str, Array], dict[str, Array]],
        adds: Mapping[str, bool],
        scratch: Mapping[str, int],
        rng: np.random.Generator,
    ) -> None:
        self.kernel, self.case, self.adds = kernel, case, adds
        self.want, self.scale = map(dict, expected)
        self.written = [a for a in kernel.op.written if given[a.name] is not None]
        contents: dict[str, Array] = {}
        for a in kernel.op.arrays:
            x = np.empty((0,) * len(a.shape), a.dtype) if given[a.name] is None else given[a.name]
            if a.role in ("out", "acc"):
                x = filled(x.shape, FILL)
            if adds.get(a.name) and x.size:  # it holds numbers of the size of what is added
                want = self.want[a.name]
                size = float(np.sqrt(np.mean(want**2))) or 1.0
                x = (size * rng.standard_normal(want.shape)).astype(np.float32)
                self.want[a.name], self.scale[a.name] = want + x, self.scale[a.name] + np.abs(x)
            contents[a.name] = x
        contents |= {name: filled((n,), SCRATCH) for name, n in scratch.items()}
        self.memory = Memory(contents)
        self.may_change = [*(a.name for a in self.written), *scratch]
        self.args: list[Any] = []
        for a in kernel.op.args:
            self.args.append(given[a.name] if a.role == "scalar" else self.memory.arrays[a.name])
            self.args += [adds[a.name]] if a.role == "acc" else []
        self.args += [self.memory.arrays[name] for name in scratch]

    def run(self, counts: Sequence[int]) -> Result:
        """Call with each number of threads; judge the first call, and ask the others for the same bits."""
        first = self.call(counts[0])
        results = [self.judge(a, first[a.name]) for a in self.written]
        for n in counts:
            for name, bits in self.call(n).items():
                if not np.array_equal(bits, first[name]):
                    at = np.unravel_index(int((bits != first[name]).argmax()), bits.shape)
                    then = "in a second call" if n == counts[0] else f"with {n} threads instead of {counts[0]}"
                    where = name, tuple(map(int, at)), float(bits.view(np.float32)[at]), float(self.want[name][at])
                    raise BrokenKernelError(f"'{name}' has other bits {then}{self.mode}", *where)
        return max(results, key=lambda r: r.ratio)

    def call(self, n: int) -> dict[str, Array]:
        """Call once, and return the bits of what was written."""
        numba_threads.set_threads(n)
        self.memory.reset()
        try:
            self.kernel.function(*self.args)
        except Exception as e:
            raise BrokenKernelError(f"raised {type(e).__name__}: {e}{self.mode}") from e
        self.memory.require_unchanged(but=self.may_change)
        return {a.name: self.memory.arrays[a.name].view(np.uint32).copy() for a in self.written}

    def judge(self, arg: Arg, bits: Array) -> Result:
        """Compare one argument, and return its worst element."""
        got, want, scale = bits.view(np.float32).astype(np.float64), self.want[arg.name], self.scale[arg.name]
        payload = bits & 0x7FFFFFFF  # without the sign
        finite = np.isfinite(got) & np.isfinite(want)
        same = np.isnan(got) & np.isnan(want) | (got == want)
        ratio = np.where(same & (payload != FILL), 0.0, inf)
        tolerance = K * EPS * sqrt(arg.reduces(self.case.sizes)) * (np.abs(want) + np.maximum(scale, TINY / EPS))
        ratio[finite] = np.nan_to_num(np.abs(got - want)[finite] / tolerance[finite], nan=inf)
        at = tuple(map(int, np.unravel_index(int(ratio.argmax()), ratio.shape)))
        where = arg.name, at, float(got[at]), float(want[at])
        text = f"{arg.name}{list(at)} = {got[at]:.9g}, expected {want[at]:.9g}{self.mode}"
        if ratio[at] == inf:
            outside = ": read from outside an array" if OUTSIDE <= payload[at] < OUTSIDE + 2**20 else ""
            raise BrokenKernelError(text + ORIGIN.get(int(payload[at]), outside), *where)
        return Result(self.kernel.name, self.case, float(ratio[at]), *where, text if ratio[at] > 1 else "")

    @property
    def mode(self) -> str:
        """The flags, for a reason."""
        return "".join(f", {n}_add={on}" for n, on in self.adds.items())
