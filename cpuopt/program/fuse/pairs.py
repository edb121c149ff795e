"""Fuse the op after a sum or a product, which then reads its operand from the cache."""

from __future__ import annotations

from ...ops.declaration import Part
from ..program import Program
from .edit import Allowed, matches


def normalize_sums(program: Program, allowed: Allowed) -> None:
    """Fuse a normalization into the sum before it."""
    _fuse(program, allowed, "sum", "normalization", at=1)


def activate_products(program: Program, allowed: Allowed) -> None:
    """Fuse an activation into the product before it, and its slope into the product that makes its gradient."""
    _fuse(program, allowed, "product", "activation", at=0)
    _fuse(program, allowed, "product", "activation", at=1)  # a gated one, whose other operand is made in between


def gate_activations(program: Program, allowed: Allowed) -> None:
    """Fuse an activation into the product, element by element, that it gates, on either side of it."""
    activated = {v for c in program.calls if c.op.role == "activation" for v in c.writes[:1]}
    for call in program.calls:
        if call.op.role == "gate":
            x, y = (a.name for a in call.op.args if a.role == "in")
            if call.args[y] in activated and call.args[x] not in activated:
                call.args |= {x: call.args[y], y: call.args[x]}
    _fuse(program, allowed, "activation", "gate", at=1)


def _fuse(program: Program, allowed: Allowed, first: Part, second: Part, at: int) -> None:
    for m in matches(program, first, second, at):
        if m.holds(program) and not set(m.gone) & set(program.outputs) and allowed(m.op, m.parts):
            m.apply(program)
