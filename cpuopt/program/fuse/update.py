"""Apply a weight's update as its gradient is made, where nothing else needs that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import ops
from ...ops.classifier import BLOCK
from ..program import Call, Value
from .edit import Allowed, Draft, replace

AT_ONCE = 1024
"""Tokens whose head is updated in the backward, though their logits may take more memory than a gradient would."""


def update_in_backward(draft: Draft, allowed: Allowed) -> None:
    """Replace a weight gradient and the update that is its only reader by one call."""
    for call in [c for c in draft.calls if c.op is ops.matmul_backward_weight and c.args["dweight"] is not None]:
        grads = {n: call.args[f"d{n}"] for n in ("weight", "bias") if call.args[f"d{n}"] is not None}
        found = _updates(draft, call, list(grads.values()))
        if any(call.adds.values()) or found is None:
            continue
        op = found.optimizer.fused["matmul_update"]
        if not allowed(op, [call, *found.calls]):
            continue
        args = {**dict.fromkeys(a.name for a in op.arrays), **call.args, **found.scalars, "sumsq": found.sums[0]}
        for name, grad in grads.items():
            args |= found.arrays(name, grad)
            args[f"{name}_decay"] = found.steps[grad].args.get("weight_decay")
        args.setdefault("bias_decay", args.get("weight_decay"))
        replace(draft, call, op, args, without=found.calls)
        draft.gone.update(found.sums[1:], grads.values())
    for call in [c for c in draft.calls if c.op is ops.classifier_backward and not c.absent]:
        _update_classifier(draft, call, allowed)


def _update_classifier(draft: Draft, call: Call, allowed: Allowed) -> None:
    """Update the head's weight in the backward; if it is the token embedding too, the tokens' rows at its end."""
    program, grad = draft.program, call.args["dweight"]
    tied = [c for c in draft.users([grad]) if c.op is ops.embedding_backward and c.args["dwte"] is grad]
    found = _updates(draft, call, [grad], but=tied)
    if not _few_tokens(call) or call.adds["dweight"] or found is None or len(tied) > 1:
        return
    head, rows = (found.optimizer.fused[name] for name in ("classifier_update", "embedding_update"))
    if not allowed(head, [call, *found.calls]) or (tied and not allowed(rows, [*tied, *found.calls])):
        return
    args = {**call.args, **found.scalars, **found.arrays("weight", grad), "sumsq": found.sums[0]}
    args |= {"held": None, "tokens": None, "copy": None}
    for last in tied:
        dout = last.args["dout"]
        args |= {"tokens": last.args["tokens"], "held": program.value(f"{call.layer}.held", dout.shape, "gradient")}
        total = program.value(f"{args['held']}.sumsq", (1,))
        program.norm_terms.append(total)
        rest = {**last.args, **found.scalars, **found.arrays("wte", grad), "held": args["held"], "sumsq": total}
        replace(draft, last, rows, rest, without=[], adds={"dwpe": last.adds["dwpe"]})
    replace(draft, call, head, args, without=found.calls, adds={"dinp": call.adds["dinp"]})
    draft.gone.add(grad)


def _few_tokens(call: Call) -> bool:
    """Return whether the logits of all tokens may exist at one time, as an update of the head needs them.

    Those of `BLOCK + C` tokens take the memory of a block's and dweight. `held` is no larger than dweight.
    """
    tokens, width, words = (call.sizes[size] for size in ("BT", "C", "V"))
    return tokens <= max(BLOCK, min(words, max(AT_ONCE, BLOCK + width)))


@dataclass(frozen=True)
class Updates:
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
        return {a.name: step.args[a.name] for a in self.optimizer.args if a.role == "scalar"}

    def arrays(self, parameter: str, grad: Value) -> dict[str, Any]:
        """The parameter of a gradient and its states, by their names in a fused op."""
        return {to: self.steps[grad].args[name] for name, to in self.optimizer.names(parameter).items()}


def _updates(draft: Draft, call: Call, grads: list[Value], but: Sequence[Call] = ()) -> Updates | None:
    """Find the updates from gradients that a call makes; None where another call needs a gradient, or its parameter."""
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
    return Updates(users, steps, optimizers.pop())
