"""Rewrites of a training program that remove work; each is verified, can be switched off, and gives the same numbers.

``residual`` shares the gradient of the residual stream instead of copying it. ``layernorm`` normalizes a residual sum
as it is made. ``gelu`` takes GELU, and its slope, in the product that makes its operand. ``classifier`` makes head and
loss one call over blocks of tokens. ``update`` applies a weight's AdamW step as its gradient is made, where nothing
else needs that gradient. ``recompute`` keeps neither GELU's nor layer normalization's result for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..errors import UserError
from ..kernels import registry
from ..kernels.registry import Choice, nearest, op_matches
from ..ops.classifier import BLOCK
from ..ops.declaration import Op
from .program import Call, Program, Value

Allowed = Callable[[Op, Sequence[Call]], bool]
"""Whether a call of an op may take the place of some calls: no swap names one of those."""
Rewrite = Callable[[Program, Allowed], None]


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

    def allowed(fused: Op, parts: Sequence[Call]) -> bool:
        for rule in choice.swaps:
            if op_matches(fused.name, rule.op) and fused.fuses and (fused.name, rule.variant) in registry.KERNELS:
                continue
            for name, layer in dict.fromkeys((c.op.name, c.layer) for c in parts):
                if op_matches(name, rule.op) and rule.covers(layer) and (name, rule.variant) in registry.KERNELS:
                    notes[f"--swap '{rule}' keeps {name} in layer {layer!r} from being rewritten"] = None
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


def share_residual(program: Program, allowed: Allowed) -> None:
    """Let both gradients of a residual connection be the one that comes in, where no later write disturbs a reader."""
    for call in [c for c in program.calls if c.op is ops.residual_backward]:
        source, shares = call.args["dout"], [call.args["dinp1"], call.args["dinp2"]]
        later = program.calls[program.calls.index(call) + 1 :]
        own = source.group == "adjoint" and not any(call.adds.values())  # the loss's own adjoint is given, not made
        if own and allowed(ops.residual_backward, [call]) and _can_share([source, *shares], later):
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


def normalize_sums(program: Program, allowed: Allowed) -> None:
    """Let a residual connection and the layer normalization that follows it be one call."""
    for first, second in _pairs(program, ops.residual_forward, ops.layernorm_forward):
        if first.args["out"] is second.args["inp"] and allowed(ops.residual_layernorm_forward, [first, second]):
            args = {**first.args, **second.args, "residual": first.args["out"]}
            _replace(program, second, ops.residual_layernorm_forward, args, without=[first])


def gelu_with_product(program: Program, allowed: Allowed) -> None:
    """Take GELU in the product before it, and its slope in the product that gives its gradient."""
    for product, gelu in _pairs(program, ops.matmul_forward, ops.gelu_forward):
        if product.args["out"] is gelu.args["inp"] and allowed(ops.matmul_gelu_forward, [product, gelu]):
            args = {**product.args, "pre": product.args["out"], "out": gelu.args["out"]}
            _replace(program, product, ops.matmul_gelu_forward, args, without=[gelu])
    for product in [c for c in program.calls if c.op is ops.matmul_backward_input]:
        between = program.calls[program.calls.index(product) + 1 :]
        users = [c for c in program.calls if c is not product and product.args["dinp"] in c.args.values()]
        if len(users) != 1 or users[0].op is not ops.gelu_backward or users[0] not in between:
            continue
        gelu = users[0]
        dpre, pre = gelu.args["dinp"], gelu.args["inp"]
        between = between[: between.index(gelu)]
        adds = product.adds["dinp"] or gelu.adds["dinp"]
        disturbed = any(dpre in c.args.values() or pre in c.writes for c in between)
        if not adds and not disturbed and allowed(ops.matmul_gelu_backward, [product, gelu]):
            args = {**product.args, "dpre": dpre, "pre": pre}
            _replace(program, product, ops.matmul_gelu_backward, args, without=[gelu])
            program.adjoint = {v: d for v, d in program.adjoint.items() if d is not product.args["dinp"]}


def head_with_loss(program: Program, allowed: Allowed) -> None:
    """Make a head without bias, its loss and their backwards one call; the logits are no output any more."""
    chain = [
        ops.cross_entropy_backward,
        ops.matmul_backward_input,
        ops.matmul_backward_weight,
    ]
    for head, loss in _pairs(program, ops.matmul_forward, ops.cross_entropy_forward):
        at = next((i for i, c in enumerate(program.calls) if c.op is chain[0] and c.inverts is loss), None)
        backward = program.calls[at : at + 3] if at is not None else []
        made = [head.args["out"], loss.args["lse"], *(c.args["dlogits"] for c in backward[:1])]
        parts = [head, loss, *backward]
        users = [c for c in program.calls if any(v in made for v in c.args.values())]
        if (
            head.args["bias"] is not None
            or head.args["out"] is not loss.args["logits"]
            or [c.op for c in backward] != chain
            or any(backward[0].adds.values())
            or not set(users) <= set(parts)
            or any(loss.args[n] in c.args.values() for n in ("loss", "losses") for c in program.calls if c is not loss)
            or not allowed(ops.classifier_backward, parts)
        ):
            continue
        given = {**head.args, **loss.args}
        evaluated = Call(ops.classifier_forward, head.layer, _only(ops.classifier_forward, given), "evaluate")
        program.calls[program.calls.index(backward[0])] = evaluated
        for c in backward[1:]:
            given |= c.args
        given |= backward[0].args
        adds = {"dinp": backward[1].adds["dinp"], "dweight": backward[2].adds["dweight"]}
        _replace(program, backward[1], ops.classifier_backward, given, without=[head, loss, backward[2]], adds=adds)
        program.outputs = [v for v in program.outputs if v not in made]
        program.adjoint = {v: d for v, d in program.adjoint.items() if v not in made}


def _pairs(program: Program, first: Op, second: Op) -> list[tuple[Call, Call]]:
    """Find the calls of one op that those of another follow at once."""
    return [(a, b) for a, b in zip(program.calls, program.calls[1:], strict=False) if a.op is first and b.op is second]


def _only(op: Op, args: dict[str, Any]) -> dict[str, Any]:
    """Pick the arguments that an op declares."""
    return {a.name: args[a.name] for a in op.args}


def _replace(
    program: Program,
    call: Call,
    op: Op,
    args: dict[str, Any],
    *,
    without: Sequence[Call],
    adds: dict[str, bool] | None = None,
) -> None:
    """Put a call of another op in the place of one, and drop those whose work it does too."""
    new = Call(op, call.layer, _only(op, args), call.phase, adds or {}, call.inverts)
    program.calls[program.calls.index(call)] = new
    program.calls = [c for c in program.calls if c not in without]


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
        _replace(program, call, ops.matmul_update, args, without=found.calls)
        program.outputs = [v for v in program.outputs if v not in found.sums[1:]]
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
        program.outputs.append(total)
        rest = {**last.args, **found.scalars, "held": args["held"], "sumsq": total}
        rest |= {"wte": step["param"], "wte_m": step["m"], "wte_v": step["v"]}
        adds = {"dwpe": last.adds["dwpe"]}
        _replace(program, last, ops.embedding_update, rest, without=[], adds=adds)
    adds = {"dinp": call.adds["dinp"]}
    _replace(program, call, ops.classifier_update, args, without=found.calls, adds=adds)
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


REMADE = {
    ops.gelu_forward: (ops.gelu_forward, "inp"),
    ops.matmul_gelu_forward: (ops.gelu_forward, "pre"),
    ops.layernorm_forward: (ops.layernorm_forward, "inp"),
    ops.residual_layernorm_forward: (ops.layernorm_forward, "residual"),
}
"""What is cheap to compute again: by which op, and from which argument of the call."""


def recompute(program: Program, allowed: Allowed) -> None:
    """Compute GELU and layer normalization again in the backward, instead of keeping what they gave until then."""
    forward = list(program.phase("forward"))
    for call in [c for c in forward if c.op in REMADE]:
        op, source = REMADE[call.op]
        old = call.args["out"]
        readers = [c for c in program.phase("backward") if old in c.args.values()]
        kept = forward[-1] is not call and any(old not in c.args.values() for c in forward[forward.index(call) + 1 :])
        if not readers or not kept or old in program.outputs:
            continue
        at = program.calls.index(readers[0])
        args = {n: call.args[n] for n in (a.name for a in op.args) if n in call.args} | {"inp": call.args[source]}
        if any(v in c.writes for c in program.calls[:at] for v in args.values() if v in program.parameters):
            continue  # by an update in the backward
        args |= {a.name: program.value(f"{args[a.name]}.again", args[a.name].shape) for a in op.written}
        program.calls.insert(at, Call(op, call.layer, args, "backward"))
        for c in readers:
            c.args = {n: args["out"] if v is old else v for n, v in c.args.items()}


FUSIONS: dict[str, Rewrite] = {
    "residual": share_residual,
    "layernorm": normalize_sums,
    "gelu": gelu_with_product,
    "classifier": head_with_loss,
    "update": update_in_backward,
    "recompute": recompute,
}
"""The rewrites by name, in the order in which they are applied."""
