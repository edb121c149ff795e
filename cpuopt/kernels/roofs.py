"""Kernels that measure the machine's roofs: multiply-adds of three types in registers, and streams from its memory.

Streams come from each level of memory. Each function works on one part of an array per thread, many rounds in one call,
so that starting threads does not count. Vectors are explicit, so that no compiler option changes the measurement.
"""

import numpy as np
from numba import prange

from .compile.jit import helper
from .toolkit.lanes import load, store, sum_lanes
from .toolkit.micro.records import MICRO_KERNELS, QUADS
from .toolkit.pairs import add_pairs
from .toolkit.quads import multiply_add as multiply_quads
from .toolkit.simd import LANES, at

CHAINS = 12
"""Independent sums: two FMA units of latency 4 need 8; 12 and two operands fit 16 registers."""
AHEAD = 8
"""Vectors in one round of a stream."""


def chained(add):
    """Make a function of (x, sums, threads, rounds) that calls ``add(s, t, a)`` CHAINS times a round and thread."""

    @helper()
    def part(x, rounds):
        s, t = load(x, 0), load(x, LANES)
        a0, a1, a2, a3, a4, a5 = s, s, s, s, s, s
        a6, a7, a8, a9, a10, a11 = s, s, s, s, s, s
        for _ in range(rounds):
            a0, a1, a2, a3 = add(s, t, a0), add(s, t, a1), add(s, t, a2), add(s, t, a3)
            a4, a5, a6, a7 = add(s, t, a4), add(s, t, a5), add(s, t, a6), add(s, t, a7)
            a8, a9, a10, a11 = add(s, t, a8), add(s, t, a9), add(s, t, a10), add(s, t, a11)
        return sum_lanes(((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7)) + ((a8 + a9) + (a10 + a11)))

    @helper(parallel=True)
    def run(x, sums, threads, rounds):
        for i in prange(threads):
            sums[i] = part(x, rounds)

    return run


@helper()
def multiply_add(s, t, a):
    """Multiply one vector of float32 and add another."""
    return a * s + t


@helper()
def quad_products(s, t, a):
    """Add the products of four int8 in each word; a takes part in them, so that none stays the same in all rounds."""
    return multiply_quads(s, a, a)


def tiles(chain):
    """Make a function of (x, sums, threads, rounds) that multiplies tiles, again and again."""

    @helper(parallel=True)
    def run(x, sums, threads, rounds):
        for i in prange(threads):
            chain(at(x, 0), rounds)
            sums[i] = x[i]

    return run


fma, pairs = map(chained, (multiply_add, add_pairs))
"""Of float32; and of bfloat16, where x has words of two, and each call multiplies and adds two of them."""


@helper()
def read_part(x, start, n):
    """Sum n floats: four streams at a time, since one alone leaves memory waiting."""
    s0, s1, s2, s3 = load(x, start), load(x, start), load(x, start), load(x, start)
    quarter = n // 4
    for i in range(start, start + quarter, 2 * LANES):
        s0 = s0 + load(x, i) + load(x, i + LANES)
        s1 = s1 + load(x, i + quarter) + load(x, i + quarter + LANES)
        s2 = s2 + load(x, i + 2 * quarter) + load(x, i + 2 * quarter + LANES)
        s3 = s3 + load(x, i + 3 * quarter) + load(x, i + 3 * quarter + LANES)
    return sum_lanes((s0 + s1) + (s2 + s3))


@helper(parallel=True)
def read(x, sums, threads, n, rounds):
    """Read n floats a thread, again and again."""
    for i in prange(threads):
        s = np.float32(0)
        for _ in range(rounds):
            s += read_part(x, i * n, n)
        sums[i] = s


def stream(part):
    """Make a function of (x, sums, threads, n, rounds) that does `part` to n floats a thread, again and again."""

    @helper(parallel=True)
    def run(x, sums, threads, n, rounds):
        for i in prange(threads):
            for _ in range(rounds):
                part(x, i * n, n)
            sums[i] = x[i * n]

    return run


@helper()
def copy_part(x, start, n):
    """Copy the first half of a part onto its second."""
    half = n // 2
    for i in range(start, start + half, AHEAD * LANES):
        for j in range(AHEAD):
            store(x, i + half + j * LANES, load(x, i + j * LANES))


@helper()
def triad_part(x, start, n):
    """Write a third of a part from the two others: a = b + s*c."""
    s, third = np.float32(0.5), n // 3
    for i in range(start, start + third, AHEAD * LANES):
        for j in range(AHEAD):
            b = i + third + j * LANES
            store(x, i + j * LANES, load(x, b) + load(x, b + third) * s)


@helper()
def update_part(x, start, n):
    """Change n floats in place."""
    s = np.float32(0.5)
    for i in range(start, start + n, AHEAD * LANES):
        for j in range(AHEAD):
            store(x, i + j * LANES, load(x, i + j * LANES) * s)


copy, triad, update = map(stream, (copy_part, triad_part, update_part))


@helper(parallel=True)
def nothing(sums, threads):
    """Start threads that do nothing."""
    for i in prange(threads):
        sums[i] = 0


STREAMS = {"read": (read, 1), "copy": (copy, 1), "triad": (triad, 1), "update": (update, 2)}
"""By name: the function of (x, sums, threads, n, rounds), and how often each of the n floats a thread is touched."""
FLOPS = 2 * CHAINS * LANES
"""The floating-point operations of one round of `fma` on one thread; one of `pairs` has twice as many."""
UNIT = 6 * AHEAD * LANES
"""A thread's part is a multiple of this number of floats, which all streams divide evenly."""
MICRO = MICRO_KERNELS["bfloat16"]
BF16_BY = MICRO.instruction
bf16, BF16_FLOPS = (tiles(MICRO.chain), MICRO.flops) if MICRO.chain else (pairs, 2 * FLOPS)
"""What multiplies bfloat16, the instruction or its definition; the function of (words, sums, threads, rounds); and the
operations of one round on one thread."""
INT8_BY = QUADS.instruction
int8, INT8_FLOPS = (tiles(QUADS.chain), QUADS.flops) if QUADS.chain else (chained(quad_products), 4 * FLOPS)
"""The same of int8."""
