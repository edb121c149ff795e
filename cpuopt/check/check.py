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
that leaves an element unwritten, that gives NaN or infinity where the reference does not or a number where the
reference gives neither, or that leaves numba with another number of threads.

The same arguments are given several times: with poison, and with plausible numbers in what is written and in scratch;
with NaN, 1e30 and -1e30 around the arrays; on each number of threads; before and after other numbers were in the same
arrays. All of these must give the same bits, so a kernel fails that remembers, that reads outside its arrays, or whose
bits differ from call to call. One that does not promise the same bits is compared with the reference each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan, prod, sqrt
from typing import Any, Literal

import numpy as np

from ..kernels.registry import Kernel
from ..kernels.toolkit import threads as numba_threads
from ..ops.declaration import Arg, Op, Spec
from .cases import NOT_FINITE, Arguments, Array, Case, altered, arguments, cases, modes, quick_cases, reference

K = 8.0
"""Units of rounding for each term: a float32 formula of some ten operations, one of them a libm call.

Of a sum alone, the largest error among a million elements needs 1; tanh'(x) as 1 - tanh(x)^2 comes close to 8."""
MARGIN = 10.0
"""A ratio up to here is MARGINAL: more than rounding explains, less than a wrong formula gives."""
STEP = 2.0**-20
"""Relative perturbation of the reference's inputs: far above float64's rounding, too small to bend a function."""
SAMPLES = 3
"""Perturbations that the scale is estimated from."""


GUARD = 512
"""Words between two arrays, one half for each."""
MARGINS = 1 << 16
"""Words before the first array and after the last, for what is written far outside."""
FILL, SCRATCH, OUTSIDE = 0x7FC0F111, 0x7FC05C7A, 0x7FD00000  # quiet NaNs: arithmetic keeps their low bits
"""What is there before a call, as float32; of another type, a NaN with the same low bits. Guard words count up from
`OUTSIDE`: a loop that runs too far computes with those it reads, and writes one of them back, which would go unseen if
they were all the same."""
FLIP = {2: 1 << 8, 4: 1 << 21, 8: 1 << 50}
"""The second bit of a float's mantissa, by itemsize."""
HUGE = tuple(int(np.float32(x).view(np.uint32)) for x in (1e30, -1e30))
"""What guard words count up from in some calls: a maximum or a minimum takes no notice of NaN, but of these it does."""
MOST_VARIED = 1 << 17
"""Elements up to which a case is also given other inputs in the same arrays: the reference is computed for them too."""
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
    return [
        check(k, case, threads=threads, seed=seed)
        for k in kernels
        for case in (quick_cases(k.op, k.types) if quick else cases(k.op))
    ]


def check(kernel: Kernel, case: Case | Mapping[str, int], *, threads: Sequence[int] = (1, 2), seed: int = 0) -> Result:
    """Check one kernel on one case. What the kernel does wrong is in the result; nothing is raised for it.

    Parameters
    ----------
    case : or its sizes alone, by symbol.
    threads : numbers of threads to run on; those that numba was not started with are left out.
    seed : of the arguments; equal for all variants of an op.
    """
    case = case if isinstance(case, Case) else Case(case)
    kernel, rng = kernel.of(case.types), np.random.default_rng(seed)
    given = arguments(kernel.op, case, rng)
    wanted = [(given, *expected(kernel.op, given, rng))]
    spared: dict[str, tuple[Array, Array]] = {}
    if case.kind in NOT_FINITE:
        finite = arguments(kernel.op, replace(case, kind="three"), np.random.default_rng(seed))
        values, scales = expected(kernel.op, finite, rng)
        spared = {n: (x, scales[n]) for n, x in values.items()}
    if case.kind == "normal" and sum(x.size for x in given.values() if isinstance(x, np.ndarray)) <= MOST_VARIED:
        other = arguments(kernel.op, case, np.random.default_rng(seed), altered(rng))
        wanted.append((other, *expected(kernel.op, other, rng)))
    worst = Result(kernel.name, case, 0.0)
    with keeping_threads() as most:
        counts = counts_up_to(most, threads)
        try:
            scratch = prepare(kernel, case.sizes)
            for adds in modes(kernel.op):
                result = Trial(kernel, case, wanted, adds, scratch, rng, spared).run(counts)
                worst = max(worst, result, key=lambda r: r.ratio)
        except BrokenKernelError as e:
            return replace(Result(kernel.name, case, inf, *e.where), reason=str(e))
    return worst


def counts_up_to(most: int, threads: Sequence[int]) -> list[int]:
    """List the numbers of threads that a check runs on, where numba was started with `most`."""
    return [n for n in threads if n <= most] or [most]


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
    with np.errstate(invalid="ignore", over="ignore"):  # where NaN and infinity go in
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
    """Root mean square of what is finite in each row."""
    return np.asarray(
        np.sqrt(np.mean(np.square(x, where=np.isfinite(x), out=np.zeros_like(x)), axis=-1, keepdims=True))
    )


