"""Weights in int8: products multiply them as they are, or each is turned into numbers right before it is read.

A weight that is trained keeps its numbers, and has a copy in int8 that lives through all steps (`copy_trained`).

For frozen weights, the pass comes behind all that changes calls or types. Products with a base of `ROWS` are ops of
their own; a fused op that reads such a weight is taken apart again. With any other base, a call reads the same numbers
as if the weight were stored as they are, so every kernel serves, and the bits are those of such a weight. The numbers
of one weight live for one call, so the arena gives all layers the same bytes.

A head that reads its loss in one op (`HEADS`), or one whose logits are wanted (`Program.heads`), has a copy in int8
whether it is trained or not, since the tokens may be embedded by the same weight. The op with the loss is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from .. import ops
from ..errors import UserError
from ..ops.declaration import Op
from ..ops.dequantize import BLOCKS, ROWS, width_of
from ..wording import nearest
from .program import BLOCK, DRAWS, Call, Phase, Program, Value

INT8 = "int8"
"""The type of the numbers of a block."""
THIN = 64
"""Rows and columns below which a trained weight, as of an adapter, is not multiplied as int8: to quantize the tokens
would take as long as the product."""
Stored = tuple[Value, Value]
"""The int8 of a weight, and their scales."""
HEADS: dict[Op, Op | None] = dict.fromkeys((ops.classifier_forward, ops.classifier_backward))
HEADS |= {
    ops.updated(ops.classifier_backward, o): ops.updated(ops.head_backward_weight, o) for o in ops.OPTIMIZERS.values()
}
"""The ops of a head with its loss; and for one with an optimizer's step, that of the weight alone."""
PRODUCTS = {ops.matmul_forward: ops.matmul_int8_forward, ops.matmul_backward_input: ops.matmul_int8_backward_input}
"""The products that read a frozen weight, and those that multiply its int8."""


def left_out(program: Program, patterns: Iterable[str]) -> set[Value]:
    """Return the weights of layers that are not to be int8, by globs of the layers' names.

    Raises
    ------
    UserError
        For a pattern that no layer with a product matches.
    """
    products = [c for c in program.calls if c.op in HEADS or _product(c.op) is ops.matmul_forward]
    of, found = {c.layer: c.args["weight"] for c in products}, set[Value]()
    for pattern in patterns:
        matched = {v for layer, v in of.items() if fnmatchcase(layer, pattern)}
        if not matched:
            raise UserError(f"bf16_layers: no layer with a product matches {pattern!r}; {nearest(pattern, of)}")
        found |= matched
    return found


def quantizable(
    program: Program, weights: Collection[Value], base: str = INT8, without: Collection[Value] = ()
) -> list[Value]:
    """List those of some weights that can be int8: of whole blocks of numbers, and of layers inside blocks alone.

    An embedding is read by rows, and to turn a head into numbers would take as much memory as int8 spares.
    """
    read = [(c, a.name, v) for c in program.calls for a in c.op.arrays if a.kind == "in" and (v := c.args[a.name])]
    outside = {v for c, _, v in read if not BLOCK.match(c.layer)}
    if base == ROWS:
        outside |= {v for c, name, v in read if _product(c.op) not in PRODUCTS or name != "weight"}
        outside |= {v for v in weights if v.trained and min(v.shape) < THIN} | {*without}
    return [v for v in weights if v not in outside and prod(v.shape) % width_of(v.shape, base) == 0]


def copy_trained(program: Program, inline: bool, without: Collection[Value] = ()) -> None:
    """Give each trained weight that only products in blocks read a copy in int8, which they multiply; and to the head.

    The pass comes behind the rewrites, and before what stores values in narrower types.

    Parameters
    ----------
    inline : whether the copy is written by a call right behind the weight's last update; else the program's next pass
        places the calls. Those of the phase ``convert`` are for weights that changed otherwise.
    without : weights that get none.
    """
    inside = quantizable(program, program.trained, ROWS, without)
    _multiply_copies(program, [*inside, *_heads(program, True, without)], inline)


def _heads(program: Program, trained: bool, without: Collection[Value]) -> list[Value]:
    """List the weights of heads that are trained or not, the gradient of whose logits may exist for all tokens."""
    whole = ops.classifier_backward.updates
    of = [c.args["weight"] for c in program.calls if c.op in HEADS and whole and whole.fits(c.sizes)]
    there = [v for v in dict.fromkeys([*of, *program.heads]) if v not in without]
    return [v for v in there if v.trained is trained and min(v.shape) >= THIN]


def _multiply_copies(program: Program, weights: Collection[Value], inline: bool) -> None:
    copies: dict[Value, Stored] = {}
    for v in weights:
        q = program.value(f"{v}.{INT8}", v.shape, "copy", dtype=INT8)
        copies[v] = q, program.value(f"{v}.scales", v.shape[:1], "copy")
        program.kept += copies[v]
        program.filled.update(copies[v])
    last = {v: call for call in program.calls for v in call.writes}

    def written(call: Call) -> list[Call]:
        changed = [v for v in dict.fromkeys(call.writes) if v in copies and last[v] is call]
        return [_copied(v, copies[v], call.layer, call.phase) for v in changed if inline]

    _multiply(program, copies, written)
    program.calls = [*(_copied(v, stored, v.name, "convert") for v, stored in copies.items()), *program.calls]
    program.verify()


