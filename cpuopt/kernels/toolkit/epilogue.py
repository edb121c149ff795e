"""Epilogues of weight gradients: store, accumulate, or apply the optimizer to each finished row.

The file of an optimizer among the kernels has two helpers. ``numbers`` converts its scalars, without ``grad_scale``, to
numbers that are the same for all elements. ``update`` steps a stretch of elements: it takes that of the parameter, of
each state and of the gradient, the gradient's scale, and a tuple of the numbers. It does not read an element that it
has stored, because one in bfloat16 then has the rounded number. A package of variants without such a file takes that of
vanilla.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ...ops.declaration import Op
from ...ops.optimizer import Optimizer
from ..compile.jit import helper
from ..registry import BASE
from .constants import ONE, ZERO
from .lanes import load
from .pairs import begins_line, is_half, stream
from .rounding import rounded_of
from .simd import LANES, LINE
from .tuples import joined, rows_of, taken

HELD = 2**16  # elements; copies of smaller weights are of a model whose weights and moments stay in the cache
by_row = partial(helper, _nrt=False)  # else numba counts references to every array of `to` at each row


@helper()
def nothing(*args):
    """Do nothing."""


@helper()
def rows_of_weight(to):
    """Count the rows of the first array."""
    return to[0].shape[0]


@helper(inline="always")
def unbiased(to):
    """Return False."""
    return False


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does with finished rows of a weight's gradient. All that they go to comes as one tuple, `to`.

    Its first element is the gradient, or the weight that it is of.

    Attributes
    ----------
    steps : whether it takes an optimizer's step; the rows are then summed in memory of a thread.
    begin : ``begin(to)`` comes first.
    rows : ``rows(to)`` counts the rows; of a frozen weight, those of its bias.
    place : ``place(to, own, row, rows)`` returns the array in which some rows are summed, the place of the first, and
        whether to add to what is there. `own` is memory of the thread.
    finish : ``finish(to, grad, sums, row, rows)`` gets them in the first rows of `grad`, and the bias's in `sums`.
    again : ``again(to, more)`` returns `to` for another block of tokens, if there are more.
    biased : ``biased(to)`` returns whether there is a bias, for which `finish` needs sums.
    end : ``end(to, rows)`` comes last.
    step : ``step(to, at, grad, scale)`` takes the step of a part of the first parameter, by an index or a slice.
    row : ``row(to, n, grad, i)`` takes that of row n, and keeps the squares of its gradient as the i-th for `end`.
    reads : the elements of `to` whose rows `finish` reads.
    """

    steps: bool
    step: Any = None
    row: Any = None
    place: Any = None
    again: Any = None
    begin: Any = nothing
    rows: Any = rows_of_weight
    finish: Any = nothing
    biased: Any = unbiased
    end: Any = nothing
    reads: tuple[int, ...] = ()


def bias_at(i: int) -> Any:
    """Make the function that returns whether the i-th array, which is of a bias, is there."""

    @helper(inline="always")
    def is_there(to):
        return to[i].shape[0] > 0

    return is_there


@helper()
def squares(x):
    """Sum the squares of a row."""
    total = ZERO
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@helper()
def copy_row(to, x):
    """Copy a row."""
    for i in range(x.shape[0]):
        to[i] = x[i]


@helper()
def copy_weights(to, x, past):
    """Round a row of weights into their copy.

    Parameters
    ----------
    past : whether to store whole cache lines past the caches. It spares reading them, and they are read again only when
        a step has moved all weights and moments through the caches. What follows sees them: taking a ticket and leaving
        a parallel loop are locked instructions, which wait for such stores.
    """
    n = x.shape[0]
    if is_half(to) and past and n % (2 * LINE) == 0 and begins_line(to):
        for i in range(0, n, 2 * LANES):
            stream(to, i, load(x, i), load(x, i + LANES))
    else:
        copy_row(to, x)


@helper()
def fill(x, value):
    """Set every element."""
    for i in range(x.shape[0]):
        x[i] = value


