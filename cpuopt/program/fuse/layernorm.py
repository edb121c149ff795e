"""Normalize a residual sum as it is made."""

from __future__ import annotations

from ... import ops
from ..program import Program
from .edit import Allowed, pairs, replace


def normalize_sums(program: Program, allowed: Allowed) -> None:
    """Let a residual connection and the layer normalization that follows it be one call."""
    for first, second in pairs(program, ops.residual_forward, ops.layernorm_forward):
        if first.args["out"] is second.args["inp"] and allowed(ops.residual_layernorm_forward, [first, second]):
            args = {**first.args, **second.args, "residual": first.args["out"]}
            replace(program, second, ops.residual_layernorm_forward, args, without=[first])
