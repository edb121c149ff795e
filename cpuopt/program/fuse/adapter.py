"""Make the product of a linear layer, that of its adapter, and their sum one call."""

from __future__ import annotations

from ..program import Call, Value
from .edit import Allowed, Draft, Match, replace


def add_adapters(draft: Draft, allowed: Allowed) -> None:
    """Fuse a sum and the two products that it alone reads, of which the second has no bias."""
    for call in [c for c in draft.calls if c.op.role == "sum"]:
        products = [_made_by(draft, call.args[a.name], call) for a in call.op.args if a.kind == "in"]
        if len(products) != 2 or None in products or products[0] is products[1]:
            continue
        first, second = sorted(filter(None, products), key=lambda c: c.args["bias"] is None)
        match = Match.of(first, second, call, at=-1)
        if not match or second.args["bias"] is not None or match.viewed or set(match.gone) & {*draft.program.outputs}:
            continue
        if not _of_one_shape(first, second, call):
            continue
        if match.private(draft) and match.undisturbed(draft) and allowed(match.op, match.parts):
            args = first.args | {"low": second.args["inp"], "up": second.args["weight"], "out": call.writes[0]}
            replace(draft, call, match.op, args, without=match.parts)
            draft.gone.update(match.gone)


def _of_one_shape(first: Call, second: Call, call: Call) -> bool:
    """Return whether an element of the sum is one of each product in the same row and column."""
    rows, columns = ({c.sizes[s] for c in (first, second)} for s in ("BT", "OC"))
    return len(rows) == 1 and columns == {call.writes[0].shape[-1]}


def _made_by(draft: Draft, value: Value, reader: Call) -> Call | None:
    """Return the product that makes a value before a call reads it, if nothing else writes it."""
    makers = [c for c in draft.users([value], before=reader) if value in c.writes]
    return makers[0] if len(makers) == 1 and makers[0].op.role == "product" else None