@helper(inline="always")
def first_of_row(at, grad):
    """Return the first element of a row, which has as many as a gradient."""
    return at * grad.shape[0]


@helper(inline="always")
def first_of_slice(at, grad):
    """Return the first element of a slice."""
    return at.start


def at_random(n: int, each: int) -> Any:
    """Make the function of (parts, draw, first) that returns the n-th of `each` parts, alone in a tuple.

    One in bfloat16 is rounded at random. The parameter comes before its states, and counts as the last of them.
    """
    rounded = rounded_of((n or each) - 1)

    @helper(inline="always")
    def part(args):
        return (rounded(args[0][n], args[1], args[2]),)

    return part


@cache
def storing(bias: bool) -> Epilogue:
    """Make the epilogue that stores or adds: `to` is the gradient and its flag, then those of a bias if it has one."""

    @helper()
    def place(to, own, row, rows):
        return to[0], row, to[1]

    @helper()
    def again(to, more):
        return (to[0], to[1] or more)

    if not bias:
        return Epilogue(False, place=place, again=again)

    @helper()
    def rows_with_bias(to):
        return max(to[0].shape[0], to[2].shape[0])

    @by_row()
    def finish(to, grad, sums, row, rows):
        if to[2].shape[0] > 0:
            for i in range(rows):
                to[2][row + i] = to[2][row + i] + sums[i] if to[3] else sums[i]

    return Epilogue(False, place=place, again=again, rows=rows_with_bias, finish=finish, biased=bias_at(2))


@cache
def rule_of(optimizer: Optimizer, package: str) -> tuple[ModuleType, int]:
    """Find an optimizer's file in a package of kernels, or else in vanilla; and how many numbers its rule takes."""
    own = f"{package or __package__}.{optimizer.name}"
    file = import_module(own if find_spec(own) else f"...{BASE}.{optimizer.name}", __name__)
    numbers = file.numbers.py_func
    return file, len(numbers(*[0.5] * len(inspect.signature(numbers).parameters)))


def applied(numbers: Any, names: Sequence[str], scalars: Sequence[str]) -> Any:
    """Make the function that converts some scalars of all arguments to the numbers of a rule."""
    given = taken(names, scalars)

    @helper(inline="always")
    def converted(args):
        return numbers(*given(args))

    return converted


