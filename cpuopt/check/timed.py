"""The arrays of a timed kernel: what they hold before each sample, and whether what they hold after it is right.

A kernel that was right on small arrays may be wrong on those that are timed, or may save itself the work once it has
done it. So every sample starts from arrays whose outputs hold something else: NaN, numbers that belong to other inputs,
or the right ones but for one in sixteen; scratch holds NaN or numbers; and inputs change from turn to turn, in the same
places. None of this is timed, and it is the same for both kernels. They share all arrays, scratch too: a kernel on
scratch in another place may take 15 % longer, the very same machine code.

A sample of several calls has arrays of its own for each of them, so no call finds the work of another.

What is judged: some calls before and after the timing, and samples drawn at random, by the tolerance of ``check``. What
is not seen: a kernel that keeps results outside its arguments and returns them when the same inputs come again. There
are two sets of inputs, and both come often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod, sqrt
from typing import Any

import numpy as np

from ..errors import UserError
from ..kernels.registry import Kernel
from ..kernels.toolkit import threads as numba_threads
from ..ops.declaration import Op
from .cases import Arguments, Array, Case, arguments, reference
from .check import (
    EPS,
    FILL,
    GUARD,
    MARGIN,
    OUTSIDE,
    SAMPLES,
    SCRATCH,
    STEP,
    TINY,
    K,
    Result,
    check_all,
    filled,
    row_size,
)

DEAR_FLOPS, DEAR_FLOATS = 5e9, 1 << 23
"""Beyond these, one perturbation of the reference stands for several."""
LARGE = 1 << 22
"""Elements beyond which an input stays as it is from turn to turn, where a smaller one changes."""
JUDGED = 1 << 20
"""Elements of outputs up to which a sample of every turn is judged; of larger ones fewer, but one turn in `SELDOM`."""
SELDOM = 32
CHUNK = 1 << 20
TILE = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
"""Plausible numbers."""
FILLS = ("nan", "other", "almost")
"""What outputs hold before a call: NaN, what belongs to other inputs, what is right but for one element in 16."""
BEFORE = ((0, "nan", "nan"), (0, "almost", "kept"), (1, "other", "kept"), (1, "almost", "numbers"), (0, "nan", "kept"))
"""The calls before the timing: set of inputs, outputs, scratch; ``kept`` is what the last call left there."""
AFTER = ((1, "almost", "nan"), (0, "other", "kept"))


@dataclass
class Wanted:
    """What a call must give, by argument: values, and how far from them each may lie for a ratio of 1."""

    values: dict[str, Array]
    allowed: dict[str, Array]

    def judge(self, kernel: Kernel, case: Case, got: Mapping[str, Array], when: str) -> Result:
        """Compare what a call wrote, and return its worst element; what is not finite has an infinite ratio."""
        worst = Result(kernel.name, case, 0.0)
        for name, want in self.values.items():
            ratio, at = _worst(got[name].ravel(), want.ravel(), self.allowed[name].ravel())
            if ratio > worst.ratio:
                index = tuple(map(int, np.unravel_index(at, want.shape)))
                x, y = float(got[name][index]), float(want[index])
                reason = f"{name}{list(index)} = {x:.9g}, expected {y:.9g}, {when}" if ratio > 1 else ""
                worst = Result(kernel.name, case, ratio, name, index, x, y, reason)
        return worst


def _worst(got: Array, want: Array, allowed: Array) -> tuple[float, int]:
    """Find the largest ratio, and where it is."""
    most, where = -1.0, 0
    for lo in range(0, got.size, CHUNK):
        g, w = (x[lo : lo + CHUNK].astype(np.float64) for x in (got, want))
        with np.errstate(invalid="ignore"):
            ratio = np.abs(g - w) / allowed[lo : lo + CHUNK]
        ratio[np.isnan(ratio)] = inf
        ratio[(g == w) | (np.isnan(g) & np.isnan(w))] = 0
        at = int(ratio.argmax())
        if ratio[at] > most:
            most, where = float(ratio[at]), lo + at
    return most, where


def wanted(
    op: Op, sizes: Mapping[str, int], given: Arguments, starts: Mapping[str, Array], rng: np.random.Generator
) -> Wanted:
    """Work out what a call must give: by the reference, within the tolerance of ``check``.

    Parameters
    ----------
    starts : of the gradients that are added to.
    """
    values = reference(op, given)
    floats = sum(x.size for x in given.values() if isinstance(x, np.ndarray))
    samples = 1 if op.flops(sizes) > DEAR_FLOPS or floats > DEAR_FLOATS else SAMPLES
    read = [a.name for a in op.arrays if a.role in ("in", "state") and given[a.name] is not None]
    moved = {n: np.zeros(x.shape) for n, x in values.items()}
    for _ in range(samples):
        signs = {n: rng.choice(np.array([-STEP, STEP], np.float32), given[n].shape) for n in read}
        nudged = reference(op, given | {n: given[n] * (1 + signs[n].astype(np.float64)) for n in read})
        for n, x in nudged.items():
            moved[n] += ((x - values[n]) / STEP) ** 2 / samples
    found = Wanted({}, {})
    for n, x in values.items():
        scale = np.sqrt(moved.pop(n))
        scale = (np.maximum(scale, row_size(scale)) if samples == 1 else scale) + row_size(x)
        if n in starts:
            x, scale = x + starts[n], scale + np.abs(starts[n])
        rounding = K * EPS * sqrt(op.by_name[n].reduces(sizes))
        found.values[n] = x.astype(np.float32)
        found.allowed[n] = (rounding * (np.abs(x) + np.maximum(scale, TINY / EPS))).astype(np.float32)
    return found


@dataclass
class Inputs:
    """One set of inputs: what all that is read holds before a call, what the call must give, and the rows it changes.

    Attributes
    ----------
    rows : of what is read and written, where a call changes few of them.
    """

    contents: dict[str, Array]
    wanted: Wanted
    rows: dict[str, Array] = field(default_factory=dict)


def draw(op: Op, case: Case, adds: Mapping[str, bool], seed: int) -> tuple[Arguments, list[Inputs]]:
    """Draw the scalars and shapes of a call, and two sets of inputs; large inputs may be the same in both."""
    rng = np.random.default_rng(seed)
    first = arguments(op, case, rng)
    if op.inverts:  # what was saved from the forward belongs to it
        second = arguments(op, case, rng)
    else:
        reads = [x for a in op.arrays if a.role in ("in", "index", "state") and (x := first[a.name]) is not None]
        stays = LARGE if any(x.size <= LARGE for x in reads) else inf
        second = {n: _turned(x) if isinstance(x, np.ndarray) and x.size <= stays else x for n, x in first.items()}
    sets, shared = [], dict[str, Array]()
    for given in (first, second):
        contents = {a.name: given[a.name] for a in op.arrays if a.role in ("in", "index", "state")}
        contents = {n: x for n, x in contents.items() if x is not None}
        starts = {}
        for a in op.arrays:
            if adds.get(a.name) and given[a.name] is not None:
                shared[a.name] = starts[a.name] = shared.get(a.name, np.resize(TILE, given[a.name].shape))
        one = Inputs(contents | starts, wanted(op, case.sizes, given, starts, rng))
        for name, x in one.contents.items():
            if name in one.wanted.values and x.ndim > 1:
                rows = np.flatnonzero((one.wanted.values[name] != x).any(axis=tuple(range(1, x.ndim))))
                if 2 * len(rows) < len(x):
                    one.rows[name] = rows
        sets.append(one)
    return first, sets


def _turned(x: Array) -> Array:
    return np.ascontiguousarray(x.ravel()[::-1].reshape(x.shape))


class Timed:
    """Some kernels of one op on the same arrays.

    Parameters
    ----------
    kernels : by side.
    adds : the flags of gradients.
    """

    def __init__(self, kernels: Mapping[str, Kernel], case: Case, adds: Mapping[str, bool], seed: int) -> None:
        self.kernels, self.case, self.adds = kernels, case, adds
        self.op = next(iter(kernels.values())).op
        self.rng = np.random.default_rng(seed)
        self.given, self.sets = draw(self.op, case, adds, seed)
        self.outs = [n for n in self.sets[0].wanted.values if n not in self.sets[0].contents]
        """What holds nothing that the call needs."""
        self.floats = {side: [s.floats(case.sizes) for s in k.scratch] for side, k in kernels.items()}
        written = sum(x.size for x in self.sets[0].wanted.values.values())
        self.chance = min(1.0, max(1 / SELDOM, JUDGED / written))
        """Of a turn to have one of its samples judged."""
        self.threads = numba_threads.get_threads()
        self.worst = {side: Result(k.name, case, 0.0) for side, k in kernels.items()}
        self.place(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of one call, without scratch."""
        return 4 * sum(x.size for x in self.given.values() if isinstance(x, np.ndarray))

    def place(self, slots: int) -> None:
        """Lay out the arrays of so many calls, then scratch, where each kernel's begins at the same place."""
        self.slots: list[dict[str, Array]] = []
        self.held: list[Inputs | None] = [None] * slots
        shapes = {a.name: (x.shape if (x := self.given[a.name]) is not None else None, a) for a in self.op.arrays}
        spans: list[list[tuple[str, int, int]]] = []
        end = GUARD
        for _ in range(slots):
            spans.append([])
            for name, (shape, _) in shapes.items():
                n = prod(shape) if shape is not None else 0
                spans[-1].append((name, end, n))
                end += -(-(n + GUARD) // 16) * 16
        scratch: dict[str, list[tuple[int, int]]] = {}
        for side, floats in self.floats.items():
            at, scratch[side] = end, []
            for n in floats:
                scratch[side].append((at, n))
                at += -(-(n + GUARD) // 16) * 16
        total = max((at + n for of in scratch.values() for at, n in of), default=end) + GUARD
        room = np.empty(total + 16, np.uint32)
        start = -room.ctypes.data // 4 % 16
        self.words = room[start : start + total]
        guards = [np.arange(0, GUARD)]
        self.words[:end] = OUTSIDE
        for of in spans:
            made = {}
            for name, at, n in of:
                shape, a = shapes[name]
                made[name] = np.ndarray(shape or (0,) * len(a.shape), a.dtype, self.words, 4 * at)
                guards.append(np.arange(at + n, at + -(-(n + GUARD) // 16) * 16))
                if a.role == "index":  # a stray one must not be wild
                    self.words[at - GUARD // 2 : at + n + GUARD // 2] = 0
            self.slots.append(made)
        self.scratch = {
            side: [np.ndarray((n,), np.float32, self.words, 4 * at) for at, n in of] for side, of in scratch.items()
        }
        self.beyond = {side: [slice(at + n, at + n + GUARD // 2) for at, n in of] for side, of in scratch.items()}
        self.around = np.concatenate(guards)
        self.before = self.words[self.around]
        self.args = {side: [self._args(side, slot) for slot in self.slots] for side in self.kernels}

    def _args(self, side: str, slot: Mapping[str, Array]) -> list[Any]:
        args: list[Any] = []
        for a in self.op.args:
            args.append(self.given[a.name] if a.role == "scalar" else slot[a.name])
            args += [self.adds[a.name]] if a.role == "acc" else []
        return args + self.scratch[side]

    def swap(self, which: int) -> None:
        """Change the inputs: neighbours among the calls of a sample get different ones."""
        for i, slot in enumerate(self.slots):
            old, new = self.held[i], self.sets[(i + which) % 2]
            if old is new:
                continue
            if old:
                self._restore(slot, old)
            for name, x in new.contents.items():
                if old is None or old.contents[name] is not x:
                    np.copyto(slot[name], x)
            self.held[i] = new

    def _restore(self, slot: Mapping[str, Array], held: Inputs) -> None:
        """Bring back what the last call changed of what it reads."""
        for name in held.wanted.values:
            if name in held.contents:
                rows = held.rows.get(name)
                if rows is None:
                    np.copyto(slot[name], held.contents[name])
                else:
                    slot[name][rows] = held.contents[name][rows]

    def fill(self, side: str, outs: str, scratch: str, calls: int) -> None:
        """Bring the arrays of the next sample to what they hold before it."""
        for slot, held in zip(self.slots[:calls], self.held, strict=False):
            assert held
            self._restore(slot, held)
            for name in self.outs:
                x = slot[name]
                if outs == "nan":
                    x.view(np.uint32).fill(FILL)
                elif outs == "other":
                    np.copyto(x, self.sets[held is self.sets[0]].wanted.values[name])
                else:
                    np.copyto(x, held.wanted.values[name])
                    x.flat[self.rng.integers(0, x.size, -(-x.size // 16))] = 0.75
        for x, place in zip(self.scratch[side], self.beyond[side], strict=True):
            if scratch == "nan":
                x.view(np.uint32).fill(SCRATCH)
            elif scratch == "numbers":
                for lo in range(0, x.size, TILE.size):
                    x[lo : lo + TILE.size] = TILE[: x.size - lo]
            self.words[place] = OUTSIDE

    def judge(self, side: str, calls: int, when: str) -> None:
        """Judge the last sample.

        Raises
        ------
        UserError
            For what a kernel did wrong.
        """
        kernel = self.kernels[side]
        for slot, held in zip(self.slots[:calls], self.held, strict=False):
            assert held
            found = held.wanted.judge(kernel, self.case, slot, when)
            if found.ratio > MARGIN:
                raise UserError(f"{kernel.name} is wrong on the arrays that are timed: {found.reason} ({self.case})")
            self.worst[side] = max(self.worst[side], found, key=lambda r: r.ratio)
            for name, x in held.contents.items():
                if name not in held.wanted.values and not np.array_equal(slot[name], x):
                    raise UserError(f"{kernel.name} changed '{name}', which it may only read, {when} ({self.case})")
        around = self.words[self.around] != self.before
        past = any((self.words[place] != OUTSIDE).any() for place in self.beyond[side])
        if around.any() or past:
            raise UserError(f"{kernel.name} wrote outside its arrays, {when}{self._nearest(around)} ({self.case})")
        if (now := numba_threads.get_threads()) != self.threads:
            raise UserError(f"{kernel.name} left numba with {now} threads; it was called with {self.threads}")

    def _nearest(self, around: Array) -> str:
        """Name the array behind which a word changed."""
        if not around.any():
            return ", past the end of its scratch"
        at = int(self.around[around.argmax()]) * 4 + self.words.ctypes.data
        ends = [(x.ctypes.data + x.nbytes, name) for slot in self.slots for name, x in slot.items()]
        end, name = max((e for e in ends if e[0] <= at), default=(0, ""))
        return f": {(at - end) // 4 + 1} past the end of '{name}'" if name else f": before '{ends[0][1]}'"

    def audit(self, side: str, calls: Sequence[tuple[int, str, str]], when: str) -> None:
        """Call a kernel some times, and judge each call."""
        for which, outs, scratch in calls:
            self.swap(which)
            self.fill(side, outs, scratch, 1)
            try:
                self.kernels[side].function(*self.args[side][0])
            except Exception as e:
                raise UserError(f"{self.kernels[side].name} raised {type(e).__name__}: {e}, {when}") from e
            self.judge(side, 1, when)


def judge_call(
    kernels: Sequence[Kernel],
    case: Case,
    args: Sequence[Sequence[Any]],
    absent: frozenset[str],
    rng: np.random.Generator,
    when: str,
) -> list[Result]:
    """Judge several kernels on the arrays of a call of an engine; what the last of them wrote stays there.

    Parameters
    ----------
    args : of each kernel: those of the op, the same for all, then its scratch.

    Raises
    ------
    UserError
        For one that is wrong.
    """
    op, results, n = kernels[0].op, [], len(kernels[0].op.params)
    named = dict(zip(op.params, args[0], strict=False))
    given: Arguments = {a.name: None if a.name in absent else named[a.name] for a in op.args}
    written = [a for a in op.written if given[a.name] is not None]
    added = [a.name for a in written if named.get(f"{a.name}_add")]
    needed = wanted(op, case.sizes, given, {name: given[name].copy() for name in added}, rng)
    needs = [a.name for a in op.arrays if a.role in ("in", "index", "state") and given[a.name] is not None] + added
    kept = {
        name: given[name].copy()
        for name in needs
        if any(np.may_share_memory(given[name], given[w.name]) for w in written)
    }
    for kernel, mine in zip(kernels, args, strict=True):
        for name, x in kept.items():
            np.copyto(given[name], x)
        fill = FILL if rng.random() < 0.5 else int(TILE[:1].view(np.uint32)[0])
        for a in written:
            if not any(np.may_share_memory(given[a.name], given[name]) for name in needs):
                given[a.name].view(np.uint32).fill(fill)
        for x in mine[n:]:
            np.copyto(x, filled(x.shape, SCRATCH))
        kernel.function(*mine)
        found = needed.judge(kernel, case, {a.name: given[a.name] for a in written}, when)
        if found.ratio > MARGIN:
            raise UserError(f"{kernel.name} is wrong on the arrays that are timed: {found.reason} ({case})")
        results.append(found)
    return results


def require_right(kernels: Sequence[Kernel], threads: int) -> list[dict[str, Any]]:
    """Check kernels on the quick cases.

    Raises
    ------
    UserError
        For one that fails: no time is told of a kernel that is wrong.
    """
    results = check_all(dict.fromkeys(kernels), quick=True, threads=(threads,))
    for r in results:
        if r.verdict == "FAIL":
            raise UserError(f"{r.kernel} is wrong, so it is not timed: {r.reason} ({r.case})")
    return [r.describe() for r in results]
