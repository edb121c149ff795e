"""Frozen weights in int8: each is turned into numbers right before a product reads it, in the forward and again later.

The pass comes behind all that changes calls or types. A call reads the same numbers as if the weight were stored as
they are, so every kernel serves, and the bits are those of such a weight. The numbers of one weight live for one call,
so the arena gives all layers the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from .. import ops
from ..errors import UserError
from ..ops.dequantize import BLOCKS
from .program import BLOCK, Call, Program, Value

INT8 = "int8"
"""The type of the numbers of a block."""


def quantizable(program: Program, frozen: Collection[Value], base: str = INT8) -> list[Value]:
    """List those of some weights that can be int8: of whole blocks of numbers, and of layers inside blocks alone.

    An embedding is read by rows, and to turn a head into numbers would take as much memory as int8 spares.
    """
    outside = {v for call in program.calls if not BLOCK.match(call.layer) for v in call.reads}
    return [v for v in frozen if v not in outside and prod(v.shape) % BLOCKS[base][0] == 0]


def quantize(program: Program, frozen: Collection[Value], base: str = INT8) -> None:
    """Store frozen weights in int8, and turn each into numbers of the type that it had before each call that reads it.

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
        raise UserError(
            f"base {base!r}: no product inside a block reads a frozen weight of a multiple of {width} numbers; train "
            "adapters with --lora r=8, or leave it out"
        )
    for v in types:
        v.dtype = INT8
        blocks = prod(v.shape) // width
        scales = program.scales[v] = program.value(f"{v}.scales", (blocks,), "parameter", dtype=kind)
        program.kept.append(scales)
        program.filled.add(scales)
    calls: list[Call] = []
    for call in program.calls:
        for v in dict.fromkeys(v for v in call.reads if v in types):
            wide = program.value(f"{v}.numbers", v.shape, dtype=types[v])
            args, shape = {"out": wide, "q": v, "scales": program.scales[v]}, (*program.scales[v].shape, width)
            calls.append(Call(ops.dequantize, call.layer, args, call.phase, views={"out": shape, "q": shape}))
            call.args = {n: wide if x is v else x for n, x in call.args.items()}
        calls.append(call)
    program.calls = calls
    program.verify()
