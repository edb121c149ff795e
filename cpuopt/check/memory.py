"""The arrays of a call: what those that it only writes hold before it, and guard words around each.

A kernel that knows what its outputs or its scratch hold when it is judged can be right only then. So every judge fills
them by `Filling`: with poison, which shows what was not written; with numbers of a random scale, drawn by a seed of the
system; with zeros, as fresh memory; with results that belong to other inputs, as memory that a step uses again; with
the right results but for one element.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import RefusedError
from ..kernels.registry import Kernel
from ..ops.declaration import Op
from ..ops.storage import is_float, storage
from .cases import Arguments, Array

GUARD = 512
"""Words between two arrays, one half for each."""
MARGINS = 1 << 16
"""Words before the first array and after the last, to catch writes far outside."""
FILL, SCRATCH, OUTSIDE = 0x7FC0F111, 0x7FC05C7A, 0x7FD00000  # quiet NaNs: arithmetic keeps their low bits
"""The poison before a call, as float32; for another type, a NaN with the same low bits. Guard words count up from
`OUTSIDE`: a loop that runs too far computes with those it reads, and writes one of them back, which would go unseen if
they were all the same."""
HUGE = tuple(int(np.float32(x).view(np.uint32)) for x in (1e30, -1e30))
"""The first guard words of some calls, which count up from them: max and min may ignore NaN, but not these."""
ORIGIN = {
    FILL: ": as filled before the call, so not written, or added to in place of being overwritten",
    SCRATCH: ": from scratch that was read before it was written",
}


def bits(x: Array) -> Array:
    """View an array as unsigned integers."""
    return x.view(f"u{x.itemsize}")


def origin(x: Any) -> str:
    """Return the origin of a value, if it is one of the NaNs above."""
    payload = int(bits(x)) & (1 << 8 * x.itemsize - 1) - 1  # without the sign
    known = {storage(x).nan(word): text for word, text in ORIGIN.items()}
    return known.get(payload, ": read from outside an array" if OUTSIDE <= payload < OUTSIDE + 2**20 else "")


def fill(x: Array, word: int) -> None:
    """Fill an array with a float32 that is given by its bits: with the number, or with NaN of the same low bits."""
    number = np.uint32(word).view(np.float32)
    if is_float(x) and np.isnan(number):
        bits(x).fill(storage(x).nan(word))
    elif is_float(x):
        x.fill(number)
    else:
        bits(x).fill(word & (1 << 8 * x.itemsize) - 1)


def spoil(x: Array, rng: np.random.Generator) -> None:
    """Change one element a little: the second bit of a float's mantissa."""
    if x.size:
        bits(x).flat[rng.integers(x.size)] ^= 1 << (
            storage(x).limits.nmant - 2 if is_float(x) else min(21, 8 * x.itemsize - 2)
        )


FILLINGS = ("numbers", "zeros", "other")
"""What outputs hold before a call besides poison: numbers of a random scale, zeros, results of unrelated inputs."""
REPEAT = "CPUOPT_FILLING"
"""Environment variable: the seed of every `Filling`, to repeat a failure."""
TILE, FEW = 1 << 16, 1 << 12
"""Numbers that are drawn at one time, for all arrays of more than FEW."""
SMALLEST, LARGEST = -4.0, 4.0
"""The decimal exponents of the scale of the numbers."""


class Filling:
    """What outputs and scratch hold before a call.

    Attributes
    ----------
    seed : drawn by the system, or that of `REPEAT`.
    """

    def __init__(self) -> None:
        self.seed = int(os.environ.get(REPEAT) or secrets.randbits(32))
        self.rng = np.random.Generator(np.random.SFC64(self.seed))

    def __str__(self) -> str:
        return f" ({REPEAT}={self.seed} repeats it)"

    def kinds(self) -> list[str]:
        """Return `FILLINGS` in a random order."""
        return [str(kind) for kind in self.rng.permutation(FILLINGS)]

    def put(self, x: Array, kind: str, results: Array | None = None) -> None:
        """Fill an array; ``almost`` and ``other`` need the right results, and without them are ``numbers``."""
        if kind == "zeros":
            x.fill(0)
        elif results is None or kind == "numbers" or not x.size:
            self._numbers(x)
        elif kind == "almost":
            np.copyto(x, results)
            spoil(x, self.rng)
        elif kind == "other":
            np.copyto(x, unrelated(results, self.rng))
        else:
            raise ValueError(kind)

    @cached_property
    def _tile(self) -> Array:
        return self.rng.standard_normal(TILE, np.float32)

    def _numbers(self, x: Array) -> None:
        """Fill an array with normal numbers of a random scale; those of integers are small."""
        flat, n = x.reshape(-1), min(x.size, TILE)
        at = self.rng.integers(TILE - n + 1)
        size = 10.0 ** self.rng.uniform(SMALLEST, LARGEST) if is_float(x) else 30.0
        part = self.rng.standard_normal(n, np.float32) if n <= FEW else self._tile[at : at + n]
        part = part * np.float32(size)
        for lo in range(0, x.size, TILE):
            flat[lo : lo + TILE] = part[: x.size - lo]


