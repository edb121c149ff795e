"""Take GELU, and its slope, in the product that makes its operand."""

from __future__ import annotations

from ... import ops
from ..program import Program
from .edit import Allowed, pairs, replace


def gelu_with_product(program: Program, allowed: Allowed) -> None:
    """Take GELU in the product before it, and its slope in the product that gives its gradient."""
    for product, gelu in pairs(program, ops.matmul_forward, ops.gelu_forward):
        if product.args["out"] is gelu.args["inp"] and allowed(ops.matmul_gelu_forward, [product, gelu]):
            args = {**product.args, "pre": product.args["out"], "out": gelu.args["out"]}
            replace(program, product, ops.matmul_gelu_forward, args, without=[gelu])
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
            replace(program, product, ops.matmul_gelu_backward, args, without=[gelu])
            program.adjoint = {v: d for v, d in program.adjoint.items() if d is not product.args["dinp"]}
