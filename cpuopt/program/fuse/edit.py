"""What the rewrites share: calls that one call of another op can stand for, and the edit that puts it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...ops.declaration import Op, Part
from ..program import Call, Phase, Program, Value

Allowed = Callable[[Op, Sequence[Call]], bool]
"""Whether a call of an op may take the place of some calls: no swap names one of those."""
Rewrite = Callable[[Program, Allowed], None]


def pairs(program: Program, first: Part, second: Part) -> list[tuple[Call, Call]]:
    """Find the calls of one role whose result a call of another is the first to use, as its operand."""
    found = []
    for i, call in enumerate(program.calls):
        if call.op.role == first:
            made = call.writes[0]
            user = next((c for c in program.calls[i + 1 :] if made in c.args.values()), None)
            if user and user.op.role == second and user.args[user.op.operand] is made:
                found.append((call, user))
    return found


@dataclass(frozen=True)
class Match:
    """Calls whose ops another op fuses; one call of it can stand for them where `holds` says so.

    Parameters
    ----------
    parts : in the order of the program.
    at : which of the parts gives the one call its place, layer and phase.
    """

    op: Op
    parts: tuple[Call, ...]
    at: int

    @classmethod
    def of(cls, *parts: Call, at: int) -> Match | None:
        """Find the op that fuses those of some calls."""
        fused = tuple(c.op for c in parts)
        return next((cls(op, parts, at) for op in fused[0].fused if op.fuses == fused), None)

    @cached_property
    def inner(self) -> list[Value]:
        """The values that one part makes for a later one."""
        return [v for i, c in enumerate(self.parts) for v in c.writes if any(v in d.reads for d in self.parts[i + 1 :])]

    @cached_property
    def named(self) -> set[tuple[str, Any]]:
        """The parts' arguments, named as the op names them; of the inner values those that it has a name for."""
        every = {(self._name(c, n), v) for c in self.parts for n, v in c.args.items()}
        return {(n, v) for n, v in every if v not in self.inner or n in self.op.names.values()}

    @cached_property
    def gone(self) -> list[Value]:
        """The inner values that no call has any more."""
        return [v for v in self.inner if v not in dict(self.named).values()]

    @cached_property
    def added(self) -> set[str]:
        """The arguments that a part adds to."""
        return {self._name(c, n) for c in self.parts for n, add in c.adds.items() if add}

    def holds(self, program: Program) -> bool:
        """Whether one call does what the parts do, and nothing else in the program notices."""
        return self.complete and self.private(program) and self.undisturbed(program)

    @property
    def complete(self) -> bool:
        """Whether the op has one argument for each that a part has, and can add where a part adds."""
        names = [n for n, v in self.named if v is not None]
        can_add = {a.name for a in self.op.args if a.role == "acc"}
        return set(names) <= self.op.by_name.keys() and len(set(names)) == len(names) and self.added <= can_add

    def private(self, program: Program) -> bool:
        """Whether the parts alone use the values that go away."""
        return all(c in self.parts for c in program.calls if not set(self.gone).isdisjoint(c.args.values()))

    def undisturbed(self, program: Program) -> bool:
        """Whether no call on a part's way to the place uses what the part makes, or writes what it reads."""
        there = program.calls.index(self.parts[self.at])
        for part in self.parts:
            here = program.calls.index(part)
            between = [c for c in program.calls[min(here, there) + 1 : max(here, there)] if c not in self.parts]
            if any(v in c.args.values() for c in between for v in part.writes):
                return False
            if any(v in part.reads for c in between for v in c.writes):
                return False
        return True

    def call(self, phase: Phase | None = None) -> Call:
        """Make the one call."""
        place, args = self.parts[self.at], dict(self.named)
        adds = {a.name: a.name in self.added for a in self.op.args if a.role == "acc"}
        given = {s: n for c in self.parts for s, n in c.given.items()}
        return Call(self.op, place.layer, only(self.op, args), phase or place.phase, adds, place.inverts, given)

    def apply(self, program: Program) -> None:
        """Put the one call in the place of the parts; what goes away is no output, and has no adjoint."""
        gone = self.gone
        program.calls[program.calls.index(self.parts[self.at])] = self.call()
        program.calls = [c for c in program.calls if c not in self.parts]
        program.outputs = [v for v in program.outputs if v not in gone]
        program.adjoint = {v: d for v, d in program.adjoint.items() if v not in gone and d not in gone}

    def _name(self, part: Call, name: str) -> str:
        return self.op.names.get(name, name) if part is self.parts[-1] else name


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
