"""Integers of a kernel that runs as plain Python: of 64 bits, as in compiled code, and none wraps around unseen."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


class IntegerOverflowError(OverflowError):
    """An integer of a kernel that int64 does not hold."""


class Whole(int):
    """An integer of Python's that raises an error where compiled code would wrap around."""

    __array_ufunc__ = None  # NumPy's scalars leave arithmetic to it
    __hash__ = int.__hash__


def watched(x: Any) -> Any:
    """Return an integer as a `Whole`; anything else as it is."""
    if type(x) is not int:
        return x
    if not -(2**63) <= x < 2**63:
        raise IntegerOverflowError(f"an integer is {x:.3g}, beyond int64")
    return Whole(x)


def integers(x: Any) -> Any:
    """Return an array of integers as int64, in which compiled code computes with them; any other as it is."""
    return x.astype(np.int64) if isinstance(x, np.ndarray) and x.dtype.kind == "i" else x


def _bare(x: Any) -> Any:
    return int(x) if isinstance(x, Whole | np.signedinteger) else x


def _define(name: str, reflected: bool) -> None:
    """Let an operator of a `Whole` return what that of an integer does."""
    work, word = getattr(operator, name), name.rstrip("_")
    setattr(Whole, f"__{word}__", lambda self, *other: watched(work(int(self), *map(_bare, other))))
    if reflected:
        setattr(Whole, f"__r{word}__", lambda self, other: watched(work(_bare(other), int(self))))


for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, reflected=False)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _define(_name, reflected=True)
