"""Recompute cheap results in the backward, instead of keeping them from the forward."""

from __future__ import annotations

from ..program import Call, Program
from .edit import Allowed

CHEAP = ("activation", "normalization")
"""The roles of ops that take no longer than reading their results."""


def recompute(program: Program, allowed: Allowed) -> None:
    """Recompute activations and normalizations in the backward, instead of keeping their results until then."""
    forward = list(program.phase("forward"))
    for number, call in enumerate(forward):
        op, renames = call.op.fuses[-1] if call.op.fuses else call.op, call.op.renames
        if op.role not in CHEAP or (call.op.fuses and op.operand not in renames):
            continue
        args = {a.name: call.args[renames.get(a.name, a.name)] for a in op.args}
        old = args[op.written[0].name]
        readers = [c for c in program.phase("backward") if old in c.args.values()]
        at_hand = all(old in c.args.values() for c in forward[number + 1 :])
        if not readers or at_hand or old in program.outputs:
            continue
        at = program.calls.index(readers[0])
        if any(v in c.writes for c in program.calls[:at] for v in args.values() if v in program.parameters):
            continue  # by an update in the backward
        args |= {a.name: program.value(f"{(v := args[a.name])}.again", v.shape, dtype=v.dtype) for a in op.written}
        program.calls.insert(at, Call(op, call.layer, args, "backward", given=call.given))
        for c in readers:
            c.args = {n: args[op.written[0].name] if v is old else v for n, v in c.args.items()}
