"""A process that proves AMX on this machine, and may crash: ``python -m cpuopt.kernels.toolkit.micro.amx.prove``.

It compares products of random words on AMX with their model, bit by bit: for many numbers of rows and of words along
k, written and added, with zeros, infinities and NaN, and without subnormal numbers. Those of int8 it compares with
NumPy's. Then it compares the time of a product with that of the micro-kernel that is used without AMX.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .....isolate.serve import Say, serve
from .....ops.storage import TYPES, WIDE
from ....compile.jit import helper
from ...blocks import multiply_by
from ...quads import WORD
from ...simd import LANES, NR, at
from ..generic import PAIRS
from . import INTEGERS, QUADS_BY, multiply_of
from . import ROWS as TILE_ROWS

DEPTHS = *range(1, 18), 31, 32, 33, 100, 300
ROWS = *range(1, 34), 47, 64, 70
FLOAT = TYPES[WIDE].dtype
REPEATS = 200
SEED = 12


def caller(multiply):
    """Make a function that multiplies rows with a panel."""

    @helper()
    def run(a, b, c, depth, add):
        rows, width = a.shape
        multiply(rows, at(a, 0), width, at(b, 0), NR, at(c, 0), NR, depth, add, (at(b, 0), 0, 0, 0))

    return run


def words(rng, shape, special):
    """Draw words of two bfloat16: normal ones, and some zeros, infinities and NaN."""
    exponents = rng.integers(107, 147, (*shape, 2), dtype=np.uint32)
    signs, digits = rng.integers(0, 2, (*shape, 2), dtype=np.uint32), rng.integers(0, 128, (*shape, 2), dtype=np.uint32)
    halves = (signs << 15) | (exponents << 7) | digits
    if special:
        among = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0], np.uint32)[: 5 if special > 1 else 2]
        halves = np.where(rng.random(halves.shape) < 0.05, rng.choice(among, halves.shape), halves)
    return (halves[..., 0] | (halves[..., 1] << 16)).astype(np.uint32).view(FLOAT)


def compare_integers(vectors: int = NR // LANES) -> int:
    """Count the products of int8 that are not those of NumPy."""
    rng, differ = np.random.default_rng(SEED), 0
    run, columns = caller(multiply_of(vectors, tiles=True, by=QUADS_BY)), vectors * LANES
    for depth in DEPTHS:
        for rows in ROWS:
            a = rng.integers(-128, 128, (rows, depth + 3, WORD)).astype(np.int8)
            b = rng.integers(0, 256, (depth, NR, WORD)).astype(np.uint8)
            begin = rng.integers(-(2**20), 2**20, (rows, NR)).astype(np.int32)
            wide = (x.astype(np.float64) for x in (a[:, :depth], b))  # whose sums are exact here
            sums = np.tensordot(*wide, axes=([1, 2], [0, 2])).astype(np.int32)
            for add in (False, True):
                got = begin.copy().view(FLOAT)
                run(*(x.view(FLOAT)[..., 0] for x in (a, b)), got, depth, add)
                differ += bool((got.view(np.int32) != sums + begin * add)[:, :columns].any())
    return differ


def compare() -> int:
    """Count the products that differ."""
    rng, differ = np.random.default_rng(SEED), 0
    both = [[caller(multiply_of(n, tiles=tiles)) for tiles in (True, False)] for n in (1, 2)]
    for depth in DEPTHS:
        for rows in ROWS:
            a, b = words(rng, (rows, depth + 3), rows % 3), words(rng, (depth, NR), depth % 3)
            begin = rng.normal(size=(rows, NR)).astype(FLOAT)
            for tiles, model in both:
                for add in (False, True):
                    got, want = begin.copy(), begin.copy()
                    tiles(a, b, got, depth, add)
                    model(a, b, want, depth, add)
                    none = np.isnan(got) & np.isnan(want)
                    differ += bool(((got.view(np.uint32) != want.view(np.uint32)) & ~none).any())
    return differ


def seconds(run, a, b) -> float:
    """Return the time of a product, the least of many."""
    c, best = np.zeros((a.shape[0], NR), FLOAT), np.inf
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(a, b, c, a.shape[1], False)
        best = min(best, time.perf_counter() - start)
    return float(best)


def prove(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Return whether AMX is to be used, and why."""
    if differ := compare():
        return {"use": False, "reason": f"{differ} products have other bits than their model"}
    if INTEGERS and (differ := sum(compare_integers(n) for n in (1, 2))):
        return {"use": False, "reason": f"{differ} products of int8 have other bits than they should"}
    rng = np.random.default_rng(SEED)
    a, b = words(rng, (4 * TILE_ROWS, 256), 0), words(rng, (256 * PAIRS.lines, NR), 0)
    mine, other = (
        seconds(caller(m), a, b) for m in (multiply_of(NR // LANES, tiles=True), multiply_by(PAIRS, PAIRS.wide))
    )
    return {"use": mine < other, "reason": f"{other / mine:.1f} times as fast as the next micro-kernel"}


if __name__ == "__main__":
    serve({"prove": prove})
