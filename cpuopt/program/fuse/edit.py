"""The common parts of the rewrites: calls that one call of another op can replace, and the edit that does so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...ops.declaration import Op, Part
from ..program import Call, Phase, Program, Value

Allowed = Callable[[Op, Sequence[Call]], bool]
"""A function that returns whether a call of an op may replace some calls: no swap names one of those."""
Rewrite = Callable[[Program, Allowed], None]


@dataclass(frozen=True)
class Match:
    """Calls whose ops another op fuses; one call of it can replace them where `holds` is true.

    Parameters
    ----------
    parts : the calls in the order of the program.
    at : the index of the part whose place, layer and phase the one call gets.
    """

    op: Op
    parts: tuple[Call, ...]
    at: int

    @classmethod
    def of(cls, *parts: Call, at: int) -> Match | None:
        """Find the op that fuses the ops of some calls."""
        fused = tuple(c.op for c in parts)
        return next((cls(op, parts, at) for op in fused[0].fusions if op.fuses == fused), None)

    @cached_property
    def inner(self) -> list[Value]:
        """The values that one part makes for a later one."""
        return [v for i, c in enumerate(self.parts) for v in c.writes if any(v in d.reads for d in self.parts[i + 1 :])]

    @cached_property
    def given(self) -> set[tuple[str, Any, bool]]:
        """The parts' arguments: name in the op, value, whether it is added to; inner values if the op names them."""
        last, renames = self.parts[-1], self.op.renames
        every = [(c, n, renames.get(n, n) if c is last else n) for c in self.parts for n in c.args]
        kept = [(c, n, new) for c, n, new in every if c.args[n] not in self.inner or new in renames.values()]
        return {(new, c.args[n], c.adds.get(n, False)) for c, n, new in kept}

    @cached_property
    def gone(self) -> list[Value]:
        """The inner values that no call has any more."""
        return [v for v in self.inner if all(v is not other for _, other, _ in self.given)]

    def holds(self, program: Program) -> bool:
        """Return whether one call computes the same as the parts, without an effect on other calls."""
        return self.complete and self.distinct and self.private(program) and self.undisturbed(program)

    @property
    def complete(self) -> bool:
        """Return whether the op has an argument for each that a part has, and can add where a part adds."""
        args = [(self.op.by_name.get(n), add) for n, v, add in self.given if v is not None]
        return len(dict(args)) == len(args) and all(a and (a.role == "acc" or not add) for a, add in args)

    @property
    def distinct(self) -> bool:
        """Return whether no value is given twice where the op's backward makes a gradient of each."""
        known = {a.name[1:] for op in self.op.backwards for a in op.args if a.role == "acc"}
        values = [v for n, v, _ in self.given if n in known and v is not None]
        return len(set(values)) == len(values)

    def private(self, program: Program) -> bool:
        """Return whether the parts alone use the values that go away."""
        return all(c in self.parts for c in program.calls if _uses(c, self.gone))

    def undisturbed(self, program: Program) -> bool:
        """Return whether no call on a part's way to the place uses what the part makes, or writes what it reads."""
        at = program.calls.index
        there = at(self.parts[self.at])
        ways = [(part, program.calls[min(at(part), there) : max(at(part), there)]) for part in self.parts]
        passed = [(part, c) for part, calls in ways for c in calls if c not in self.parts]
        return not any(_uses(c, part.writes) or set(c.writes) & set(part.reads) for part, c in passed)

    def call(self, phase: Phase | None = None) -> Call:
        """Make the call that replaces the parts."""
        place, args = self.parts[self.at], {n: v for n, v, _ in self.given}
        adds = {a.name: (a.name, args[a.name], True) in self.given for a in self.op.args if a.role == "acc"}
        sizes = {s: n for c in self.parts for s, n in c.given.items()}
        return Call(self.op, place.layer, only(self.op, args), phase or place.phase, adds, place.inverts, sizes)

    def apply(self, program: Program) -> None:
        """Replace the parts by the one call; values that go away are no outputs, and have no adjoint."""
        program.calls[program.calls.index(self.parts[self.at])] = self.call()
        program.calls = [c for c in program.calls if c not in self.parts]
        program.outputs = [v for v in program.outputs if v not in self.gone]
        program.adjoint = {v: d for v, d in program.adjoint.items() if v not in self.gone and d not in self.gone}


def matches(program: Program, first: Part, second: Part, at: int) -> Iterator[Match]:
    """Find the calls of one role whose result a call of another is the first to use, as its operand."""
    calls = list(program.calls)
    for i, call in enumerate(calls):
        if call.op.role != first:
            continue
        made = call.writes[:1]
        user = next((c for c in calls[i + 1 :] if _uses(c, made)), None)
        if user and user.op.role == second and user.args[user.op.operand] in made:
            yield from filter(None, [Match.of(call, user, at=at)])


def _uses(call: Call, values: Sequence[Value]) -> bool:
    return any(v in call.args.values() for v in values)


def only(op: Op, args: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that an op declares."""
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
    """Replace a call by one of another op, and drop the calls whose work it does too."""
    given = {s: n for c in [*without, call] for s, n in c.given.items()}
    new = Call(op, call.layer, only(op, args), call.phase, adds or {}, call.inverts, given)
    program.calls[program.calls.index(call)] = new
    program.calls = [c for c in program.calls if c not in without]
