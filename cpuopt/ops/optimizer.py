"""The declaration of an optimizer: its states, its scalars, its rule.

An optimizer is an op that updates one parameter in place, element by element. Its file declares these. The ops that
fuse it follow from them (``update.py``), with arguments such as ``weight``, ``weight_m`` and ``weight_v`` for AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from math import inf
from typing import Any

import numpy as np

from ..machine import cores
from .declaration import FLOAT32, HALF, Arg, Kind, N, Op, Types, inp, scalar
from .storage import WIDE

USUAL = "adamw"
"""The default optimizer; the names of ops that fuse it do not contain its own."""
BLOCK = 1 << 14
"""Elements to which a reference applies a rule at one time."""
LR = scalar("lr", low=1e-3, high=3e-2, usual=1e-4)
GRAD_SCALE = scalar("grad_scale", low=0.05, high=2, usual=1)
DRAWN = (
    scalar("draw", integer=True, low=0, high=2**62, shown=False),
    scalar("first", integer=True, low=0, high=2**33, shown=False),
)
"""What the random bits of stores in bfloat16 depend on: the step, and the parameter's first element in the model."""
STEP = scalar("step", integer=True, low=1, high=5000, usual=1)


@dataclass(frozen=True)
class State:
    """An array that an optimizer keeps for each parameter, of the parameter's shape.

    Parameters
    ----------
    start : the value of every element before the first step.
    negative : whether an element may be below zero.
    """

    name: str
    start: float = 0.0
    dtype: str = WIDE
    negative: bool = True


@dataclass(frozen=True)
class Number:
    """A scalar of an optimizer, with its default: at least 0, or more than 0 if it is `positive`."""

    name: str
    default: float
    below: float = inf
    positive: bool = False

    def wrong(self, x: float) -> str:
        """Return the expectation that a value fails, such as "0 or more"; empty if it passes."""
        if 0 <= x < self.below and (x or not self.positive):
            return ""
        least = "a positive number" if self.positive else "0 or more"
        return least + (f", and less than {self.below:g}" if self.below < inf else "")

    def argument(self, name: str = "") -> Arg:
        """Declare the scalar, under this or another name, with a range around its default."""
        if self.below < inf:
            gap = self.below - self.default
            low, high = max(0.0, self.below - 8 * gap), self.below - gap / 2
        else:
            low, high = (self.default / 10, self.default * 1e4) if self.default else (0.0, 0.2)
        return scalar(name or self.name, low=low, high=high, usual=self.default)


def by_blocks(rule: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    """Make a rule that goes through large arrays in blocks on all cores, so that what it computes stays in a cache."""

    @wraps(rule)
    def by_block(**given: Any) -> Mapping[str, Any]:
        grad = given["grad"]
        if grad.size <= BLOCK:
            return rule(**given)
        flat = {name: x.reshape(-1) for name, x in given.items() if np.ndim(x)}

        def of(start: int) -> Mapping[str, Any]:
            return rule(**given | {name: x[start : start + BLOCK] for name, x in flat.items()})

        found = {name: np.empty(grad.size, x.dtype) for name, x in of(0).items()}

        def put(start: int) -> None:
            for name, x in of(start).items():
                found[name][start : start + BLOCK] = x

        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(put, range(0, grad.size, BLOCK)))
        return {name: x.reshape(grad.shape) for name, x in found.items()}

    return by_block


def with_copy(rule: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    """Make a rule that returns the parameter's copy too."""

    @wraps(rule)
    def both(**given: Any) -> Mapping[str, Any]:
        found = rule(**given)
        return {**found, "copy": found["param"]}

    return both


class Optimizer(Op):
    """The declaration of an elementwise update of one parameter.

    Parameters
    ----------
    states : the states in the order in which the rule takes and returns them, after the parameter.
    numbers : its scalars, besides ``lr``, ``grad_scale`` and, if the reference takes it, ``step``, counted from 1.
        One called ``weight_decay`` may differ between parameters of one axis and the others.
    flops : the FLOPs for each element.
    reference : function of ``param``, the states, ``grad`` and the scalars, by name.
    files : the first word of a checkpoint's files of states; by default the name.
    """

    def __init__(
        self,
        name: str,
        *,
        states: tuple[State, ...],
        numbers: tuple[Number, ...],
        label: str,
        flops: int,
        reference: Callable[..., Mapping[str, Any]],
        source: str,
        files: str = "",
    ) -> None:
        self.states, self.numbers, self.each, self.files = states, numbers, flops, files or name
        self.counts = [STEP] if "step" in signature(reference).parameters else []
        flat = Arg("param", "state", (N,))
        self.rounded = [*self.counts, *DRAWN]
        args = [
            *self.places("param", flat, HALF),
            self.copy("param", flat, "out"),
            inp("grad", N),
            *self.scalars(),
            GRAD_SCALE,
            *self.rounded,
        ]
        super().__init__(
            name, *args, label=label, flops=flops * N, reference=with_copy(by_blocks(reference)), source=source
        )

    @property
    def defaults(self) -> dict[str, float]:
        """The default of each number."""
        return {n.name: n.default for n in self.numbers}

    def scalars(self, *more: str) -> list[Arg]:
        """Declare the scalars of a step; `more` follow the weight decay."""
        found = [LR]
        for number in self.numbers:
            found.append(number.argument())
            if number.name == "weight_decay":
                found += [number.argument(name) for name in more]
        return found

    def names(self, parameter: str) -> dict[str, str]:
        """Return the names of a parameter's arrays in a fused op, by their names here."""
        own = "" if parameter == "param" else f"{parameter}_"
        return {"param": parameter, **{s.name: own + s.name for s in self.states}}

    def places(self, parameter: str, like: Arg, types: Types = FLOAT32) -> list[Arg]:
        """Declare a parameter of some types, with what an argument like it says, and its states."""
        names = self.names(parameter)
        place = partial(Arg, kind="state", shape=like.shape, optional=like.optional, reduces=like.reduces)
        return [
            place(parameter, start=like.start, fan_in=like.fan_in, types=types, drawn=len(types) > 1),
            *(place(names[s.name], negative=s.negative, start=s.start, types=HALF, drawn=True) for s in self.states),
        ]

    def copy(self, parameter: str, like: Arg, kind: Kind) -> Arg:
        """Declare a parameter's copy in a narrower type, which the step writes as it stores the parameter."""
        return Arg("copy", kind, like.shape, True, like.reduces, types=HALF, shown=False, copies=parameter)

    def apply(self, given: Mapping[str, Any], parameter: str, grad: Any, decay: str = "weight_decay") -> dict[str, Any]:
        """Compute the update of a parameter of a fused op from the gradient, by the reference."""
        names = self.names(parameter)
        own = {**given, **{n: given[to] for n, to in names.items()}, "grad": grad, "grad_scale": 1.0}
        own["weight_decay"] = given.get(decay)
        found = self.reference(**{n: own[n] for n in signature(self.reference).parameters})
        return {to: found[n] for n, to in names.items()}
