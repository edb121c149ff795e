"""The update on a program: which parameters have one, each gradient's share of the norm, the step of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod
from typing import Any

from .. import ops
from ..errors import UserError
from ..ops.optimizer import DRAWN
from ..ops.storage import WIDE
from ..wording import nearest
from .program import Call, Program, Scalar, Value

Choice = str | Mapping[str, str]
"""An optimizer's name, or names by patterns of parameters, of which the last that matches wins."""


def add_update(program: Program, choice: Choice = ops.USUAL, moments: str = WIDE, at_random: bool = False) -> None:
    """Append, for each parameter that has a gradient, its share of the global norm and its optimizer's step.

    The weight decay of biases and of layer normalization is a number of its own, ``vector_decay``. The optimizers'
    states are stored in the type `moments`.

    Parameters
    ----------
    at_random : whether weights or states are rounded at random.

    Raises
    ------
    UserError
        For an optimizer that does not exist, a pattern that matches nothing, a parameter that none matches.
    """
    trained = [(p, program.adjoint[p]) for p in program.parameters if p in program.adjoint]
    for parameter, gradient in trained:
        out = program.value(f"{gradient}.sumsq", (1,))
        program.norm_terms.append(out)
        program.calls.append(Call(ops.sumsq, _layer(parameter), {"out": out, "inp": gradient}, "norm"))
    types = {WIDE: moments}
    ends = accumulate((prod(p.shape) for p in program.parameters), initial=0)
    first = dict(zip(program.parameters, ends, strict=False))
    program.optimizers = chosen([p for p, _ in trained], choice)
    for parameter, gradient in trained:
        optimizer = program.optimizers[parameter]
        program.states[parameter] = {
            s.name: program.value(f"{parameter}.{s.name}", parameter.shape, "moment", dtype=types.get(s.dtype, s.dtype))
            for s in optimizer.states
        }
        args: dict[str, object] = {"param": parameter, "grad": gradient, "copy": None, **program.states[parameter]}
        args.update({a.name: Scalar(a.name, optimizer.name) for a in optimizer.args if a.kind == "scalar"})
        if at_random:
            args["first"] = first[parameter]
        else:
            args |= {a.name: 0 for a in DRAWN}
        if len(parameter.shape) == 1 and "weight_decay" in args:
            args["weight_decay"] = Scalar("vector_decay", optimizer.name)
        program.calls.append(Call(optimizer, _layer(parameter), args, "update"))
    program.verify()


def freeze(program: Program, patterns: Sequence[str]) -> None:
    """Mark the parameters that some patterns match as not trained, before the backward is generated.

    Raises
    ------
    UserError
        For a pattern that matches nothing.
    """
    names = {p.name: p for p in program.parameters}
    for pattern in patterns:
        matched = [p for name, p in names.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(f"freeze: no parameter matches {pattern!r}; {nearest(pattern, names)}")
        for p in matched:
            p.trained = False


def chosen(parameters: list[Value], choice: Choice) -> dict[Value, ops.Optimizer]:
    """Find the optimizer of each parameter."""
    patterns = {"*": choice} if isinstance(choice, str) else choice
    if not isinstance(patterns, Mapping) or not all(isinstance(x, str) for pair in patterns.items() for x in pair):
        raise UserError(f"optimizer {str(choice)[:60]!r}: expected a name, or names by patterns of parameters")
    found: dict[Value, ops.Optimizer] = {}
    for pattern, name in patterns.items():
        if name not in ops.OPTIMIZERS:
            raise UserError(f"optimizer {name!r}: there is no such; {nearest(name, ops.OPTIMIZERS)}")
        matched = [p for p in parameters if fnmatchcase(p.name, pattern)]
        if not matched and parameters:
            raise UserError(
                f"optimizer: no parameter matches {pattern!r}; {nearest(pattern, [p.name for p in parameters])}"
            )
        found |= dict.fromkeys(matched, ops.OPTIMIZERS[name])
    if left := [p.name for p in parameters if p not in found]:
        raise UserError(f"optimizer: no pattern matches {left[0]!r}; add '*' before the others")
    return found


def numbers(
    optimizers: Sequence[ops.Optimizer], given: Mapping[str, Any], lr: float, vector_decay: float | None
) -> dict[Scalar, float]:
    """Return the numbers of a step for some optimizers: those given, of all or of one by its name, else their defaults.

    Parameters
    ----------
    vector_decay : the weight decay of parameters of one axis; None: that of the others.

    Raises
    ------
    UserError
        For a number that an optimizer does not have, or that is out of its range.
    """
    found: dict[Scalar, float] = {}
    for o in optimizers:
        own = given.get(o.name, {})
        if not isinstance(own, Mapping) or not own.keys() <= {"lr", *o.defaults}:
            raise UserError(f"{o.name}: {str(own)[:60]}; expected numbers by name, of {', '.join(['lr', *o.defaults])}")
        every = {n: given.get(n, x) for n, x in o.defaults.items()} | {"lr": lr, **own}
        every["vector_decay"] = every.get("weight_decay", 0.0) if vector_decay is None else vector_decay
        ranges = {n.name: n for n in o.numbers}
        for n, x in every.items():
            found[Scalar(n, o.name)] = in_range(ranges.get(n) or ops.Number(n, 0.0), x)
    return found


def in_range(number: ops.Number, x: Any) -> float:
    """Return a number of an optimizer as a float; a `UserError` if it is none, or out of range."""
    try:
        wrong = number.wrong(exact := float(x))
    except (TypeError, ValueError):
        exact, wrong = 0.0, "a number"
    if wrong:
        raise UserError(f"{number.name} {str(x)[:60]}: expected {wrong}")
    return exact


def _layer(parameter: Value) -> str:
    """Return the layer that owns a parameter: its path without the last word."""
    return parameter.name.rpartition(".")[0] or "model"
