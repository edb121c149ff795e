"""Recompute blocks in the backward: what a block computes is dropped after its forward, but for what enters it.

The calls of a block are emitted again, right before the first call of the backward that needs what they make. A call
that is repeated is the same in everything: op, layer (so the same kernel), types, random numbers and inputs. So all
numbers are the same to the last bit. The pass comes behind all that changes calls or types, and knows a block by the
names of layers alone: ``h.0`` is the block of ``h.0.attn.c_proj``.

If a rewrite joined the sum before a block with the normalization at its begin, the block begins behind this call. The
sum is then the block's input, and its normalized rows are kept beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ..errors import UserError
from ..ops.declaration import Op
from .program import BLOCK, Call, Program, Value, block_of

ALL = "all"


def repeated(program: Program, call: Call, args: Mapping[str, Any], op: Op | None = None) -> Call:
    """Make the call of the backward that repeats one of the forward, with values of its own for what it writes.

    Parameters
    ----------
    args : all arguments, of which those that it writes are the values of the forward.
    op : the part of the call's op that it repeats; by default the whole.
    """
    of = op or call.op
    made = {a.name: args[a.name] for a in of.written if args[a.name] is not None}
    again = {n: program.value(f"{v}.again", v.shape, v.group, dtype=v.dtype) for n, v in made.items()}
    views, adds = ({}, {}) if op else (call.views, call.adds)
    return Call(of, call.layer, {**args, **again}, "backward", adds, given=call.given, views=views, repeats=call)


def blocks(program: Program) -> list[list[Call]]:
    """List the calls of the forward that lie in blocks, block by block in their order."""
    runs = groupby(program.phase("forward"), key=lambda c: block_of(c.layer))
    return [list(calls) for block, calls in runs if BLOCK.match(block)]


def recompute_blocks(program: Program, number: int | str) -> None:
    """Recompute the first blocks of a finished training step in its backward.

    Parameters
    ----------
    number : how many blocks, or ``all``.

    Raises
    ------
    UserError
        For more blocks than the model has, and anything else that is no such number.
    """
    found = blocks(program)
    wanted = len(found) if number == ALL else number
    if not isinstance(wanted, int) or wanted < 0:
        raise UserError(f"recompute {number!r}: expected a number of blocks, or '{ALL}'")
    if not found and number:
        raise UserError(
            f"recompute {number}: the model has no blocks, modules in a list, whose layers are named as 'h.0.mlp'; "
            "leave it out"
        )
    if wanted > len(found):
        raise UserError(
            f"recompute {number}: the model has {len(found)} blocks; expected up to {len(found)}, or '{ALL}'"
        )
    for block in reversed(found[:wanted]):
        _recompute(program, block)
    program.verify()


def _recompute(program: Program, block: Sequence[Call]) -> None:
    """Repeat the calls of a block in the backward, and read there what they make."""
    own = block_of(block[0].layer)
    joined = block[0].op.fuses[:1]
    body = block[1:] if joined and joined[0].role == "sum" else block
    backward = list(program.phase("backward"))
    kept = {v for c in backward if block_of(c.layer) != own for v in c.reads} | {*program.outputs}
    made = {v for c in body for v in c.writes} - kept
    wanted = made.intersection(v for c in backward for v in c.reads)
    needed: list[Call] = []
    for call in reversed(body):
        if wanted.intersection(call.writes):
            wanted |= made.intersection(call.reads)
            needed.insert(0, call)
    if not needed:
        return
    again: dict[Value, Value] = {}
    calls = []
    for call in needed:
        calls.append(repeated(program, call, _read_again(call, again)))
        again |= {v: new for v, new in zip(call.writes, calls[-1].writes, strict=True) if v in made}
    readers = [c for c in backward if again.keys() & {*c.reads}]
    for call in readers:
        call.args = _read_again(call, again)
    at = program.calls.index(readers[0])
    program.calls[at:at] = calls


def _read_again(call: Call, again: dict[Value, Value]) -> dict[str, Any]:
    return {n: again.get(v, v) if isinstance(v, Value) else v for n, v in call.args.items()}