class Step:
    """An optimizer's step in a kernel: which arguments go to it as `to`, and the epilogue.

    Parameters
    ----------
    op : the optimizer itself, or an op that `updated` derived.
    names : the kernel's arguments.
    """

    def __init__(self, op: Op, optimizer: Optimizer, package: str, names: Sequence[str]) -> None:
        made = op.fuses[0].updates if op is not optimizer else None
        self.parameters = made.parameters if made else ["param"]
        self.file, self.count = rule_of(optimizer, package)
        self.optimizer, self.made, self.each = optimizer, made, 1 + len(optimizer.states)
        scalars = [a.name for a in (*optimizer.scalars(), *optimizer.counts)]
        of = {p: [f"{p}_decay" if n == "weight_decay" else n for n in scalars] for p in self.parameters[1:]}
        of = {self.parameters[0]: scalars} | of
        more = ["sumsq", "partial", *["held", "tokens", "slot"] * ("slot" in names), "copy", "draw", "first"]
        self.arrays = [a for p in self.parameters for a in optimizer.names(p).values()]
        self.arrays += [n for n in (*more, *(f"{p}_first" for p in self.parameters[1:])) if n in names]
        own = {*self.arrays, *(n for some in of.values() for n in some)}
        if made and self.parameters[0] in op.fuses[0].by_name:
            own.remove("copy")  # products read it too
        self.rest = [n for n in names if n not in own]
        self.to = joined(taken(names, self.arrays), *(applied(self.file.numbers, names, s) for s in of.values()))

    def step(self, k: int) -> Any:
        """Make the function of the step of the k-th parameter: ``step(to, at, grad, scale)``."""
        update, each, index = self.file.update, self.each, self.arrays.index
        copy, draw, after = index("copy"), index("draw"), len(self.arrays) + k * self.count
        numbers = slice(after, after + self.count)  # not a tuple in `to`, which no parallel loop takes
        place = index(f"{self.parameters[k]}_first" if k else "first")
        arrays, rows = slice(k * each, (k + 1) * each), rows_of(each)
        rounding = joined(*(at_random(n, each) for n in range(each)))
        index_of = first_of_row if self.made and not k else first_of_slice

        @by_row()
        def step(to, at, grad, scale):
            parts = rounding((rows(to[arrays], at), to[draw], to[place] + index_of(at, grad)))
            update(*(parts + (grad, scale, to[numbers])))  # noqa: RUF005

        @helper(inline="always")
        def step_and_copy(to, at, grad, scale):
            step(to, at, grad, scale)
            if to[copy].shape[0] > 0:
                copy_weights(to[copy][at], to[0][at], to[copy].size > HELD)

        return step if k else step_and_copy

    def epilogue(self) -> Epilogue:
        """Make the epilogue."""
        step = self.step(0)
        if not self.made:
            return Epilogue(True, step)
        sumsq, partial = self.arrays.index("sumsq"), self.arrays.index("partial")

        @by_row()
        def step_row(to, n, grad, i):
            step(to, n, grad, ONE)
            to[partial][i] = squares(grad)

        begin, finish_rows = self._rows(step_row)
        finish_bias, biased = self._bias() if len(self.parameters) > 1 else (nothing, unbiased)

        @helper()
        def place(to, own, row, rows):
            C = to[0].shape[1]
            return own[: rows * C].reshape(rows, C), 0, False

        @by_row()
        def finish(to, grad, sums, row, rows):
            finish_rows(to, grad, row, rows)
            finish_bias(to, sums, row, rows)

        @helper()
        def again(to, more):
            return to

        @helper()
        def end(to, rows):
            total = ZERO
            for n in range(rows):
                total += to[partial][n]
            to[sumsq][0] = total

        reads = (*range(self.each),)
        return Epilogue(True, step, step_row, place, again, begin, finish=finish, biased=biased, end=end, reads=reads)

    def _rows(self, step_row: Any) -> tuple[Any, Any]:
        """Make what begins, and what finishes rows; those that a lookup makes too are put aside, or finished alone."""
        partial = self.arrays.index("partial")

        @helper()
        def begin_all(to):
            fill(to[partial], 0)

        @by_row()
        def finish_all(to, grad, row, rows):
            for i in range(rows):
                step_row(to, row + i, grad[i], row + i)

        if "slot" not in self.arrays:
            return begin_all, finish_all
        held, tokens, slot = map(self.arrays.index, ("held", "tokens", "slot"))
        aside = bool(self.made and self.made.aside)

        @helper()
        def begin(to):
            fill(to[slot], -1)
            ids = to[tokens].reshape(to[tokens].size)
            for t in range(ids.shape[0] - 1, -1, -1):
                to[slot][ids[t]] = t  # the first of equal tokens stays
                if aside:
                    fill(to[held][t], 0)

        @by_row()
        def finish_rows(to, grad, row, rows):
            for i in range(rows):
                n = row + i
                if (to[slot][n] >= 0) != aside:
                    step_row(to, n, grad[i], n)
                else:
                    to[partial][n] = ZERO
                    if aside:
                        copy_row(to[held][to[slot][n]], grad[i])

        return begin, finish_rows

    def _bias(self) -> tuple[Any, Any]:
        step, bias, partial = self.step(1), self.each, self.arrays.index("partial")

        @by_row()
        def finish_bias(to, sums, row, rows):
            if to[bias].shape[0] > 0:
                db = sums[:rows]
                step(to, slice(row, row + rows), db, ONE)
                for i in range(rows):
                    to[partial][row + i] += db[i] * db[i]

        return finish_bias, bias_at(bias)
