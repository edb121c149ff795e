"""Frozen weights in int8: products multiply them as they are, or each is turned into numbers right before it is read.

The pass comes behind all that changes calls or types. Products with a base of `ROWS` are ops of their own; a fused op
that reads such a weight is taken apart again. With any other base, a call reads the same numbers as if the weight were
stored as they are, so every kernel serves, and the bits are those of such a weight. The numbers of one weight live for
one call, so the arena gives all layers the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from .. import ops
from ..errors import UserError
from ..ops.declaration import Op
from ..ops.dequantize import BLOCKS, ROWS, width_of
from ..ops.matmul_int8 import LONGEST
from .program import BLOCK, DRAWS, Call, Program, Value

INT8 = "int8"
"""The type of the numbers of a block."""
PRODUCTS = {ops.matmul_forward: ops.matmul_int8_forward, ops.matmul_backward_input: ops.matmul_int8_backward_input}
"""The products that read a frozen weight, and those that multiply its int8."""


def quantizable(program: Program, frozen: Collection[Value], base: str = INT8) -> list[Value]:
    """List those of some weights that can be int8: of whole blocks of numbers, and of layers inside blocks alone.

    An embedding is read by rows, and to turn a head into numbers would take as much memory as int8 spares.
    """
    outside = {v for call in program.calls if not BLOCK.match(call.layer) for v in call.reads}
    if base == ROWS:
        outside |= {v for call in program.calls if _product(call.op) not in PRODUCTS for v in call.reads}
        outside |= {v for call in program.calls for name, v in call.args.items() if name != "weight" and v in frozen}
        outside |= {v for v in frozen if max(v.shape) > LONGEST}
    return [v for v in frozen if v not in outside and prod(v.shape) % width_of(v.shape, base) == 0]


def quantize(program: Program, frozen: Collection[Value], base: str = INT8) -> None:
    """Store frozen weights in int8, and let each call that reads one multiply it, or read its numbers.

    Parameters
    ----------
    base : the name of their blocks in `BLOCKS`.

    Raises
    ------
    UserError
        If there is none that can be, and for another base.
    """
    if base not in BLOCKS:
        raise UserError(f"base {base!r}: expected {' or '.join(map(repr, BLOCKS))}, or nothing, for that of dtype")
    width, kind = BLOCKS[base]
    types = {v: v.dtype for v in quantizable(program, frozen, base)}
    if not types:
        multiple = f" of a multiple of {width} numbers" if width else ""
        raise UserError(
            f"base {base!r}: no product inside a block reads a frozen weight{multiple}; train adapters with --lora "
            "r=8, or leave it out"
        )
    for v in types:
        v.dtype = INT8
        blocks = prod(v.shape) // width_of(v.shape, base)
        scales = program.scales[v] = program.value(f"{v}.scales", (blocks,), "parameter", dtype=kind)
        program.kept.append(scales)
        program.filled.add(scales)
    calls: list[Call] = []
    made: dict[Call, list[Call]] = {}
    for call in program.calls:
        quantized = [v for v in dict.fromkeys(call.reads) if v in types]
        if base == ROWS and quantized:
            stream = sum(_product(c.op) is ops.matmul_backward_input for c in made)
            made[call] = _multiplied(program, call, stream)
            for part, first in zip(made[call], made.get(call.repeats, ()) if call.repeats else (), strict=False):
                part.repeats = first
            calls += made[call]
            continue
        for v in quantized:
            wide = program.value(f"{v}.numbers", v.shape, dtype=types[v])
            args, shape = {"out": wide, "q": v, "scales": program.scales[v]}, (*program.scales[v].shape, width)
            calls.append(Call(ops.dequantize, call.layer, args, call.phase, views={"out": shape, "q": shape}))
            call.args = {n: wide if x is v else x for n, x in call.args.items()}
        calls.append(call)
    program.calls = calls
    program.verify()


def _product(op: Op) -> Op:
    """Return the product in an op."""
    return op.fuses[0] if op.fuses else op


def _multiplied(program: Program, call: Call, stream: int) -> list[Call]:
    """Make the calls that replace a product with a weight in int8, and what is fused with it.

    Parameters
    ----------
    stream : of the random numbers, another for each call.
    """
    op, given, product = call.op, dict(call.args), _product(call.op)
    before, behind, adds = [], [], dict(call.adds)
    if op is ops.matmul_adapter_forward:
        low = {"out": given["out"], "inp": given["low"], "weight": given["up"], "bias": None}
        before, adds = [Call(product, call.layer, low, call.phase)], {"out": True}
    elif op.fuses:
        last, result = op.fuses[-1], product.written[0].name
        of = {a.name: op.renames.get(a.name, a.name) for a in last.args}
        if last.operand not in op.renames:  # in a backward, which keeps no value between the two
            shape = given[of[last.written[0].name]].shape
            inner = program.value(f"{call.layer}.{product.name}", shape, "adjoint")
        else:
            inner = given[of[last.operand]]
        rest = {n: inner if n == last.operand else given[name] for n, name in of.items()}
        flags = {a.name: call.adds.get(of[a.name], False) for a in last.args if a.kind == "acc"}
        behind = [Call(last, call.layer, rest, call.phase, flags, given=call.given)]
        given[result], adds = inner, {result: False}
    new, weight = PRODUCTS[product], given["weight"]
    given |= {"scales": program.scales[weight], "stream": stream, "seed": DRAWS[0], "counter": DRAWS[1]}
    args = {a.name: given.get(a.name) for a in new.args}
    views = {n: shape for n, shape in call.views.items() if n in args}
    adds = {a.name: adds.get(a.name, False) for a in new.args if a.kind == "acc"}
    return [*before, Call(new, call.layer, args, call.phase, adds, views=views), *behind]
