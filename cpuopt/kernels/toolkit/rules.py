"""Kernels from an optimizer's rule: one text serves its update alone, and every update that is fused with a gradient.

The file of an optimizer among the kernels has two helpers. ``numbers`` converts its scalars, without ``grad_scale``, to
float32 numbers that are the same for all elements. ``update`` steps a stretch of elements: it takes that of the
parameter, of each state and of the gradient, the gradient's scale, and the numbers. A package of variants that has no
such file takes that of vanilla.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

from ... import ops
from ...errors import UserError
from ...ops.optimizer import Optimizer
from ..compile.jit import helper, kernel
from ..registry import BASE


@dataclass(frozen=True)
class Rule:
    """The functions of an optimizer for its kernels; a parameter and its states come as a tuple of arrays.

    Attributes
    ----------
    numbers : the function of an optimizer's file.
    rows : ``rows(arrays, i)`` takes ``[i]`` of each array, by an index or a slice.
    update : ``update(arrays, grad, scale, numbers)``.
    """

    numbers: Any
    rows: Any
    update: Any


def rule_of(optimizer: Optimizer, package: str) -> Rule:
    """Build an optimizer's rule from its file in a package of kernels, or else from that of vanilla."""
    own = f"{package}.{optimizer.name}"
    return _rule(optimizer, import_module(own if find_spec(own) else f"...{BASE}.{optimizer.name}", __name__))


@cache
def _rule(optimizer: Optimizer, file: ModuleType) -> Rule:
    step = file.update

    @helper(inline="always")
    def update(arrays, grad, scale, numbers):
        step(*(arrays + (grad, scale) + numbers))  # noqa: RUF005  # numba knows no other way

    return Rule(file.numbers, rows_of(1 + len(optimizer.states)), update)


@cache
def rows_of(n: int) -> Any:
    """Make the function that takes ``[i]`` of each of n arrays."""
    last = n - 1
    if not last:

        @helper(inline="always")
        def rows(arrays, i):
            return (arrays[0][i],)

    else:
        others = rows_of(last)

        @helper(inline="always")
        def rows(arrays, i):
            return others(arrays, i) + (arrays[last][i],)  # noqa: RUF005

    return rows


def by_rule(
    variant: str, fused: str, *parameters: str, scratch: Sequence[tuple[Any, ...]] = (), **options: Any
) -> Callable[[Callable[[Rule], Any]], None]:
    """Register a kernel for each optimizer: the decorated function makes it from a rule.

    The kernel takes the arrays of each parameter as a tuple, the numbers of each, and then all other arguments, flags
    and scratch in their order, without the optimizer's scalars.

    Parameters
    ----------
    fused : the op in which the optimizers are fused; empty for their own ops.
    parameters : the updated parameters. The weight decay of a second one is the argument ``NAME_decay``.
    scratch, options : as for `kernel`.
    """

    def decorate(make: Callable[[Rule], Any]) -> None:
        for optimizer in (*ops.OPTIMIZERS.values(), *(() if fused else (ops.OUTER,))):
            op = optimizer.fused[fused] if fused else optimizer
            rule = rule_of(optimizer, make.__module__.rpartition(".")[0])
            inner, args = make(rule), [*op.params, *(name for name, *_ in scratch)]
            flat = flattened(inner, optimizer, rule, parameters, args)
            kernel(op, variant, scratch=scratch, shown=inner.py_func, parallel=False, **options)(flat)

    return decorate


def flattened(
    inner: Any, optimizer: Optimizer, rule: Rule, parameters: Sequence[str], args: Sequence[str]
) -> Callable[..., None]:
    """Make the function that takes all arguments one by one, and calls a kernel with those of a parameter together.

    Raises
    ------
    UserError
        Where the kernel takes others, or in another order.
    """
    arrays = [list(optimizer.names(p).values()) for p in parameters]
    scalars = [[a.name for a in (*optimizer.scalars(), *optimizer.counts)] for _ in parameters]
    for p, names in zip(parameters[1:], scalars[1:], strict=True):
        names[:] = [f"{p}_decay" if name == "weight_decay" else name for name in names]
    rest = [a for a in args if not any(a in names for names in (*arrays, *scalars))]
    want = [*parameters, *(f"{p}_numbers" for p in parameters), *rest]
    if (has := list(inspect.signature(inner.py_func).parameters)) != want:
        raise UserError(f"a kernel by rule takes ({', '.join(has)}); write ({', '.join(want)})")
    numbers, (x, y, z) = rule.numbers, spans(args, rest, 3)
    (p,), (i, j) = spans(args, arrays[0], 1), spans(args, scalars[0], 2)
    if len(parameters) == 1:

        def flat(*args):
            inner(args[p], numbers(*(args[i] + args[j])), *(args[x] + args[y] + args[z]))

        return flat
    (q,), (k, m) = spans(args, arrays[1], 1), spans(args, scalars[1], 2)

    def flat_of_two(*args):
        p_numbers, q_numbers = numbers(*(args[i] + args[j])), numbers(*(args[k] + args[m]))
        inner(args[p], args[q], p_numbers, q_numbers, *(args[x] + args[y] + args[z]))

    return flat_of_two


def spans(args: Sequence[str], names: Sequence[str], n: int) -> list[slice]:
    """Find names among arguments, in n slices of which the last may be empty."""
    at = [args.index(name) for name in names]
    cuts = [0, *(i for i in range(1, len(at)) if at[i] != at[i - 1] + 1), len(at)]
    found = [slice(at[lo], at[hi - 1] + 1) for lo, hi in pairwise(cuts)]
    return found + [slice(0, 0)] * (n - len(found))
