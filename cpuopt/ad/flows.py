"""How derivatives flow: the names that one may run through, and what depends on what."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .kernel import Assign, LogSumExp, PlainKernel, flat
from .rules import INTEGER
from .trees import Names, function_name, kept

SEED = ast.Name("<the adjoint of the target>")
RESULT = ast.Name("<the target after the assignment>")


@kept
def flows(e: ast.AST) -> Names:
    """The names that a derivative of an expression may run through: not those of indices, tests and comparisons."""
    match e:
        case ast.Name(id=name):
            return {name}
        case ast.Subscript(value=ast.Name(id=name)):
            return {name}
        case ast.Compare() | ast.BoolOp() | ast.Attribute() | ast.Subscript():
            return set()
        case ast.BinOp(op=ast.FloorDiv()):
            return set()
        case ast.Call() if function_name(e) in INTEGER:
            return set()
        case ast.IfExp(body=x, orelse=y):
            return flows(x) | flows(y)
        case ast.Call(args=args):
            return set().union(*map(flows, args))
    return set().union(*map(flows, ast.iter_child_nodes(e)), set())


def sources(kernel: PlainKernel, s: Assign) -> Names:
    """The expressions to whose adjoints that of a statement may add."""
    e = s.term if isinstance(s, LogSumExp) else s.value
    return {kernel.root(n) for n in flows(e)}


def reached(kernel: PlainKernel, start: Iterable[str], forward: bool) -> Names:
    """Return the names that depend on some names, or on which they depend, to a fixpoint."""
    found, size = set(start), -1
    while size != len(found):
        size = len(found)
        for s in flat(kernel.body):
            if isinstance(s, Assign):
                ends = sources(kernel, s), {kernel.written(s)}
                if ends[not forward] & found:
                    found |= ends[forward]
    return found
