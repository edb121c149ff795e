"""Apply a weight's update as its gradient is made, where nothing else needs that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import ops
from ..program import Call, Value
from .edit import Allowed, Draft, replace


def update_in_backward(draft: Draft, allowed: Allowed) -> None:
    """Replace an op that makes the gradient of a weight, and the update that is its only reader, by one call.

    If the weight's gradient has rows of a lookup too, a second call finishes them.
    """
    for call in [c for c in draft.calls if c.op.updates and not c.op.updates.rows]:
        how, program = call.op.updates, draft.program
        assert how
        grads = {g[1:]: call.args[g] for g in how.gradients if call.args[g] is not None}
        whole = all(a.optional or call.args[a.name] is not None for a in call.op.arrays)
        if not whole or any(call.adds[g] for g in how.gradients) or not how.fits(call.sizes):
            continue
        lookups = [c for c in draft.users(grads.values()) if how.aside and _looked_up(c) in grads.values()]
        found = _updates(draft, call, list(grads.values()), but=lookups)
        if found is None or len(lookups) > 1:
            continue
        op, *others = (ops.updated(c.op, found.optimizer) for c in (call, *lookups))
        if not all(allowed(o, [c, *found.calls]) for o, c in ((op, call), *zip(others, lookups, strict=True))):
            continue
        args = found.args(call, op) | {"sumsq": found.sums[0]}
        for other, last in zip(others, lookups, strict=True):
            held = program.value(f"{call.layer}.held", last.args[last.op.operand].shape, "gradient")
            total = program.value(f"{held}.sumsq", (1,))
            program.norm_terms.append(total)
            rest = found.args(last, other) | {"held": held, "sumsq": total}
            replace(draft, last, other, rest, without=[], adds=last.adds)
            args |= {"held": held, "tokens": last.args[last.op.updates.rows] if last.op.updates else None}
        replace(draft, call, op, args, without=found.calls, adds=call.adds)
        draft.gone.update(found.sums[1:], grads.values())


def _looked_up(call: Call) -> Value | None:
    """Return the gradient that a call adds the rows of a lookup to; None for other calls."""
    how = call.op.updates
    return call.args[how.gradients[0]] if how and how.rows else None


@dataclass(frozen=True)
class UpdateCalls:
    """The calls of ``sumsq`` and of one optimizer that read some gradients, with their other values."""

    calls: list[Call]
    steps: dict[Value, Call]
    optimizer: ops.Optimizer

    @property
    def sums(self) -> list[Value]:
        """The terms of the norm."""
        return [c.args["out"] for c in self.calls if c.op is ops.sumsq]

    @property
    def scalars(self) -> dict[str, Any]:
        """The optimizer's numbers without the scale of the gradient, which is 1 here."""
        step = next(iter(self.steps.values()))
        return {a.name: step.args[a.name] for a in self.optimizer.args if a.kind == "scalar"}

    def args(self, call: Call, op: ops.Op) -> dict[str, Any]:
        """The arguments of a fused op in place of a call: those of the call, of parameters with states, and numbers."""
        args = dict.fromkeys((a.name for a in op.arrays), None) | call.args | self.scalars
        for gradient in call.op.updates.gradients if call.op.updates else ():
            step, name = self.steps.get(call.args[gradient]), gradient[1:]
            if step:
                args |= {to: step.args[n] for n, to in self.optimizer.names(name).items()}
            args[f"{name}_first"] = step.args["first"] if step else 0
            args[f"{name}_decay"] = step.args.get("weight_decay") if step else args.get("weight_decay")
        weight = call.op.updates.parameters[0] if call.op.updates else ""
        return args | {"first": args[f"{weight}_first"]}


def _updates(draft: Draft, call: Call, grads: list[Value], but: Sequence[Call] = ()) -> UpdateCalls | None:
    """Find the updates from gradients that a call makes; None if another call needs a gradient, or its parameter."""
    users = [c for c in draft.users(grads) if c is not call and c not in but]
    steps = {c.args["grad"]: c for c in users if isinstance(c.op, ops.Optimizer)}
    optimizers = {c.op for c in steps.values() if isinstance(c.op, ops.Optimizer)}
    weights = [steps[g].args["param"] for g in grads if g in steps]
    if (
        any(g not in steps for g in grads)
        or any(c.op is not ops.sumsq and c.op not in optimizers for c in users)
        or any(c not in users for c in draft.users(weights, after=call))
        or len(optimizers) != 1
    ):
        return None
    return UpdateCalls(users, steps, optimizers.pop())
