"""Kernels that take an optimizer's step: from a gradient in memory, or as the epilogue of what makes the gradient.

One text serves the gradient, and its fusion with every optimizer.
"""

import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from numba import prange

from ... import ops
from ...errors import UserError
from ...ops.declaration import Op, as_dim
from ...ops.optimizer import Optimizer
from ..compile.jit import helper, kernel
from ..registry import KERNELS, Kernel
from .epilogue import Epilogue, Step, fill, nothing, storing
from .tuples import constant, joined, taken


def by_rule(variant: str, **options: Any) -> Callable[[Callable[[Epilogue], Any]], None]:
    """Register a kernel for each optimizer's own op: ``update(to, grad, grad_scale)``, which a function makes."""

    def decorate(make: Callable[[Epilogue], Any]) -> None:
        for optimizer in ops.OPTIMIZERS.values():
            step = Step(optimizer, optimizer, make.__module__.rpartition(".")[0], optimizer.params)
            _register(optimizer, variant, make(step.epilogue()), step.to, step.rest, optimizer.params, **options)

    return decorate


def by_epilogue(
    op: Op, variant: str, *, scratch: Callable[[bool], Sequence[tuple[Any, ...]]], stored: bool = True, **options: Any
) -> Callable[[Callable[[Epilogue], Any]], None]:
    """Register the kernels of an op that makes a weight's gradient: the decorated function makes each from an epilogue.

    The kernel takes `to`, and then all arguments, flags and scratch in their order that do not belong to it; ``*rest``
    may stand for the last of them.

    Parameters
    ----------
    scratch : as for `kernel`, by whether the epilogue takes an optimizer's step.
    stored : whether to register a kernel for the gradient alone.
    """
    how = op.updates
    assert how

    def decorate(make: Callable[[Epilogue], Any]) -> None:
        if stored:
            names = [*op.params, *(name for name, *_ in scratch(False))]
            own = [n for g in how.gradients for n in (g, f"{g}_add")]
            rest = [n for n in names if n not in own]
            inner = make(storing(len(how.gradients) > 1))
            _register(op, variant, inner, taken(names, own), rest, names, scratch=scratch(False), **options)
        for optimizer in ops.OPTIMIZERS.values():
            derived = ops.updated(op, optimizer)
            parts = [*scratch(True)]
            parts += [] if "partial" in (name for name, *_ in parts) else _own_scratch(op)
            names = [*derived.params, *(name for name, *_ in parts)]
            step = Step(derived, optimizer, make.__module__.rpartition(".")[0], names)
            more = {n: x for n, x in options.items() if n != "skips"}
            _register(derived, variant, make(step.epilogue()), step.to, step.rest, names, scratch=parts, **more)

    return decorate


def _own_scratch(op: Op) -> list[tuple[Any, ...]]:
    """List the scratch of a step's epilogue: the squares of each row, and which rows a lookup makes too."""
    rows = op.by_name[op.updates.gradients[0]].shape[0] if op.updates else 0
    looked_up = op.updates and (op.updates.aside or op.updates.rows)
    return [("partial", rows), *([("slot", rows, "int32")] if looked_up else [])]


def _register(
    op: Op, variant: str, inner: Any, to: Any, rest: Sequence[str], names: Sequence[str], **options: Any
) -> None:
    """Register a kernel that gets all arguments one by one, and calls another with those of an epilogue together.

    Raises
    ------
    UserError
        If the other takes other arguments, or in another order.
    """
    read = op.fuses[0].updates.parameters[0] if op.fuses and op.fuses[0].updates else ""
    want = ["to", *(read if n == "copy" else n for n in rest)]  # the weight, to a product
    has = inspect.getfullargspec(inner.py_func)
    if has.args != (want[: len(has.args)] if has.varargs else want):
        raise UserError(f"a kernel by epilogue takes ({', '.join(has.args)}); write ({', '.join(want)})")
    others = taken(names, rest)

    def flat(*args):
        inner(*((to(args),) + others(args)))  # noqa: RUF005

    kernel(op, variant, shown=inner.py_func, parallel=False, **options)(flat)


def stepped(function: Any) -> Any:
    """Register, beside a kernel that makes a weight's gradient, those that take each optimizer's step from it.

    They let the kernel make the whole gradient in scratch. So every op with ``updates=`` has them.
    """
    source = next(k for k in KERNELS.values() if k.function is function)
    for optimizer in ops.OPTIMIZERS.values():
        _after(source, optimizer)
    return function


def _after(source: Kernel, optimizer: Optimizer) -> None:
    op, how, derived = source.op, source.op.updates, ops.updated(source.op, optimizer)
    assert how
    made = [(g, prod(op.by_name[g].shape, start=as_dim(1))) for g in how.gradients]
    scratch = [*((s.name, s.size, s.dtype) for s in source.scratch), *made, *_own_scratch(op)]
    names = [*derived.params, *(name for name, *_ in scratch)]
    step = Step(derived, optimizer, source.function.__module__.rpartition(".")[0], names)
    epilogue, to, compute = step.epilogue(), step.to, source.function
    begin, first = epilogue.begin, _held_first(step) if how.rows else nothing
    gradients, take_steps = joined(*(_like(names, g) for g in how.gradients)), _all_rows(epilogue, len(made) > 1)

    own = {g: _like(names, g) for g in how.gradients} | {f"{g}_add": constant(bool(how.rows)) for g in how.gradients}
    needed = [*op.params, *(s.name for s in source.scratch)]

    def given(instead: dict[str, str]) -> Any:
        return joined(*(own.get(name) or taken(names, [instead.get(name, name)]) for name in needed))

    plain, reads = given({}), how.parameters[0] in op.by_name
    with_copy = given({how.parameters[0]: "copy"}) if reads else plain
    copy = names.index("copy" if reads else how.parameters[0])

    def flat(*args):
        goes, grads = to(args), gradients(args)
        begin(goes)
        first(goes, grads[0])
        if args[copy].shape[0] > 0:
            compute(*with_copy(args))
        else:
            compute(*plain(args))
        take_steps(goes, grads)

    kernel(derived, source.variant, scratch=scratch, shown=getattr(compute, "py_func", compute), parallel=False)(flat)


def _held_first(step: Step) -> Any:
    """Make the function that puts what another op has put aside into the gradient, to which a lookup then adds."""
    held, tokens = step.arrays.index("held"), step.arrays.index("tokens")

    @helper(parallel=True)
    def put(to, grad):
        ids = to[tokens].reshape(to[tokens].size)
        rows = to[held].reshape(ids.shape[0], grad.shape[1])
        for n in prange(grad.shape[0]):
            fill(grad[n], 0)
        for t in range(ids.shape[0]):
            for i in range(grad.shape[1]):
                grad[ids[t], i] += rows[t, i]

    return put


def _all_rows(epilogue: Epilogue, bias: bool) -> Any:
    """Make the function that hands all rows of gradients to an epilogue."""
    finish, end, last = epilogue.finish, epilogue.end, int(bias)

    @helper(parallel=True)
    def take_steps(to, grads):
        grad, sums = grads[0], grads[last]
        for n in prange(grad.shape[0]):
            finish(to, grad[n : n + 1], sums[n : n + 1].reshape(sums[n : n + 1].size), n, 1)
        end(to, grad.shape[0])

    return take_steps


def _like(names: Sequence[str], gradient: str) -> Any:
    """Make the function that returns scratch in the shape of the parameter whose gradient it is."""
    i, k = names.index(gradient), names.index(gradient[1:])

    @helper(inline="always")
    def shaped(args):
        return (args[i][: args[k].size].reshape(args[k].shape),)

    return shaped
