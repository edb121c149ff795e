"""Stochastic rounding to bfloat16: up or down at random, so that the mean is the number itself.

Rounded to nearest, a number does not change by less than half a unit in its last place, 0.2 to 0.4 %. AdamW's `v` loses
0.1 % a step if the gradient is zero, and would never decay. So what a state in bfloat16 gets is the upper half of

    bits(x) + r,  r = 16 random bits

which are a function of the element's index in the model, of the state, and of `draw`, the step's number, which the
engine makes of seed and step. Threads, ranks and a resume change none of them. With 32-bit arithmetic::

    z    = (index + 2^29 * (state // 3)) * 0x9E3779B1 + lower(draw)
    z    = ((z ^ z >> 16) * 0x7FEB352D) ^ upper(draw)
    z    = (z ^ z >> 15) * 0x846CA68B
    bits = z ^ z >> 16

State 0 takes the lower half of the bits, state 1 the upper half, and state 2 the upper half of bits * 0x9E3779B1: of
any two of them, all pairs of numbers are about as frequent. States 3 to 5 take the bits of other elements. A weight in
bfloat16 counts as the state after the last.

Source: Gupta et al. 2015 (Deep Learning with Limited Numerical Precision), section 3; the mixing is ``lowbias32`` of
Wellons 2018 (Prospecting for Hash Functions) with two keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dropout import GAMMA, mix
from .storage import WIDE, storage

Array = np.ndarray[Any, Any]
STEPS, M1, M2 = np.uint32(0x9E3779B1), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
PARTS, APART = 3, 1 << 29
"""States that share a word of random bits, and how many elements apart the next ones take theirs."""


def draw_of(*given: int) -> int:
    """Return the number from which random bits are made, 63 bits, of the run's seed, a step and the like."""
    key = np.zeros(1, np.uint64)
    for number in given:
        key = mix(key + np.array([number % 2**63]).astype(np.uint64) + GAMMA)
    return int(key[0] >> np.uint64(1))


def bits_of(draw: int, first: int, count: int, state: int) -> Array:
    """Compute the 16 random bits of `count` elements of a state."""
    word, part = divmod(state, PARTS)
    with np.errstate(over="ignore"):
        index = (np.arange(count, dtype=np.uint64) + np.uint64(first + word * APART)).astype(np.uint32)
        z = index * STEPS + np.uint32(draw & 0xFFFFFFFF)
        z = ((z ^ (z >> np.uint32(16))) * M1) ^ np.uint32(draw >> 32 & 0xFFFFFFFF)
        z = (z ^ (z >> np.uint32(15))) * M2
        z = z ^ (z >> np.uint32(16))
        z = z * STEPS if part == 2 else z
    return z >> np.uint32(16) if part else z & np.uint32(0xFFFF)


def nearest(want: Array, got: Array, bits: Array) -> Array:
    """Return, for each element, the number nearest to `want` which the bits round to the bfloat16 that a kernel stored.

    So the error of a kernel is that of what it rounded. A wrong bit is an error of up to 2^-7.
    """
    stored = np.ascontiguousarray(got).view(np.uint16).astype(np.int64)
    size, negative = (stored & 0x7FFF) << 16, stored >> 15 > 0
    low, high = (_float(size + more - bits.astype(np.int64)).astype(want.dtype) for more in (0, 0xFFFF))
    low = np.where(size == 0, -high, low)
    low, high = np.where(negative, -high, low), np.where(negative, -low, high)
    wide = got.astype(want.dtype)
    return np.where(np.isfinite(wide) & np.isfinite(want), np.clip(want, low, high), wide)


def _float(bits: Array) -> Array:
    """Return the numbers of some bits, no less than 0 and no more than infinity."""
    return np.clip(bits, 0, 0x7F800000).astype(np.uint32).view(storage(WIDE).dtype)
