"""Functions on tuples for kernels: numba compiles a function of all arguments as that of one tuple.

Which elements of a tuple a function takes is known when it is made, since numba needs constant indices.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from ..compile.jit import helper


@cache
def rows_of(n: int) -> Any:
    """Make the function that takes ``[i]`` of each of n arrays."""
    last = n - 1
    others = rows_of(last) if last else None

    @helper(inline="always")
    def first(arrays, i):
        return (arrays[0][i],)

    @helper(inline="always")
    def rows(arrays, i):
        return others(arrays, i) + (arrays[last][i],)  # noqa: RUF005

    return rows if last else first


def joined(*parts: Any) -> Any:
    """Make the function that joins the tuples that some functions make of one."""
    first, *rest = parts
    if not rest:
        return first
    others = joined(*rest)

    @helper(inline="always")
    def both(args):
        return first(args) + others(args)

    return both


def taken(names: Sequence[str], wanted: Sequence[str]) -> Any:
    """Make the function that takes some of a tuple's elements, by their names, in an order."""
    at = [names.index(name) for name in wanted]
    cuts = [0, *(i for i in range(1, len(at)) if at[i] != at[i - 1] + 1), len(at)]
    runs = [slice(at[lo], at[hi - 1] + 1) for lo, hi in pairwise(cuts) if hi > lo]
    return joined(*map(_run, runs or [slice(0, 0)]))


def _run(run: slice) -> Any:
    @helper(inline="always")
    def part(args):
        return args[run]

    return part


def constant(value: bool) -> Any:
    """Make the function that returns a tuple of one value."""

    @helper(inline="always")
    def constant(args):
        return (value,)

    return constant