def _copied(v: Value, stored: Stored, layer: str, phase: Phase) -> Call:
    """Make the call that writes the copy of a weight."""
    return Call(ops.quantize_rows, layer, {"q": stored[0], "scales": stored[1], "weight": v}, phase)


def quantize(program: Program, frozen: Collection[Value], base: str = INT8, without: Collection[Value] = ()) -> None:
    """Store frozen weights in int8, and let each call that reads one multiply it, or read its numbers.

    Parameters
    ----------
    base : the name of their blocks in `BLOCKS`.
    without : weights that stay as they are, if the others are multiplied as int8.

    Raises
    ------
    UserError
        If there is none that can be, and for another base.
    """
    if base not in BLOCKS:
        raise UserError(f"base {base!r}: expected {' or '.join(map(repr, BLOCKS))}, or nothing, for that of dtype")
    width, kind = BLOCKS[base]
    types = {v: v.dtype for v in quantizable(program, frozen, base, without)}
    if not types and without:
        raise UserError(f"base {base!r}: bf16_layers match every weight that it could store; leave one of the two out")
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
    if base == ROWS:
        _multiply(program, {v: (v, program.scales[v]) for v in types})
        _multiply_copies(program, _heads(program, False, without), inline=True)
        return
    calls: list[Call] = []
    for call in program.calls:
        for v in (v for v in dict.fromkeys(call.reads) if v in types):
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


def _multiply(
    program: Program, stored: Mapping[Value, Stored], behind: Callable[[Call], list[Call]] = lambda call: []
) -> None:
    """Multiply the int8 that are stored for weights, in each product that reads one.

    Parameters
    ----------
    behind : returns the calls that follow one of the program's.
    """
    stream = sum(c.op is ops.matmul_int8_backward_input for c in program.calls)
    calls, made = list[Call](), dict[Call, list[Call]]()
    for call in program.calls:
        weight = call.args["weight"] if call.op in HEADS or _product(call.op) in PRODUCTS else None
        if weight and weight in stored:
            make = _head if call.op in HEADS else _multiplied
            made[call] = make(program, call, stored[weight], stream)
            stream += sum(c.op is ops.matmul_int8_backward_input for c in made[call])
            for part, first in zip(made[call], made.get(call.repeats, ()) if call.repeats else (), strict=False):
                part.repeats = first
        calls += [*made.get(call, [call]), *behind(call)]
    program.calls = calls


def _head(program: Program, call: Call, stored: Stored, stream: int) -> list[Call]:
    """Make the calls that replace a head with its loss, as `_multiplied` does."""
    update, given = HEADS[call.op], call.args | {"weight": stored[0], "scales": stored[1]}
    if call.op is ops.classifier_forward:
        return [_like(ops.classifier_int8_forward, call, given)]
    shape = (*call.args["targets"].shape, stored[0].shape[0])
    given["dlogits"] = given["dout"] = program.value(f"{call.layer}.logits", shape, "adjoint", dtype=given["inp"].dtype)
    made = [_like(ops.classifier_int8_backward, call, given)]
    if given["dinp"] is not None:
        drawn = {"stream": stream, "seed": DRAWS[0], "counter": DRAWS[1]}
        made.append(_like(ops.matmul_int8_backward_input, call, given | drawn))
    if update:
        made.append(_like(update, call, given | {"weight": call.args["weight"], "copy": None}))
    elif given["dweight"] is not None:
        made.append(_like(ops.head_backward_weight, call, given))
    return made


def _like(op: Op, call: Call, given: Mapping[str, Any]) -> Call:
    """Make a call of an op in place of another call, with its flags."""
    adds = {a.name: call.adds.get(a.name, False) for a in op.args if a.kind == "acc"}
    return Call(op, call.layer, {a.name: given.get(a.name) for a in op.args}, call.phase, adds)


def _multiplied(program: Program, call: Call, stored: Stored, stream: int) -> list[Call]:
    """Make the calls that replace a product with a weight in int8, and what is fused with it.

    Parameters
    ----------
    stored : the int8 of the weight, and their scales.
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
    new, (weight, scales) = PRODUCTS[product], stored
    given |= {"weight": weight, "scales": scales, "stream": stream, "seed": DRAWS[0], "counter": DRAWS[1]}
    args = {a.name: given.get(a.name) for a in new.args}
    views = {n: shape for n, shape in call.views.items() if n in args}
    adds = {a.name: adds.get(a.name, False) for a in new.args if a.kind == "acc"}
    return [*before, Call(new, call.layer, args, call.phase, adds, views=views), *behind]
