"""Apply a weight's AdamW step as its gradient is made, where nothing else needs that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import ops
from ...ops.classifier import BLOCK
from ..program import Call, Program, Value
from .edit import Allowed, replace


def update_in_backward(program: Program, allowed: Allowed) -> None:
    """Replace a weight gradient and the update that is its only reader by one call."""
    for call in [c for c in program.calls if c.op is ops.matmul_backward_weight]:
        grads = {n: call.args[f"d{n}"] for n in ("weight", "bias") if call.args[f"d{n}"] is not None}
        found = _updates(program, call, list(grads.values()))
        if any(call.adds.values()) or found is None or not allowed(ops.matmul_update, [call, *found.calls]):
            continue
        args = {**call.args, **found.scalars, "sumsq": found.sums[0], "bias": None, "bias_m": None, "bias_v": None}
        for name, grad in grads.items():
            step = found.steps[grad].args
            args |= {name: step["param"], f"{name}_m": step["m"], f"{name}_v": step["v"]}
            args[f"{name}_decay"] = step["weight_decay"]
        args.setdefault("bias_decay", args["weight_decay"])
        replace(program, call, ops.matmul_update, args, without=found.calls)
        program.norm_terms = [v for v in program.norm_terms if v not in found.sums[1:]]
        program.adjoint = {v: d for v, d in program.adjoint.items() if d not in grads.values()}
    for call in [c for c in program.calls if c.op is ops.classifier_backward]:
        _update_classifier(program, call, allowed)


def _update_classifier(program: Program, call: Call, allowed: Allowed) -> None:
    """Update the head's weight in the backward; if it is the token embedding too, the tokens' rows at its end."""
    grad = call.args["dweight"]
    tied = [c for c in program.calls if c.op is ops.embedding_backward and c.args["dwte"] is grad]
    found = _updates(program, call, [grad], but=tied)
    if call.sizes["BT"] > BLOCK or call.adds["dweight"] or found is None or len(tied) > 1:
        return
    if not allowed(ops.classifier_update, [call, *found.calls]) or (
        tied and not allowed(ops.embedding_update, [*tied, *found.calls])
    ):
        return
    step = found.steps[grad].args
    args = {**call.args, **found.scalars, "sumsq": found.sums[0], "held": None, "tokens": None}
    args |= {"weight": step["param"], "weight_m": step["m"], "weight_v": step["v"]}
    for last in tied:
        dout = last.args["dout"]
        args |= {"tokens": last.args["tokens"], "held": program.value(f"{call.layer}.held", dout.shape, "gradient")}
        total = program.value(f"{args['held']}.sumsq", (1,))
        program.norm_terms.append(total)
        rest = {**last.args, **found.scalars, "held": args["held"], "sumsq": total}
        rest |= {"wte": step["param"], "wte_m": step["m"], "wte_v": step["v"]}
        adds = {"dwpe": last.adds["dwpe"]}
        replace(program, last, ops.embedding_update, rest, without=[], adds=adds)
    adds = {"dinp": call.adds["dinp"]}
    replace(program, call, ops.classifier_update, args, without=found.calls, adds=adds)
    program.adjoint = {v: d for v, d in program.adjoint.items() if d is not grad}


@dataclass(frozen=True)
class Updates:
    """The calls of ``sumsq`` and ``adamw`` that read some gradients, with the values that they bring along."""

    calls: list[Call]
    steps: dict[Value, Call]

    @property
    def sums(self) -> list[Value]:
        """The shares of the norm."""
        return [c.args["out"] for c in self.calls if c.op is ops.sumsq]

    @property
    def scalars(self) -> dict[str, Any]:
        """The numbers that AdamW is given, without the scale of the gradient, which is 1 here."""
        step = next(iter(self.steps.values()))
        return {a.name: step.args[a.name] for a in ops.adamw.args if a.role == "scalar" and a.name != "grad_scale"}


def _updates(program: Program, call: Call, grads: list[Value], but: Sequence[Call] = ()) -> Updates | None:
    """Find the updates from gradients that a call makes; None where another call needs a gradient, or its parameter."""
    users = [c for c in program.calls if c is not call and c not in but and any(g in c.args.values() for g in grads)]
    steps = {c.args["grad"]: c for c in users if c.op is ops.adamw}
    weights = [steps[g].args["param"] for g in grads if g in steps]
    after = program.calls[program.calls.index(call) + 1 :]
    if (
        any(g not in steps for g in grads)
        or any(c.op not in (ops.adamw, ops.sumsq) for c in users)
        or any(w in c.args.values() for c in after if c not in users for w in weights)
    ):
        return None
    return Updates(users, steps)
