"""Make head and loss one call over blocks of tokens."""

from __future__ import annotations

from .edit import Allowed, Draft, Match, matches


def head_with_loss(draft: Draft, allowed: Allowed) -> None:
    """Make a head, its loss and their backwards one call; the logits are then no output."""
    for evaluation in matches(draft, "product", "loss", at=0):
        backwards = [c for c in draft.calls if c.inverts in evaluation.parts]
        training = Match.of(*evaluation.parts, *backwards, at=-1)
        if training and training.holds(draft) and allowed(training.op, training.parts):
            draft.insert(evaluation.call("evaluate"), before=backwards[0])
            training.apply(draft)
