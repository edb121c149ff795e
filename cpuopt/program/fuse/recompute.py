"""Keep neither the result of GELU nor that of layer normalization for the backward."""

from __future__ import annotations

from ... import ops
from ..program import Call, Program
from .edit import Allowed

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
        args |= {a.name: program.value(f"{(v := args[a.name])}.again", v.shape, dtype=v.dtype) for a in op.written}
        program.calls.insert(at, Call(op, call.layer, args, "backward", given=call.given))
        for c in readers:
            c.args = {n: args["out"] if v is old else v for n, v in c.args.items()}
