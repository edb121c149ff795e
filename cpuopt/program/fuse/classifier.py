"""Make head and loss one call over blocks of tokens."""

from __future__ import annotations

from ..program import Program
from .edit import Allowed, Match, matches


def head_with_loss(program: Program, allowed: Allowed) -> None:
    """Make a head, its loss and their backwards one call; the logits are then no output."""
    for evaluation in matches(program, "product", "loss", at=0):
        backwards = [c for c in program.calls if c.inverts in evaluation.parts]
        training = Match.of(*evaluation.parts, *backwards, at=-1)
        if training and training.holds(program) and allowed(training.op, training.parts):
            program.calls.insert(program.calls.index(backwards[0]), evaluation.call("evaluate"))
            training.apply(program)
