"""The pass over simultaneous assignments: one target each; what an earlier target would change is kept first."""

from __future__ import annotations

import ast

from ..trees import words
from .scope import Scope
from .text import base, set_name


def one_by_one(body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
    """Write ``a, b = x, y`` of elements and numbers as assignments of one target."""
    made: list[ast.stmt] = []
    for s in body:
        match s:
            case ast.If(test=test, body=yes, orelse=no):
                made.append(ast.copy_location(ast.If(test, one_by_one(yes, scope), one_by_one(no, scope)), s))
            case ast.For():
                s.body = one_by_one(s.body, scope)
                made.append(s)
            case ast.Assign(targets=[ast.Tuple(elts=places)], value=ast.Tuple(elts=values)):
                made += _split(s, places, values, scope)
            case _:
                made.append(s)
    return made


def _split(s: ast.stmt, places: list[ast.expr], values: list[ast.expr], scope: Scope) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    now: list[ast.expr] = []
    for k, v in enumerate(values):
        earlier = {base(t) for t in places[:k]}
        index = set().union(*(words(t.slice) for t in places[k:] if isinstance(t, ast.Subscript)))
        if index & earlier:
            scope.refuse(s, "a later target is found by what an earlier one changes", "write one line each")
        if words(v) & earlier:
            name = scope.fresh(base(places[k]))
            kept.append(set_name(s, name, v))
            v = ast.copy_location(ast.Name(name, ast.Load()), s)
        now.append(v)
    return [*kept, *(set_name(s, t, v) for t, v in zip(places, now, strict=True))]