class BrokenKernelError(Exception):
    """A kernel does what no tolerance excuses; `where` has the argument to blame, its index and both values, if any."""

    def __init__(self, reason: str, *where: Any) -> None:
        super().__init__(reason)
        self.where = where


def rounding(dtype: str, n: int) -> float:
    """Return the relative error that rounding may come to in a sum of n terms: summed in float32 or finer, stored once.

    Parameters
    ----------
    dtype : what the sum is stored in.
    """
    stored = np.finfo(dtype)
    summed = stored if stored.bits > 32 else np.finfo(np.float32)
    return K * max(float(summed.eps) * sqrt(n), float(stored.eps))


def least(dtype: str) -> float:
    """Return the scale below which rounding is as large as for smaller numbers: where they are subnormal."""
    stored = np.finfo(dtype)
    summed = stored if stored.bits > 32 else np.finfo(np.float32)
    return max(float(summed.tiny), float(stored.smallest_subnormal)) / float(stored.eps)


def bits(x: Array) -> Array:
    """View an array as unsigned integers."""
    return x.view(f"u{x.itemsize}")


def pattern(word: int, itemsize: int) -> int:
    """Return the bits of a NaN of some type for those of a float32."""
    return {2: 0x7E00 | word & 0x1FF, 4: word, 8: 0x7FF8 << 48 | word}[itemsize]


def origin(payload: int, itemsize: int) -> str:
    """Name where a NaN comes from, by its bits without the sign, if it is one that was put there."""
    known = {pattern(word, itemsize): text for word, text in ORIGIN.items()}
    return known.get(payload, ": read from outside an array" if OUTSIDE <= payload < OUTSIDE + 2**20 else "")


