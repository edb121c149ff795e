"""What the rewrites share: when one is allowed, which calls follow each other, one call in place of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...ops.declaration import Op
from ..program import Call, Program

Allowed = Callable[[Op, Sequence[Call]], bool]
"""Whether a call of an op may take the place of some calls: no swap names one of those."""
Rewrite = Callable[[Program, Allowed], None]


def pairs(program: Program, first: Op, second: Op) -> list[tuple[Call, Call]]:
    """Find the calls of one op that those of another follow at once."""
    return [(a, b) for a, b in zip(program.calls, program.calls[1:], strict=False) if a.op is first and b.op is second]


def only(op: Op, args: dict[str, Any]) -> dict[str, Any]:
    """Pick the arguments that an op declares."""
    return {a.name: args[a.name] for a in op.args}


def replace(
    program: Program,
    call: Call,
    op: Op,
    args: dict[str, Any],
    *,
    without: Sequence[Call],
    adds: dict[str, bool] | None = None,
) -> None:
    """Put a call of another op in the place of one, and drop those whose work it does too."""
    given = {s: n for c in [*without, call] for s, n in c.given.items()}
    new = Call(op, call.layer, only(op, args), call.phase, adds or {}, call.inverts, given)
    program.calls[program.calls.index(call)] = new
    program.calls = [c for c in program.calls if c not in without]
