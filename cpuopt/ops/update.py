"""An op that makes the gradient of a weight, with an optimizer's step in the gradient's place, which is never stored.

It is derived from the declarations of both: from ``matmul_backward_weight`` and AdamW, for example::

    weight, weight_m, weight_v = adamw(weight, weight_m, weight_v, dweight)
    bias, bias_m, bias_v       = adamw(bias, bias_m, bias_v, dbias), with bias_decay as its weight_decay
    sumsq                      = sum(dweight^2) + sum(dbias^2)

It stands for the op, ``sumsq`` and the optimizer if nothing else uses the gradient: no clipping by the global norm, no
second use of the weight. Only one second use is allowed, a lookup: the head's weight may be the token embedding too,
whose gradient has the rows of the tokens alone. These rows wait. The op of the head puts their gradient aside: `held`
has it for the first of equal tokens, and zeros for the others. The op of the lookup adds its own gradient, and finishes
those rows.

The weight may be in a narrower type. If it is not, it may have a copy in that, `copy`, which is written with it. The
products of the head read the copy first.

Source: the three ops; the order, update in backward, is that of Lv et al. 2023 (LOMO, arXiv 2306.09782).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, signature
from math import prod
from typing import Any

import numpy as np

from .declaration import FLOAT32, HALF, Arg, Dim, Op, Updates, as_dim, index, inp, out
from .optimizer import DRAWN, USUAL, Optimizer
from .rounding import bits_of
from .sumsq import sumsq


def updated(op: Op, optimizer: Optimizer) -> Op:
    """Return the op that is derived from one with ``updates=`` and an optimizer; it is made once."""
    return next((f for f in op.fusions if f.fuses == (op, sumsq, optimizer)), None) or _derived(op, optimizer)


def _derived(op: Op, optimizer: Optimizer) -> Op:
    assert op.updates
    how, args = op.updates, [*_args(op, op.updates, optimizer)]
    weight = op.by_name[how.gradients[0]]
    stepped = optimizer.each + 2 + bool(how.rows)
    size = prod((d for a in args if a.name == "held" for d in a.shape) if how.rows else weight.shape, start=as_dim(1))
    places = {p: list(optimizer.names(p).values()) for p in how.parameters}
    places[how.parameters[0]].append("copy")
    moves = {to: n for g, n in op.moves.items() for to in places.get(g[1:], [g])}

    def reference(**given: Any) -> dict[str, Any]:
        return _step(op, how, optimizer, given)

    read = [Parameter(a.name, Parameter.KEYWORD_ONLY) for a in args if a.kind != "out"]
    reference.__signature__ = Signature(read)  # type: ignore[attr-defined]  # which is not known as it is written
    return Op(
        how.name if optimizer.name == USUAL else f"{how.name}_{optimizer.name}",
        *args,
        label=f"{op.label} + {optimizer.label}",
        flops=op.flops + stepped * size,
        moves=moves,
        reference=reference,
        source=f"{op.name}, sumsq and {optimizer.name}; update in backward after Lv et al. 2023 (LOMO)",
        fuses=(op, sumsq, optimizer),
        asked=op.asked,
        fixed=op.fixed + stepped * size,
    )


def _args(op: Op, how: Updates, optimizer: Optimizer) -> Iterator[Arg]:
    """Declare the arguments: those of the op, with parameters and their states in place of gradients."""
    weight, (*_, last) = op.by_name[how.gradients[0]], op.arrays
    first = next(a for a in op.args if a.kind in ("in", "index"))
    terms = {*weight.reduces.terms} | {k for d in weight.shape[bool(how.rows) :] for k in d.terms}
    like = op.by_name[how.aside] if how.aside else next(a for a in op.args if a.kind == "in")
    for a in op.args:
        if a is first:
            held = [out("held", *like.shape, reduces=weight.reduces, optional=True)] * bool(how.aside)
            yield from (*held, out("sumsq", 1, reduces=Dim(dict.fromkeys(terms, 1))))
            yield from [inp("held", *like.shape)] * bool(how.rows)
        if a.name in how.gradients:
            p = a.name[1:]
            of = op.by_name.get(p) or (op.inverts.by_name.get(p) if op.inverts else None) or a
            given = replace(a, start=of.start, fan_in=of.fan_in)
            yield from optimizer.places(p, given, HALF if a is weight else FLOAT32)
            if a is weight and p not in op.by_name:
                yield optimizer.copy(p, given, "state" if how.rows or how.aside else "out")
        elif a.name in how.parameters:
            yield replace(optimizer.copy(a.name, a, "state"), reduces=weight.reduces, fan_in=a.fan_in)
        else:
            yield replace(a, needed=True)
        if a is last and how.aside:
            yield index("tokens", like.shape[0], below=weight.shape[0], optional=True)
    yield from (*optimizer.scalars(*(f"{p}_decay" for p in how.parameters[1:])), *optimizer.rounded)
    for p in how.parameters[1:]:
        yield replace(DRAWN[1], name=f"{p}_first")


def _step(op: Op, how: Updates, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Compute the gradients by the op's reference, and the steps from them by the optimizer's."""
    read = given | {g: given[g[1:]] for g in how.gradients}
    read |= {p: given[p] if given.get("copy") is None else given["copy"] for p in how.parameters}
    found = dict(op.reference(**{n: read[n] for n in signature(op.reference).parameters}))
    total = 0.0
    for p in how.parameters:
        grad = found.pop(f"d{p}", None)
        if given[p] is None:
            continue
        if how.rows:
            np.add.at(grad, given[how.rows], given["held"])
        first = p == how.parameters[0]
        new = optimizer.apply(given, p, grad, "weight_decay" if first else f"{p}_decay")
        if first:
            new["copy"] = new[p].copy()
        total += (grad**2).sum()
        if how.rows or given.get("tokens") is not None:
            rows, at = np.unique(given[how.rows or "tokens"], return_index=True)
            if how.rows:
                rows = np.setdiff1d(np.arange(len(grad)), rows)
            else:
                found["held"] = np.zeros((len(given["tokens"]), grad.shape[1]))
                found["held"][at] = grad[rows]
                total -= (found["held"] ** 2).sum()
            for name in [n for n in new if given[n] is not None]:
                new[name][rows] = given[name][rows]
        found |= new
    return found | {"sumsq": np.array([total])}


def drawn_bits(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the random bits by which a call rounds what is bfloat16 of parameters and states, by their names."""
    optimizer = next((o for o in (op, *op.fuses) if isinstance(o, Optimizer)), None)
    if not optimizer:
        return {}
    made, found = op.fuses[0].updates if op is not optimizer else None, {}
    for k, p in enumerate(made.parameters if made else ["param"]):
        own, *states = optimizer.names(p).values()
        for number, name in enumerate((*states, own)):
            x = given[name]
            if x is not None and x.dtype.name == "bfloat16":
                bits = bits_of(given["draw"], given[f"{p}_first" if k else "first"], x.size, number)
                found[name] = bits.reshape(x.shape)
    return found
