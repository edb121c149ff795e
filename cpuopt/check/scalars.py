"""The numbers of a call. Each case draws them from their declared ranges, so that none can be written into a kernel."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import exp, log
from typing import Any

import numpy as np

from ..ops.declaration import Arg, Dim, Op

Numbers = dict[str, Any]
"""The scalars of an op, and of the forward that it inverts, by name."""
WIDE = 100
"""The ratio of a range's ends from which a number is drawn by its logarithm."""
ENDS = 3 / 8
"""How often a number is an end of its range or the usual one."""
A_CLASS = "a class is ignored"
"""The kind of a case in which the ignored id is that of a class."""
START = "start"
"""The kind of a case with the numbers of a first step."""


def numbers(op: Op, sizes: Mapping[str, int], kind: str, name: str, rng: np.random.Generator, large: bool) -> Numbers:
    """Draw the scalars of a call.

    Parameters
    ----------
    sizes : by symbol; a number by its name is not drawn.
    name : the case; cases of one seed have different numbers.
    large : whether the call has a run's size. It then has no number from an end of its range, and a number that ends at
        a size is as large as that, since the work of a call depends on it.
    """
    rng = np.random.default_rng([zlib.crc32(f"{op.name} {name}".encode()), *rng.spawn(1)[0].integers(0, 2**32, 2)])
    args = {a.name: a for of in (op, op.inverts) if of for a in of.args if a.kind == "scalar"}
    ignoring = {a.ignored: a for of in (op, op.inverts) if of for a in of.args if a.ignored}
    found: Numbers = {}
    for n, arg in args.items():
        if n in sizes:
            found[n] = sizes[n]
        elif kind == A_CLASS and n in ignoring and (below := ignoring[n].below):
            found[n] = int(rng.integers(below(sizes)))
        else:
            found[n] = number(arg, sizes, rng, usual=kind == START, large=large)
    return found


def number(arg: Arg, sizes: Mapping[str, int], rng: np.random.Generator, usual: bool, large: bool) -> Any:
    """Draw one number from its range."""
    low, high, as_type = arg.low, _end(arg, sizes), int if arg.dtype == "int64" else float
    if usual:
        return as_type(arg.usual)
    if large and isinstance(arg.high, Dim):
        return as_type(high)
    if not large and rng.random() < ENDS:
        return as_type((low, high, arg.usual)[rng.integers(3)])
    if as_type is int and not (low > 0 and high / low >= WIDE):
        return int(rng.integers(int(low), int(high) + 1))
    if low > 0 and high / low >= WIDE:
        return as_type(exp(rng.uniform(log(low), log(high))))
    return as_type(rng.uniform(low, high))


def _end(arg: Arg, sizes: Mapping[str, int]) -> float:
    return arg.high(sizes) if isinstance(arg.high, Dim) else arg.high
