"""Share the gradient of the residual stream instead of copying it."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Call, Program, Value
from .edit import Allowed


def share_residual(program: Program, allowed: Allowed) -> None:
    """Share the incoming gradient of a residual connection, where no later write disturbs a reader."""
    for call in [c for c in program.calls if c.op.role == "sum" and c.inverts]:
        source, shares = call.args[call.op.operand], call.writes
        later = program.calls[program.calls.index(call) + 1 :]
        own = source.group == "adjoint" and not any(call.adds.values())  # the loss's own adjoint is given, not made
        if own and allowed(call.op, [call]) and _can_share([source, *shares], later):
            program.calls.remove(call)
            for c in program.calls:
                c.args = {n: source if v in shares else v for n, v in c.args.items()}
            program.adjoint = {v: source if d in shares else d for v, d in program.adjoint.items()}


def _can_share(values: list[Value], later: Sequence[Call]) -> bool:
    """Return whether values that are equal now can be one: after the first write to one, only that one may be used."""
    written: Value | None = None
    for call in later:
        used = {v for v in call.args.values() if isinstance(v, Value) and v in values}
        if written is not None and used - {written}:
            return False
        changed = used.intersection(call.writes)
        if changed and (len(used) > 1 or values[0] in changed):
            return False
        written = next(iter(changed), written)
    return True
