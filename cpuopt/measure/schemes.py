"""The least bytes that a training step moves for a parameter, by what is stored in bfloat16, and the tokens they cost.

A step does 6 FLOPs a parameter and token: 2 in the forward, 4 in the backward. It moves a parameter's bytes once,
whatever the number of tokens. So there is a number of tokens below which memory takes longer than the FLOPs do at their
peak, if no activation moved at all::

    T* = bytes * peak / (6 * bandwidth)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import OPTIMIZERS
from ..ops.optimizer import USUAL
from ..ops.storage import TYPES, WIDE
from .roofline import Roofs

FLOPS = 6
"""A parameter's FLOPs for each token of a step."""


@dataclass(frozen=True)
class Scheme:
    """What is stored in which type.

    Attributes
    ----------
    operands : the type of what products read. A weight of another type has a copy in it.
    moments : the type of the optimizer's states.
    weights : the type of the weights.
    """

    name: str
    operands: str = WIDE
    moments: str = WIDE
    weights: str = WIDE

    @property
    def moved(self) -> int:
        """The least bytes that a step moves for a parameter, with AdamW.

        Forward and backward read what products read; the update reads and writes the weight and the states, and
        writes the copy. No gradient moves: the update takes it from the cache.
        """
        weight, operand, moment = (TYPES[name].bytes for name in (self.weights, self.operands, self.moments))
        copy = operand if self.operands != self.weights else 0
        return 2 * operand + 2 * (weight + len(OPTIMIZERS[USUAL].states) * moment) + copy

    def tokens(self, roofs: Roofs) -> float:
        """Return T*, the tokens of a step below which memory takes longer than the FLOPs at their peak."""
        memory = next(v.name for v in roofs.levels if v.nbytes is None)
        return self.moved * roofs.peak(self.operands)[0] / (FLOPS * roofs.bandwidth(memory))


SCHEMES = (
    Scheme(WIDE),
    Scheme("bf16", "bfloat16"),
    Scheme("bf16, moments too", "bfloat16", "bfloat16"),
    Scheme("bf16, weights too", "bfloat16", "bfloat16", "bfloat16"),
)
