"""Recompute cheap results in the backward, instead of keeping them from the forward."""

from __future__ import annotations

from ..program import Value
from ..recompute import repeated
from .edit import Allowed, Draft

CHEAP = ("activation", "normalization")
"""The roles of ops that take no longer than reading their results."""


def recompute(draft: Draft, allowed: Allowed) -> None:
    """Recompute activations and normalizations in the backward, instead of keeping their results until then."""
    program, forward = draft.program, list(draft.program.phase("forward"))
    for number, call in enumerate(forward):
        if call.views:
            continue
        op, renames = call.op, dict[str, str]()
        if op.fuses and op.role not in CHEAP:
            op, renames = op.fuses[-1], op.renames
        if op.role not in CHEAP or (op is not call.op and op.operand not in renames):
            continue
        args = {a.name: call.args[renames.get(a.name, a.name)] for a in op.args}
        old = args[op.written[0].name]
        readers = [c for c in draft.users([old]) if c.phase == "backward"]
        at_hand = all(old in c.args.values() for c in forward[number + 1 :])
        if not readers or at_hand or old in program.outputs:
            continue
        weights = [v for v in args.values() if isinstance(v, Value) and v.group == "parameter"]
        if any(set(weights) & set(c.writes) for c in draft.users(weights, before=readers[0])):
            continue  # by an update in the backward
        again = repeated(program, call, args, op)
        draft.insert(again, before=readers[0])
        draft.rename(old, again.writes[0], readers)
