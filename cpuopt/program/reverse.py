"""Reverse mode on a program: the backward calls are generated from the declarations.

A backward op is filled in by name: an argument that the forward op has is that value; ``d`` and a name is its adjoint.
The first call that writes an adjoint overwrites it, the later ones add, so nothing is filled with zeros.
"""

from __future__ import annotations

from ..errors import UserError
from .program import Call, Group, Program, Value


def reverse(program: Program) -> None:
    """Append the backward calls for the program's loss, its first output.

    ``program.adjoint`` then maps each value that the loss depends on, parameters included, to its gradient. The loss's
    own adjoint is an input, which holds 1.
    """
    loss = program.outputs[0]
    varied = _varied(program)
    if loss not in varied and len(program.trained) < len(program.parameters):
        raise UserError("the loss depends on no parameter that is trained; freeze fewer of them")
    adjoint = program.adjoint
    adjoint[loss] = program.value(f"d({loss})", loss.shape, "input", dtype=loss.dtype)
    program.inputs.append(adjoint[loss])
    for forward in reversed(list(program.phase("forward"))):
        if not any(v in adjoint for v in forward.writes):
            continue
        _require_adjoints(forward, varied)
        for op in forward.op.backwards:
            primals = {a.name: forward.args[a.name[1:]] for a in op.args if a.kind == "acc"}
            wanted = [v for v in primals.values() if v in varied]
            if not wanted:
                continue
            if len(wanted) > len(set(wanted)):
                raise UserError(
                    f"{forward.op.name} in layer {forward.layer!r} is given one value twice; "
                    "its gradient would be written twice in one call: give it two distinct values"
                )
            args, adds, given = {}, {}, {}
            for a in op.args:
                if a.kind == "acc":
                    primal = primals[a.name]
                    if primal not in varied and (a.optional or not a.needed):
                        primal, given = None, {s: n for s, n in forward.sizes.items() if s in op.symbols}
                    args[a.name], adds[a.name] = _gradient(program, primal, primal in varied)
                elif a.name in forward.args:
                    args[a.name] = forward.args[a.name]
                else:
                    args[a.name] = _output_adjoint(adjoint, forward, a.name)
            program.calls.append(Call(op, forward.layer, args, "backward", adds, inverts=forward, given=given))
    program.verify()


def _require_adjoints(forward: Call, varied: set[Value]) -> None:
    """Refuse a trained value in an argument that the op does not differentiate, such as a table of angles."""
    known = {a.name[1:] for op in forward.op.backwards for a in op.args if a.kind == "acc"}
    for a in forward.op.args:
        if a.kind == "in" and a.name not in known and forward.args[a.name] in varied:
            raise UserError(
                f"{forward.op.name} in layer {forward.layer!r} has no gradient for '{a.name}', and "
                f"{forward.args[a.name]} depends on a parameter; make it a constant (nn.Buffer)"
            )


def _varied(program: Program) -> set[Value]:
    """Find the values that depend on a trained parameter; the others need no gradient."""
    varied = set(program.trained)
    for call in program.phase("forward"):
        if varied.intersection(call.reads):
            varied.update(call.writes)
    return varied


def _gradient(program: Program, primal: Value | None, needed: bool) -> tuple[Value | None, bool]:
    """Find or make the adjoint that a call writes, and whether the call adds to it."""
    if primal is None:
        return None, False
    if not needed:
        return program.value(f"unused d({primal})", primal.shape, "adjoint", dtype=primal.dtype), False
    add = primal in program.adjoint
    if not add:
        group: Group = "gradient" if primal.group == "parameter" else "adjoint"
        program.adjoint[primal] = program.value(f"d({primal})", primal.shape, group, dtype=primal.dtype)
    return program.adjoint[primal], add


def _output_adjoint(adjoint: dict[Value, Value], forward: Call, name: str) -> Value:
    primal = forward.args[name[1:]]
    if primal not in adjoint:
        raise UserError(
            f"{forward.op.name} in layer {forward.layer!r}: its backward needs the gradient of '{name[1:]}', "
            "which the loss does not use"
        )
    return adjoint[primal]
