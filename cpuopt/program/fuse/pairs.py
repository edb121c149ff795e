"""Fuse the op after a sum or a product, which then reads its operand from the cache, or in blocks of tokens."""

from __future__ import annotations

from ...ops.declaration import Role
from .edit import Allowed, Draft, Match, matches


def normalize_sums(draft: Draft, allowed: Allowed) -> None:
    """Fuse a normalization into the sum before it."""
    _fuse(draft, allowed, "sum", "normalization", at=1)


def activate_products(draft: Draft, allowed: Allowed) -> None:
    """Fuse an activation into the product before it, and its slope into the product that makes its gradient."""
    _fuse(draft, allowed, "product", "activation", at=0)
    _fuse(draft, allowed, "product", "activation", at=1)  # a gated one, whose other operand is made in between


def gate_activations(draft: Draft, allowed: Allowed) -> None:
    """Fuse an activation into the product, element by element, that it gates, on either side of it."""
    calls = draft.calls
    activated = {v for c in calls if c.op.role == "activation" for v in c.writes[:1]}
    for call in calls:
        if call.op.role == "gate":
            x, y = (a.name for a in call.op.args if a.kind == "in")
            if call.args[y] in activated and call.args[x] not in activated:
                call.args |= {x: call.args[y], y: call.args[x]}
    _fuse(draft, allowed, "activation", "gate", at=1)


def head_with_loss(draft: Draft, allowed: Allowed) -> None:
    """Make a head, its loss and their backwards one call; the logits are then no output."""
    for evaluation in matches(draft, "product", "loss", at=0):
        backwards = [c for c in draft.calls if c.inverts in evaluation.parts]
        training = Match.of(*evaluation.parts, *backwards, at=-1)
        if training and training.holds(draft) and allowed(training.op, training.parts):
            draft.insert(evaluation.call("evaluate"), before=backwards[0])
            training.apply(draft)


def _fuse(draft: Draft, allowed: Allowed, first: Role, second: Role, at: int) -> None:
    for m in matches(draft, first, second, at):
        if m.holds(draft) and not set(m.gone) & set(draft.program.outputs) and allowed(m.op, m.parts):
            m.apply(draft)
