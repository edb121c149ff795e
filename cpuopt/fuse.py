"""Rewrites of a training program that remove work; each is verified, can be switched off, and gives the same numbers.

``residual`` shares the gradient of the residual stream instead of copying it. ``update`` applies a linear layer's AdamW
step as its weight gradient is made, where nothing else needs that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import ops
from .errors import UserError
from .op import Op
from .program import Call, Program, Value
from .registry import KERNELS, Choice, nearest, op_matches

Rewrite = Callable[[Program, Callable[[Op, str], bool]], None]


def fuse(program: Program, names: Sequence[str], choice: Choice) -> list[str]:
    """Apply rewrites in place; return a note for each layer that a swap keeps from being fused.

    Parameters
    ----------
    names : of the rewrites, out of ``FUSIONS``.
    choice : a swap that names an op inside a fusion keeps the layers that it names from being fused.

    Raises
    ------
    UserError
        For a rewrite that does not exist.
    """
    notes: dict[str, None] = {}

    def allowed(fused: Op, layer: str) -> bool:
        for rule in choice.swaps:
            parts = [p.name for p in fused.fuses or (fused,) if op_matches(p.name, rule.op)]
            named = [name for name in parts if (name, rule.variant) in KERNELS]
            meant = fused.fuses and op_matches(fused.name, rule.op) and (fused.name, rule.variant) in KERNELS
            if named and rule.covers(layer) and not meant:
                notes[f"--swap '{rule}' keeps {named[0]} in layer {layer!r} from being rewritten"] = None
                return False
        return True

    for name in names:
        if name not in FUSIONS:
            raise UserError(f"--fuse {name!r}: no such rewrite; {nearest(name, [*FUSIONS, 'all', 'none'])}")
    for name, rewrite in FUSIONS.items():
        if name in names:
            rewrite(program, allowed)
            program.verify()
    return list(notes)


def parse(text: str) -> tuple[str, ...]:
    """Read ``all``, ``none`` or a list such as ``residual,update``."""
    if text == "all":
        return tuple(FUSIONS)
    return () if text == "none" else tuple(text.split(","))


def share_residual(program: Program, allowed: Callable[[Op, str], bool]) -> None:
    """Let both gradients of a residual connection be the one that comes in, where no later write disturbs a reader."""
    for call in [c for c in program.calls if c.op is ops.residual_backward]:
        source, shares = call.args["dout"], [call.args["dinp1"], call.args["dinp2"]]
        later = program.calls[program.calls.index(call) + 1 :]
        own = source.group == "adjoint" and not any(call.adds.values())  # the loss's own adjoint is given, not made
        if own and allowed(ops.residual_backward, call.layer) and _can_share([source, *shares], later):
            program.calls.remove(call)
            for c in program.calls:
                c.args = {n: source if v in shares else v for n, v in c.args.items()}
            program.adjoint = {v: source if d in shares else d for v, d in program.adjoint.items()}


def _can_share(values: list[Value], later: Sequence[Call]) -> bool:
    """Whether values that are equal now can be one: after the first write to one, only that one may be used."""
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


def update_in_backward(program: Program, allowed: Callable[[Op, str], bool]) -> None:
    """Replace a weight gradient and the update that is its only reader by one call."""
    for call in [c for c in program.calls if c.op is ops.matmul_backward_weight]:
        grads = [call.args[n] for n in ("dweight", "dbias") if call.args[n] is not None]
        users = [c for c in program.calls if c is not call and any(g in c.args.values() for g in grads)]
        updates = {c.args["grad"]: c for c in users if c.op is ops.adamw}
        weights = [updates[g].args["param"] for g in grads if g in updates]
        after = program.calls[program.calls.index(call) + 1 :]
        if (
            any(call.adds.values())
            or any(g not in updates for g in grads)
            or any(c.op not in (ops.adamw, ops.sumsq) for c in users)
            or any(w in c.args.values() for c in after if c not in users for w in weights)
            or not allowed(ops.matmul_update, call.layer)
        ):
            continue
        args: dict[str, object] = {"dout": call.args["dout"], "inp": call.args["inp"]}
        for prefix, grad in (("weight", call.args["dweight"]), ("bias", call.args["dbias"])):
            update = updates[grad].args if grad is not None else dict.fromkeys(("param", "m", "v"))
            args |= {prefix: update["param"], f"{prefix}_m": update["m"], f"{prefix}_v": update["v"]}
        args |= {a.name: updates[grads[0]].args[a.name] for a in ops.matmul_update.args if a.role == "scalar"}
        sums = [c.args["out"] for c in users if c.op is ops.sumsq]
        args["sumsq"] = sums[0]
        program.outputs = [v for v in program.outputs if v not in sums[1:]]
        program.calls[program.calls.index(call)] = Call(
            ops.matmul_update, call.layer, args, "backward", inverts=call.inverts
        )
        program.calls = [c for c in program.calls if c not in users]
        program.adjoint = {v: d for v, d in program.adjoint.items() if d not in grads}


FUSIONS: dict[str, Rewrite] = {"residual": share_residual, "update": update_in_backward}
"""The rewrites by name, in the order in which they are applied."""
