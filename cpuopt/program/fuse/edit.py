"""The common parts of the rewrites: a program's calls while they are edited, and calls that one call can replace.

A rewrite asks which calls use a value, and where they stand. A `Draft` knows both without a look at the other calls, so
the time of a rewrite grows as the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from ...ops.declaration import Op, Role
from ..program import Call, Phase, Program, Value

Allowed = Callable[[Op, Sequence[Call]], bool]
"""A function that returns whether a call of an op may replace some calls: no swap names one of those."""


class Draft:
    """A program's calls while they are rewritten; `close` gives them back to the program.

    Attributes
    ----------
    place : the calls, each with a number that tells where it stands.
    gone : values that no call has any more; they are no outputs, and no adjoints.
    shared : values whose place another took.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place: dict[Call, float] = {}
        self.gone: set[Value] = set()
        self.shared: dict[Value, Value] = {}
        self._users: dict[Value, set[Call]] = {}
        for i, call in enumerate(program.calls):
            self._put(call, i)

    @property
    def calls(self) -> list[Call]:
        """The calls in their order."""
        return sorted(self.place, key=self.place.__getitem__)

    def users(self, values: Iterable[Value], after: Call | None = None, before: Call | None = None) -> list[Call]:
        """List the calls that use any of some values, in their order; those between two calls, if they are given."""
        low = -inf if after is None else self.place[after]
        high = inf if before is None else self.place[before]
        found = {c for v in values for c in self._users.get(v, ()) if low < self.place[c] < high}
        return sorted(found, key=self.place.__getitem__)

    def insert(self, call: Call, before: Call) -> None:
        """Put a new call right before another."""
        self._put(call, self.place[before] - 0.5)

    def replace(self, call: Call, new: Call, *, without: Sequence[Call]) -> None:
        """Put a new call in the place of another, and drop the calls whose work it does too."""
        place = self.place[call]
        for old in {call, *without}:
            self.remove(old)
        self._put(new, place)

    def remove(self, call: Call) -> None:
        """Drop a call."""
        del self.place[call]
        for v in _values(call):
            self._users[v].discard(call)

    def rename(self, old: Value, new: Value, calls: Iterable[Call]) -> None:
        """Replace a value by another in some calls."""
        for call in calls:
            call.args = {n: new if v is old else v for n, v in call.args.items()}
            self._users[old].discard(call)
            self._users.setdefault(new, set()).add(call)

    def close(self) -> None:
        """Write the calls to the program, and what became of its values."""
        program = self.program
        program.calls = self.calls
        program.outputs = [v for v in program.outputs if v not in self.gone]
        program.norm_terms = [v for v in program.norm_terms if v not in self.gone]
        adjoint = {v: self._now(d) for v, d in program.adjoint.items()}
        program.adjoint = {v: d for v, d in adjoint.items() if v not in self.gone and d not in self.gone}

    def _now(self, value: Value) -> Value:
        while value in self.shared:
            value = self.shared[value]
        return value

    def _put(self, call: Call, place: float) -> None:
        self.place[call] = place
        for v in _values(call):
            self._users.setdefault(v, set()).add(call)


def _values(call: Call) -> list[Value]:
    return [v for v in call.args.values() if isinstance(v, Value)]


Rewrite = Callable[[Draft, Allowed], None]


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
        fused = [c.op for c in parts]
        return next((cls(op, parts, at) for op in fused[0].fusions if op.stands_for(fused)), None)

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

    def holds(self, draft: Draft) -> bool:
        """Return whether one call computes the same as the parts, without an effect on other calls."""
        return not self.viewed and self.complete and self.distinct and self.private(draft) and self.undisturbed(draft)

    @property
    def viewed(self) -> bool:
        """Return whether a part takes a value in another shape, where rows may not be those of another part."""
        return any(c.views for c in self.parts)

    @property
    def complete(self) -> bool:
        """Return whether the op has an argument for each that a part has, and can add if a part adds."""
        args = [(self.op.by_name.get(n), add) for n, v, add in self.given if v is not None]
        return len(dict(args)) == len(args) and all(a and (a.kind == "acc" or not add) for a, add in args)

    @property
    def distinct(self) -> bool:
        """Return whether no value is given twice if the op's backward makes a gradient of each."""
        known = {a.name[1:] for op in self.op.backwards for a in op.args if a.kind == "acc"}
        values = [v for n, v, _ in self.given if n in known and v is not None]
        return len(set(values)) == len(values)

    def private(self, draft: Draft) -> bool:
        """Return whether the parts alone use the values that go away."""
        return all(c in self.parts for c in draft.users(self.gone))

    def undisturbed(self, draft: Draft) -> bool:
        """Return whether no call on a part's way to the place uses what the part makes, or writes what it reads."""
        there = self.parts[self.at]
        for part in self.parts:
            way = sorted((part, there), key=draft.place.__getitem__)
            disturbing = draft.users(part.writes, *way)
            disturbing += [c for c in draft.users(part.reads, *way) if set(c.writes) & set(part.reads)]
            if not all(c in self.parts for c in disturbing):
                return False
        return True

    def call(self, phase: Phase | None = None) -> Call:
        """Make the call that replaces the parts."""
        place, args = self.parts[self.at], {n: v for n, v, _ in self.given}
        adds = {a.name: (a.name, args.get(a.name), True) in self.given for a in self.op.args if a.kind == "acc"}
        sizes = {s: n for c in self.parts for s, n in c.given.items()}
        return Call(self.op, place.layer, only(self.op, args), phase or place.phase, adds, place.inverts, sizes)

    def apply(self, draft: Draft) -> None:
        """Replace the parts by the one call."""
        draft.replace(self.parts[self.at], self.call(), without=self.parts)
        draft.gone.update(self.gone)


def matches(draft: Draft, first: Role, second: Role, at: int) -> Iterator[Match]:
    """Find the calls of one role whose result a call of another is the first to use, as its operand."""
    for call in draft.calls:
        if call.op.role == first and call in draft.place:
            made = call.writes[:1]
            user = next(iter(draft.users(made, after=call)), None)
            if user and user.op.role == second and user.args[user.op.operand] in made:
                yield from filter(None, [Match.of(call, user, at=at)])


def only(op: Op, args: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that an op declares."""
    return {a.name: args[a.name] if a.needed else args.get(a.name) for a in op.args}


def replace(
    draft: Draft,
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
    draft.replace(call, new, without=without)
