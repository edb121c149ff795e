"""From a kernel as people write it to the plain subset, in four passes; each takes statements and gives statements.

A name that a pass makes is one that the kernel does not use.
"""

from __future__ import annotations

import ast
import copy

from .helpers import Helpers
from .jumps import Loops, without_returns
from .rows import Rows
from .scope import Scope
from .tuples import one_by_one


def lower(node: ast.FunctionDef, scope: Scope) -> ast.FunctionDef:
    """Return a kernel in the plain subset; `scope` then has its local arrays and the names of its indices."""
    helpers = Helpers(scope)
    body = without_returns(node.body, scope)  # an early return is an `if` around what follows it
    body = Loops(scope).block(body)  # each loop is over a range, without break and continue
    body = helpers.block(body)  # functions of one's own stand in place of their calls
    body = Rows(scope, helpers).block(body)  # rows, slices and sums of rows are elements; local arrays have a size
    body = one_by_one(body, scope)  # one target an assignment
    made = copy.copy(node)
    made.body = body
    return made
