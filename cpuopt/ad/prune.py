"""The last pass over a backward: it leaves out statements whose result nobody reads, and what they recorded."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .kernel import Accum, Assign, For, If, Reshape, Stmt, flat
from .trees import Names, base, names, text


class Prune:
    """The pass.

    Parameters
    ----------
    body : the statements, which are changed in place.
    results : the names that are read after them.
    """

    def __init__(self, body: list[Stmt], results: Iterable[str]) -> None:
        self.views = {s.name: s.base for s in flat(body) if isinstance(s, Reshape)}
        self.dead: set[Stmt] = set()
        live = set(results)
        self.block(body, set(live))
        while self.remove(body):  # what only the removed statements read is dead now
            self.dead = set()
            self.block(body, set(live))

    def roots(self, found: Names) -> Names:
        """The arrays of views, and all other names as they are."""
        return {self.views.get(n, n) for n in found}

    def read(self, trees: Iterable[ast.AST]) -> Names:
        """The names that expressions read."""
        return self.roots(set().union(*map(names, trees)))

    def block(self, block: list[Stmt], live: Names) -> Names:
        """Walk backwards over a block with what is read after it; return what is read from its start on."""
        for k in reversed(range(len(block))):
            s = block[k]
            if isinstance(s, If):
                live = self.block(s.body, set(live)) | self.block(s.orelse, set(live)) | self.read([s.test])
            elif isinstance(s, For):
                end = set(live)
                while (start := self.block(s.body, set(end)) - {s.var}) - end:
                    self.dead -= set(flat(s.body))  # those of a walk that knew too little
                    end |= start
                live = live | end | self.read(s.trees)
            elif isinstance(s, Reshape):
                live = live | self.read(s.shape)
            elif isinstance(s, Assign):
                after = block[k + 1] if k + 1 < len(block) else None
                live = self.assignment(s, after, live)
        return live

    def assignment(self, s: Assign, after: Stmt | None, live: Names) -> Names:
        """Walk over an assignment; `after` is the next statement."""
        if isinstance(s.target, ast.Tuple):  # a record is pushed
            return live | self.read([s.value, s.target])
        (name,) = self.roots({base(s.target)})
        if name not in live or self.replaced(s, after):
            self.dead.add(s)
            return live
        if after and _put_back(s, after):
            self.dead.add(after)
        if isinstance(s.target, ast.Name) and type(s) is not Accum:
            live = live - {name}
        return live | self.read(s.reads)

    def replaced(self, s: Assign, after: Stmt | None) -> bool:
        """Return whether the next statement overwrites the same element without reading it."""
        if type(after) is not Assign or text(after.target) != text(s.target):
            return False
        return not self.roots({base(s.target)}) & self.read(after.held)

    def remove(self, block: list[Stmt]) -> bool:
        """Remove what is dead, and loops and branches that are empty; return whether there was any."""
        before = list(block)
        some = False
        for s in before:
            for inner in s.blocks:
                some |= self.remove(inner)
        block[:] = [s for s in before if s not in self.dead and not (isinstance(s, For | If) and not any(s.blocks))]
        return some or block != before


def _put_back(s: Assign, after: Stmt) -> bool:
    """Return whether the next statement only puts back what this one has read."""
    both = type(s) is type(after) is Assign
    return both and text(after.target) == text(s.value) and text(after.value) == text(s.target)  # type: ignore[attr-defined]
