"""Share the gradient of the residual stream instead of copying it."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Call, Value
from .edit import Allowed, Draft


def share_residual(draft: Draft, allowed: Allowed) -> None:
    """Share the incoming gradient of a residual connection, if no later write disturbs a reader."""
    for call in [c for c in draft.calls if c.op.role == "sum" and c.inverts]:
        source, shares = call.args[call.op.operand], call.writes
        own = source.group == "adjoint" and not any(call.adds.values())  # the loss's own adjoint is given, not made
        if own and allowed(call.op, [call]):
            same = [source, *shares]
            alike = all(v.shape == source.shape for v in shares)  # a call reads it in the shape that it has
            if alike and _can_share(same, draft.users(same, after=call)):
                draft.remove(call)
                for share in shares:
                    draft.rename(share, source, draft.users([share]))
                    draft.shared[share] = source


def _can_share(values: list[Value], later: Sequence[Call]) -> bool:
    """Return whether values that are equal now can be one: after the first write to one, only that one may be used."""
    written: Value | None = None
    for call in later:
        used = {v for v in call.args.values() if isinstance(v, Value) and v in values}
        if written is not None and used - {written}:
            return False
        changed = used.intersection(call.writes)
        if changed and len(used) > 1:
            return False
        written = next(iter(changed), written)
    return True
