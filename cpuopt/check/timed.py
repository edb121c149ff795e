"""The arrays of a timed kernel: their content before each sample, and the check of the results after it.

A kernel that was right on small arrays may be wrong on those that are timed, or may skip work by caching an earlier
result. So before every sample, outputs hold NaN, zeros, numbers of a random scale, results of other inputs, or the
correct results with one element in sixteen corrupted; scratch holds NaN, zeros or numbers; and inputs change from trial
to trial, in the same places. None of this is timed, and it is the same for both kernels. They share all arrays, scratch
too: the same machine code may take 15 % longer on scratch in another place.

A sample of several calls has arrays of its own for each of them, so no call finds the work of another.

Some calls before and after the timing, and samples drawn at random, are judged by the tolerance of ``check``; of every
sample, `PROBED` elements are compared, so that no call can be skipped now and then. Not seen
is a kernel that keeps results outside its arguments and returns them when the same inputs come again. There are two
sets of inputs, and both come often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from ..errors import CHEATING, UNCHECKED, RefusedError
from ..isolate.serve import doing
from ..kernels.registry import Kernel
from ..kernels.toolkit import threads as numba_threads
from ..ops.declaration import Op, Spec
from ..ops.storage import TYPES, WIDE, storage
from .cases import Arguments, Array, Case, arguments, normal, reference, risen, scalars
from .judge import Wanted, called, expected, least, require_surroundings, require_usual, surroundings
from .memory import (
    FILL,
    FILLINGS,
    GUARD,
    OUTSIDE,
    SCRATCH,
    Filling,
    Memory,
    absent_as_empty,
    call_args,
    fill,
)
from .result import MARGIN, Result, worst

WHILE, AFTERWARDS, UNSEEN = "while it was timed", "after it was timed", "with inputs that it had not seen"
LATER = (WHILE, AFTERWARDS, UNSEEN)
"""When a kernel that was right before is judged again: one that is wrong then knew when it was judged."""
LARGE = 1 << 22
"""Elements beyond which an input stays as it is from trial to trial, while a smaller one changes."""
JUDGED = 1 << 20
"""Elements of outputs up to which a sample of every trial is judged; of larger ones one trial in `SELDOM` or more."""
SELDOM = 32
PROBED = 64
"""Elements of every sample that are compared with the wanted ones, of one call and array drawn at random."""
OUTS, WORK = ("nan", "almost", *FILLINGS), ("nan", "numbers", "zeros")
"""What outputs and scratch hold before a call; ``almost`` are right results but for one element in 16."""
BEFORE = ((0, "nan", "nan"), (0, "almost", "kept"), (1, "other", "kept"), (1, "numbers", "numbers"),
          (0, "zeros", "zeros"), (0, "nan", "kept"))  # fmt: skip
"""The calls before the timing: set of inputs, outputs, scratch; ``kept`` is what the last call left there."""
AFTER = ((1, "almost", "nan"), (0, "other", "kept"), (0, "numbers", "kept"))


def draw(op: Op, case: Case, seed: int, more: int = 0) -> tuple[Arguments, list[Wanted]]:
    """Draw the scalars and shapes of a call, and two sets of inputs, or more; large inputs may be the same in all."""
    rng, adds = np.random.default_rng(seed), case.adds or {}
    known = scalars(op, case, rng)
    first = arguments(op, case, rng, given_scalars=known)
    reads = [x for a in op.arrays if a.kind in ("in", "index", "state") and (x := first[a.name]) is not None]
    stays = LARGE if any(x.size <= LARGE for x in reads) and not op.inverts else inf
    every = [first]
    if not op.inverts:
        turned = {n: _turned(x) for n, x in first.items() if isinstance(x, np.ndarray) and x.size <= stays}
        every.append(first | {n: risen(x) if op.by_name[n].rising else x for n, x in turned.items()})
    while len(every) < 2 + more:  # of a backward all that is saved belongs to each other
        other = arguments(op, case, rng, given_scalars=known)
        every.append({n: x if not isinstance(x, np.ndarray) or x.size <= stays else first[n] for n, x in other.items()})
    sets, shared = [], dict[str, Array]()
    for given in every:
        contents = {a.name: given[a.name] for a in op.arrays if a.kind in ("in", "index", "state")}
        contents = {n: x for n, x in contents.items() if x is not None}
        starts = {}
        for a in op.arrays:
            if adds.get(a.name) and (x := given[a.name]) is not None:
                if a.name not in shared:
                    shared[a.name] = normal(x.shape, rng).astype(x.dtype)
                starts[a.name] = shared[a.name]
        wanted, changed = expected(op, case, given, rng).added_to(starts, adds).narrow(), dict[str, Array]()
        for name, x in (contents | starts).items():
            if name in wanted.values and x.ndim > 1:
                rows = np.flatnonzero((wanted.values[name] != x).any(axis=tuple(range(1, x.ndim))))
                if 2 * len(rows) < len(x):
                    changed[name] = rows
        sets.append(replace(wanted, contents=contents | starts, rows=changed))
    return first, sets


def _turned(x: Array) -> Array:
    return np.ascontiguousarray(x.ravel()[::-1].reshape(x.shape))


class TimedKernels:
    """Some kernels of one op on the same arrays.

    Parameters
    ----------
    kernels : the kernel of each side.
    drawn : what `draw` returned before for the same; by default drawn now.
    secret : whether no right result of these inputs is put into an array before a call.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        case: Case,
        seed: int,
        drawn: tuple[Arguments, list[Wanted]] | None = None,
        secret: bool = False,
    ) -> None:
        self.kernels, self.case, self.secret = kernels, case, secret
        self.op = next(iter(kernels.values())).op
        self.rng, self.filling = np.random.default_rng(seed), Filling()
        self.given, self.sets = drawn or draw(self.op, case, seed)
        self.outs = [n for n in self.sets[0].values if n not in self.sets[0].contents]
        """The arrays whose content the call must not use."""
        self.work = {side: list(self._scratch_of(k).values()) for side, k in kernels.items()}
        written = sum(x.size for x in self.sets[0].values.values())
        self.chance = min(1.0, max(1 / SELDOM, JUDGED / written))
        """The probability that a sample of a trial is judged."""
        self.names = [n for n, x in self.sets[0].values.items() if x.size]
        self.threads, self.surroundings = numba_threads.get_threads(), surroundings()
        self.worst = {side: Result(k.name, case, 0.0) for side, k in kernels.items()}
        self.place(1)

    def _scratch_of(self, kernel: Kernel) -> Mapping[str, Spec]:
        """Return the scratch that a kernel asks for; raise `RefusedError` for more than it can need."""
        found = kernel.work(self.case.sizes)
        with named(kernel, self.case, "before it was timed"):
            require_usual(kernel, self.case.sizes, found)
        return found

    @cached_property
    def unrelated(self) -> dict[str, Array]:
        """The results of inputs that no call is given."""
        given = arguments(self.op, self.case, np.random.default_rng(self.filling.seed))
        with np.errstate(all="ignore"):
            return reference(self.op, given, WIDE)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of one call, without scratch."""
        return sum(x.nbytes for x in self.given.values() if isinstance(x, np.ndarray))

    def place(self, slots: int) -> None:
        """Lay out the arrays of so many calls, then scratch, where each kernel's begins at the same place.

        If it is `secret`, each call has scratch of its own: what a call left there could be the result of a later one.
        """
        self.held: list[Wanted | None] = [None] * slots
        arrays, room = absent_as_empty(next(iter(self.kernels.values())), self.given), 0
        spans: dict[str, list[slice]] = {side: [] for side in self.kernels}
        for side, work in self.work.items():
            at = 0
            for (size,), dtype in work:
                n = -(-size * TYPES[dtype].bytes // 4)
                spans[side].append(slice(at, at + n))
                at += -(-(n + GUARD) // 16) * 16
            room = max(room, at)
        indices = [a.name for a in self.op.arrays if a.kind == "index"]
        every = {(i, name): x for i in range(slots) for name, x in arrays.items()}
        parts, nothing = range(slots if self.secret else 1), np.broadcast_to(np.uint32(0), (room,))
        self.memory = Memory(every | {(i, "scratch"): nothing for i in parts}, indices)
        placed, scratch = self.memory.arrays, [self.memory.arrays[i, "scratch"] for i in parts]
        self.slots = [{name: placed[i, name] for name in arrays} for i in range(slots)]
        self.scratch = {
            side: [
                [np.ndarray(*spec, x[span]) for span, spec in zip(of, self.work[side], strict=True)] for x in scratch
            ]
            for side, of in spans.items()
        }
        """For each side the scratch of each call, or one for all."""
        self.beyond = {
            side: [[x[span.stop : span.stop + GUARD // 2] for span in of] for x in scratch]
            for side, of in spans.items()
        }
        adds = self.case.adds or {}
        self.args = {
            side: [call_args(self.op, x, self.given, adds) + of[i % len(of)] for i, x in enumerate(self.slots)]
            for side, of in self.scratch.items()
        }

    def swap(self, which: int) -> None:
        """Change the inputs: neighbours among the calls of a sample get different ones."""
        for i in range(len(self.slots)):
            self.hold(i, self.sets[(i + which) % 2])

    def hold(self, i: int, new: Wanted) -> None:
        """Change the inputs of a call."""
        old, slot = self.held[i], self.slots[i]
        if old is new:
            return
        if old:
            self._restore(slot, old)
        for name, x in new.contents.items():
            if old is None or old.contents[name] is not x:
                np.copyto(slot[name], x)
        self.held[i] = new

    def _restore(self, slot: Mapping[str, Array], held: Wanted) -> None:
        """Restore the inputs that the last call changed."""
        for name in held.values:
            if name in held.contents:
                rows = held.rows.get(name)
                if rows is None:
                    np.copyto(slot[name], held.contents[name])
                else:
                    slot[name][rows] = held.contents[name][rows]

    def fill(self, side: str, outs: str, scratch: str, calls: int) -> None:
        """Prepare the arrays of the next sample."""
        doing(self.kernels[side].name)
        for slot, held in zip(self.slots[:calls], self.held, strict=False):
            assert held
            self._restore(slot, held)
            for name in self.outs:
                x = slot[name]
                if outs == "nan":
                    fill(x, FILL)
                elif outs == "other":
                    results = self.unrelated if self.secret else self.sets[held is self.sets[0]].values
                    np.copyto(x, results[name])
                elif outs == "almost" and not self.secret:
                    np.copyto(x, held.values[name])
                    x.flat[self.rng.integers(0, x.size, -(-x.size // 16))] = 0.75
                else:
                    self.filling.put(x, outs)
        for work, ends in zip(self.scratch[side][:calls], self.beyond[side], strict=False):
            for x, beyond in zip(work, ends, strict=True):
                if scratch == "nan":
                    fill(x, SCRATCH)
                elif scratch != "kept":
                    self.filling.put(x, scratch)
                beyond[...] = OUTSIDE

    def judge(self, side: str, calls: int, when: str) -> None:
        """Judge the last sample.

        Raises
        ------
        RefusedError
            For an error of a kernel.
        """
        with named(self.kernels[side], self.case, when):
            for i, held in enumerate(self.held[:calls]):
                assert held
                found = held.judge(self.kernels[side], self.slots[i], str(self.filling))
                if found.refused:
                    said = f"is wrong on the arrays that are timed: {found.reason}"
                    raise RefusedError(said, found.verdict, found.witness())
                self.worst[side] = worst([self.worst[side], found])
                read = {(i, n): x for n, x in held.contents.items() if n not in held.values}
                self.memory.require_same(read)
            self.memory.require_whole()
            if any((beyond != OUTSIDE).any() for ends in self.beyond[side][:calls] for beyond in ends):
                raise RefusedError("wrote outside its arrays: past the end of its scratch")
            require_surroundings(self.surroundings)

    def probe(self, side: str, calls: int) -> None:
        """Compare some elements of a sample; judge all of it where one is wrong. Takes microseconds.

        Raises
        ------
        RefusedError
            For an error of a kernel.
        """
        i = int(self.rng.integers(calls))
        held, name = self.held[i], self.names[self.rng.integers(len(self.names))]
        assert held
        got = self.slots[i][name].reshape(-1)
        at = self.rng.integers(0, got.size, PROBED)
        if (rows := held.rows.get(name)) is not None and len(rows):
            columns = got.size // len(held.values[name])
            at = rows[self.rng.integers(0, len(rows), PROBED)] * columns + at % columns
        want = held.values[name].reshape(-1)[at]
        error = np.abs(got[at] - want)
        allowed, beyond, more = held.tolerance(self.op.by_name[name])
        size = np.maximum(held.scale[name].reshape(-1)[at], least(storage(got))) + beyond * np.abs(want)
        if name in held.operands:
            size = size + more * held.operands[name].reshape(-1)[at]
        if not (error <= MARGIN * allowed * size).all():
            self.judge(side, calls, WHILE)

    def audit(self, side: str, calls: Sequence[tuple[int, str, str]], when: str) -> None:
        """Call a kernel some times, and judge each call."""
        for which, outs, scratch in calls:
            self.swap(which)
            self.fill(side, outs, scratch, 1)
            with named(self.kernels[side], self.case, when):
                called(self.kernels[side], self.args[side][0], self.threads)
            self.judge(side, 1, when)


@contextmanager
def named(kernel: Kernel, case: Case, when: str) -> Iterator[None]:
    """Name the kernel, the circumstances and the case in the error of a block."""
    try:
        yield
    except RefusedError as e:
        word = CHEATING if when in LATER and e.word != UNCHECKED else e.word
        where = {"kernel": kernel.name, "case": str(case), **e.witness}
        raise RefusedError(f"{kernel.name} {e}, {when} ({case})", word, where) from e