def unrelated(results: Array, rng: np.random.Generator) -> Array:
    """Return the results of a call in other places: each row is that of another row's inputs."""
    if len(results) < 2:
        return results[..., ::-1]
    return np.roll(results, int(rng.integers(1, len(results))), axis=0)


def _own(words: int) -> Array:
    return np.empty(words, np.uint32)


_rooms: list[Callable[[int], Array]] = [_own]


@contextmanager
def rooms(of: Callable[[int], Array] = _own) -> Iterator[None]:
    """Let each new `Memory` lie in the words that a function returns, as in memory that processes share."""
    _rooms.append(of)
    try:
        yield
    finally:
        _rooms.pop()


class Memory:
    """Arrays in one buffer: each on a cache line, guard words before and after it.

    Parameters
    ----------
    contents : the content of each array, absent ones too, by name or by a tuple that ends with the name.
    indices : the arrays of indices, which have zeros around them, so that an index read from there is valid.
    """

    def __init__(self, contents: Mapping[Any, Array], indices: Collection[str] = ()) -> None:
        self.spans: dict[Any, slice] = {}
        end = MARGINS
        for key, x in contents.items():
            words = -(-x.nbytes // 4)
            self.spans[key] = slice(end, end + words)
            end += -(-(words + GUARD) // 16) * 16
        end += MARGINS
        room = _rooms[-1](end + 16)
        start = -room.ctypes.data // 4 % 16
        self.words = room[start : start + end]
        self.arrays: dict[Any, Array] = {
            key: np.ndarray(x.shape, x.dtype, self.words, 4 * self.spans[key].start) for key, x in contents.items()
        }
        every = self.words.view(np.uint8)
        self._ends = [
            every[4 * s.start + x.nbytes : 4 * s.stop]
            for s, x in zip(self.spans.values(), contents.values(), strict=True)
            if x.nbytes % 4
        ]
        """What is left of the last word of arrays whose elements have fewer than 4 bytes."""
        edges = [0, *(at for span in self.spans.values() for at in (span.start, span.stop)), end]
        self._gaps = [slice(*edges[i : i + 2]) for i in range(0, len(edges), 2)]
        self._calm = [self.spans[key] for key in contents if name_of(key) in indices]
        self.surround(OUTSIDE)
        self.put(contents)

    def surround(self, word: int) -> None:
        """Fill the memory around the arrays with words that count up from `word`."""
        self.guards: list[Array] = []
        for end in self._ends:
            end.fill(word & 0xFF)
        for gap in self._gaps:
            self.guards.append(np.arange(word, word + gap.stop - gap.start, dtype=np.uint32))
            word += gap.stop - gap.start
            for span in self._calm:
                if gap.stop == span.start:
                    self.guards[-1][-GUARD // 2 :] = 0
                if gap.start == span.stop:
                    self.guards[-1][: GUARD // 2] = 0
            self.words[gap] = self.guards[-1]

    def put(self, contents: Mapping[Any, Array]) -> None:
        """Copy into some arrays."""
        for key, x in contents.items():
            np.copyto(self.arrays[key], x)

    def require_whole(self) -> None:
        """Raise if a word around the arrays changed."""
        if any((end != self.guards[0][0] & 0xFF).any() for end in self._ends):
            raise RefusedError("wrote outside its arrays: 1 past the end of one with 2-byte elements")
        for gap, guards in zip(self._gaps, self.guards, strict=True):
            if not np.array_equal(self.words[gap], guards):
                at = gap.start + int((self.words[gap] != guards).argmax())
                key, span = min(self.spans.items(), key=lambda s: max(s[1].start - at, at - s[1].stop + 1))
                past = at - span.stop + 1
                where = f"{past} past the end" if past > 0 else f"{span.start - at} before the beginning"
                name = name_of(key)
                raise RefusedError(f"wrote outside its arrays: {where} of '{name}'", witness={"argument": name})

    def require_same(self, contents: Mapping[Any, Array]) -> None:
        """Raise if arrays differ from these in any bit."""
        for key, x in contents.items():
            changed = bits(self.arrays[key]).ravel() != bits(x).ravel()
            if changed.any():
                name = name_of(key)
                said = f"changed '{name}', which it may only read, at element {changed.argmax()}"
                raise RefusedError(said, witness={"argument": name})


def name_of(key: Any) -> str:
    """Return the name in a key of `Memory`."""
    return str(key[-1] if isinstance(key, tuple) else key)


def absent_as_empty(kernel: Kernel, given: Arguments) -> dict[str, Array]:
    """Return the arrays for a kernel; an absent one has length zero."""
    kernel.require(name for name, x in given.items() if x is None)
    return {
        a.name: np.empty((0,) * len(a.shape), kernel.dtype(a)) if given[a.name] is None else given[a.name]
        for a in kernel.op.arrays
    }


def call_args(op: Op, arrays: Mapping[str, Array], given: Arguments, adds: Mapping[str, bool]) -> list[Any]:
    """List the arguments of a call, scratch aside."""
    args: list[Any] = []
    for a in op.args:
        args.append(given[a.name] if a.kind == "scalar" else arrays[a.name])
        args += [adds.get(a.name, False)] if a.kind == "acc" else []
    return args
