"""Make head and loss one call over blocks of tokens."""

from __future__ import annotations

from ... import ops
from ..program import Call, Program
from .edit import Allowed, only, pairs, replace


def head_with_loss(program: Program, allowed: Allowed) -> None:
    """Make a head without bias, its loss and their backwards one call; the logits are no output any more."""
    chain = [
        ops.cross_entropy_backward,
        ops.matmul_backward_input,
        ops.matmul_backward_weight,
    ]
    for head, loss in pairs(program, ops.matmul_forward, ops.cross_entropy_forward):
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
        args = only(ops.classifier_forward, given)
        evaluated = Call(ops.classifier_forward, head.layer, args, "evaluate", given=head.given)
        program.calls[program.calls.index(backward[0])] = evaluated
        for c in backward[1:]:
            given |= c.args
        given |= backward[0].args
        adds = {"dinp": backward[1].adds["dinp"], "dweight": backward[2].adds["dweight"]}
        replace(program, backward[1], ops.classifier_backward, given, without=[head, loss, backward[2]], adds=adds)
        program.outputs = [v for v in program.outputs if v not in made]
        program.adjoint = {v: d for v, d in program.adjoint.items() if v not in made}