def prepare(kernel: Kernel, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """Compile a kernel, and return the scratch that it asks for, by name."""
    try:
        kernel.compile()
        found = kernel.work(sizes)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        raise BrokenKernelError(f"does not compile, or has no scratch size: {type(e).__name__}: {e}") from e
    known = [a for a in kernel.op.arrays if all(d.symbols <= sizes.keys() for d in a.shape)]  # what is absent is not
    most = max(1 << 22, 64 * sum(prod(d(sizes) for d in a.shape) for a in known))
    for name, ((n,), _) in found.items():
        if n > most:
            raise BrokenKernelError(
                f"asks for {n} elements of scratch '{name}', more than 64 for each element of its arrays"
            )
    return found


def called(kernel: Kernel, args: Sequence[Any], n: int, then: str = "") -> None:
    """Call a kernel on n threads, which are set; raise `BrokenKernelError` where it raises, or sets others."""
    try:
        with np.errstate(all="ignore"):  # of a kernel in Python
            kernel.function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        raise BrokenKernelError(f"raised {type(e).__name__}: {e}{then}") from e
    if (now := numba_threads.get_threads()) != n:
        raise BrokenKernelError(f"left numba with {now} threads; it was called with {n}, which it may not change")


class Memory:
    """The arrays of one call, absent ones too, in one buffer: each on a cache line, guard words before and after it.

    Parameters
    ----------
    indices : the arrays that have zeros around them: a stray index must not be wild.
    """

    def __init__(self, contents: Mapping[str, Array], indices: Collection[str] = ()) -> None:
        self.spans: dict[str, slice] = {}
        end = MARGINS
        for name, x in contents.items():
            words = -(-x.nbytes // 4)
            self.spans[name] = slice(end, end + words)
            end += -(-(words + GUARD) // 16) * 16
        end += MARGINS
        room = np.empty(end + 16, np.uint32)
        start = -room.ctypes.data // 4 % 16
        self.words = room[start : start + end]
        self.before = np.zeros(end, np.uint32)
        self.arrays: dict[str, Array] = {}
        guards = np.ones(end, bool)
        for name, x in contents.items():
            span = self.spans[name]
            around = GUARD // 2 if name in indices else 0
            guards[span.start - around : span.stop + around] = False
            self.arrays[name] = np.ndarray(x.shape, x.dtype, buffer=self.words, offset=4 * span.start)
        self.guards = np.flatnonzero(guards)
        self.surround(OUTSIDE)
        self.put(contents)

    def surround(self, bits: int) -> None:
        """Choose what lies around the arrays from the next reset on: words that count up from `bits`."""
        self.before[self.guards] = bits + np.arange(len(self.guards), dtype=np.uint32)

    def put(self, contents: Mapping[str, Array]) -> None:
        """Choose what is in some arrays from the next reset on."""
        for name, x in contents.items():
            np.ndarray(x.shape, f"u{x.itemsize}", self.before, 4 * self.spans[name].start)[...] = bits(x)

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


def filled(shape: tuple[int, ...], dtype: str, word: int) -> Array:
    """Return an array of NaN, or of integers of the same bits."""
    size = np.dtype(dtype).itemsize
    return np.full(shape, pattern(word, size), f"u{size}").view(dtype)


@dataclass
class Side:
    """What calls are given, by name, and what they must give: values, and the scale of each.

    Attributes
    ----------
    spared : where NaN or infinity was put in, value and scale of what it would be without: a kernel may leave out what
        the formula multiplies by zero, as a token that is masked, and its result is then as if a number stood there.
    """

    contents: dict[str, Array]
    want: dict[str, Array]
    scale: dict[str, Array]
    spared: dict[str, tuple[Array, Array]] = field(default_factory=dict)


class Trial:
    """A kernel on one case in one mode: several calls in the same arrays.

    Parameters
    ----------
    wanted : arguments, what the reference gives for them, and its scale; then the same of others, if they are tried.
    spared : as in `Side`.
    """

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        wanted: Sequence[tuple[Arguments, dict[str, Array], dict[str, Array]]],
        adds: Mapping[str, bool],
        scratch: Mapping[str, Spec],
        rng: np.random.Generator,
        spared: Mapping[str, tuple[Array, Array]],
    ) -> None:
        self.kernel, self.case, self.adds, self.rng = kernel, case, adds, rng
        given = wanted[0][0]
        self.written = [a for a in kernel.op.written if given[a.name] is not None]
        self.fresh = [a.name for a in self.written if a.role != "state" and not adds.get(a.name)]
        """What holds nothing that the call needs."""
        self.sides = [self.side(*w, spared) for w in wanted]
        contents = self.sides[0].contents
        self.poison = {n: filled(contents[n].shape, contents[n].dtype.name, FILL) for n in self.fresh}
        self.poison |= {name: filled(*spec, SCRATCH) for name, spec in scratch.items()}
        self.scratch = list(scratch)
        indices = [a.name for a in kernel.op.arrays if a.role == "index"]
        self.memory = Memory(contents | self.poison, indices)
        self.may_change = [*(a.name for a in self.written), *scratch]
        self.args: list[Any] = []
        for a in kernel.op.args:
            self.args.append(given[a.name] if a.role == "scalar" else self.memory.arrays[a.name])
            self.args += [adds[a.name]] if a.role == "acc" else []
        self.args += [self.memory.arrays[name] for name in scratch]

    def side(
        self,
        given: Arguments,
        want: Mapping[str, Array],
        scale: Mapping[str, Array],
        spared: Mapping[str, tuple[Array, Array]],
    ) -> Side:
        """Turn arguments into what the arrays hold before a call."""
        made = Side({}, dict(want), dict(scale), dict(spared))
        for a in self.kernel.op.arrays:
            x = np.empty((0,) * len(a.shape), self.kernel.dtype(a)) if given[a.name] is None else given[a.name]
            if self.adds.get(a.name) and x.size:  # it holds numbers of the size of what is added
                finite = want[a.name][np.isfinite(want[a.name])]
                size = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
                x = ((size or 1.0) * self.rng.standard_normal(x.shape)).astype(x.dtype)
                made.want[a.name], made.scale[a.name] = want[a.name] + x, scale[a.name] + np.abs(x)
                if spared:
                    made.spared[a.name] = spared[a.name][0] + x, spared[a.name][1] + np.abs(x)
            made.contents[a.name] = x
        return made

    def run(self, counts: Sequence[int]) -> Result:
        """Call with each number of threads and in every circumstance; judge the first call, and compare the others."""
        side, one, most = self.sides[0], counts[0], counts[-1]
        self.one = one
        first = self.call(one, side)
        results = self.judged(first, side, one)
        around = 0
        for n in counts:
            results += self.compared(first, n, self.poison, HUGE[around % 2])
            around += 1
        results += self.compared(first, most, self.plausible(first), HUGE[around % 2])
        if len(self.sides) > 1:
            then = "once other numbers were put into the same arrays, and what it wrote was left"
            left = {n: self.memory.arrays[n].copy() for n in self.poison}
            results += self.judged(self.call(most, self.sides[1], left), self.sides[1], most, f", {then}")
            left = {n: self.memory.arrays[n].copy() for n in self.scratch} | self.almost(first)
            results += self.told(first, self.call(most, side, left), most, lambda: then)
        return max(results, key=lambda r: r.ratio)

    def almost(self, first: Mapping[str, Array]) -> dict[str, Array]:
        """Give what a call is to write, but for one element of each array."""
        made = {n: first[n].copy() for n in self.fresh}
        for x in made.values():
            x.flat[self.rng.integers(x.size)] ^= FLIP[x.itemsize]
        return made

    def plausible(self, first: Mapping[str, Array]) -> dict[str, Array]:
        """Give numbers that a careless kernel would take for results, or for its own work."""
        work = {n: self.rng.standard_normal(x.size).astype(x.dtype) for n in self.scratch for x in [self.poison[n]]}
        return self.almost(first) | work

    def compared(self, first: Mapping[str, Array], n: int, fill: Mapping[str, Array], around: int) -> list[Result]:
        """Call with the first call's arguments in other circumstances."""

        def why() -> str:
            """Change one circumstance after the other."""
            if any(self.differs(first, self.one, self.poison, OUTSIDE) for _ in range(2)):
                return "in a second call"
            if n != self.one and self.differs(first, n, self.poison, OUTSIDE):
                return f"with {n} threads instead of {self.one}"
            if self.differs(first, n, self.poison, around):
                return "when other numbers lie around its arrays: it reads outside them"
            return "when other numbers are in its outputs and scratch before the call: it relies on them"

        return self.told(first, self.call(n, self.sides[0], fill, around), n, why)

    def differs(self, first: Mapping[str, Array], n: int, fill: Mapping[str, Array], around: int) -> bool:
        """Whether a call gives other bits than the first."""
        got = self.call(n, self.sides[0], fill, around)
        return any(not np.array_equal(x, first[name]) for name, x in got.items())

    def told(
        self, first: Mapping[str, Array], got: Mapping[str, Array], n: int, why: Callable[[], str]
    ) -> list[Result]:
        """Ask for the first call's bits, or, of a kernel that does not promise them, for right values."""
        if not self.kernel.same_bits:
            return self.judged(got, self.sides[0], n)
        for name, x in got.items():
            if not np.array_equal(x, first[name]):
                at = np.unravel_index(int((x != first[name]).argmax()), x.shape)
                value = float(x.view(self.memory.arrays[name].dtype)[at])
                want = float(self.sides[0].want[name][at])
                raise BrokenKernelError(
                    f"'{name}' has other bits {why()}{self.mode}", name, tuple(map(int, at)), value, want
                )
        return []

    def call(
        self, n: int, side: Side, fill: Mapping[str, Array] | None = None, around: int = OUTSIDE
    ) -> dict[str, Array]:
        """Call once, and return the bits of what was written."""
        numba_threads.set_threads(n)
        self.memory.surround(around)
        self.memory.put({**side.contents, **(self.poison if fill is None else fill)})
        self.memory.reset()
        called(self.kernel, self.args, n, self.mode)
        self.memory.require_unchanged(but=self.may_change)
        return {a.name: bits(self.memory.arrays[a.name]).copy() for a in self.written}

    def judged(self, got: Mapping[str, Array], side: Side, n: int, then: str = "") -> list[Result]:
        """Compare what a call wrote with what it must give."""
        told = f", {n} threads" if not self.kernel.same_bits else ""
        return [self.judge(a, got[a.name], side, told + then) for a in self.written]

    def judge(self, arg: Arg, words: Array, side: Side, then: str) -> Result:
        """Compare one argument, and return its worst element."""
        dtype, size = self.kernel.dtype(arg), words.itemsize
        got, want, scale = words.view(dtype).astype(np.float64), side.want[arg.name], side.scale[arg.name]
        if arg.name in side.spared:
            spare = np.isfinite(got) & ~np.isfinite(want)
            want, scale = (np.where(spare, s, x) for s, x in zip(side.spared[arg.name], (want, scale), strict=True))
        payload = words << 1 >> 1  # without the sign
        finite = np.isfinite(got) & np.isfinite(want)
        same = np.isnan(got) & np.isnan(want) | (got == want)
        if self.case.kind in NOT_FINITE:  # which of the two comes of the other depends on the order of a sum
            same |= ~np.isfinite(got) & ~np.isfinite(want)
        ratio = np.where(same & (payload != pattern(FILL, size)), 0.0, inf)
        tolerance = rounding(dtype, arg.reduces(self.case.sizes)) * (np.abs(want) + np.maximum(scale, least(dtype)))
        ratio[finite] = np.nan_to_num(np.abs(got[finite] - want[finite]) / tolerance[finite], nan=inf)
        at = tuple(map(int, np.unravel_index(int(ratio.argmax()), ratio.shape)))
        where = arg.name, at, float(got[at]), float(side.want[arg.name][at])
        text = f"{arg.name}{list(at)} = {where[2]:.9g}, expected {where[3]:.9g}{self.mode}{then}"
        if ratio[at] == inf:
            raise BrokenKernelError(text + origin(int(payload[at]), size), *where)
        return Result(self.kernel.name, self.case, float(ratio[at]), *where, text if ratio[at] > 1 else "")

    @property
    def mode(self) -> str:
        """The flags, for a reason."""
        return "".join(f", {n}_add={on}" for n, on in self.adds.items())
