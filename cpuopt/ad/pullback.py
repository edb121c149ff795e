"""The adjoint of one assignment: what the adjoint of its target adds to those of its operands."""

from __future__ import annotations

import ast

from .activity import Leaf
from .flows import RESULT, SEED
from .kernel import Accum, Assign, For, If, Interface, LogSumExp, Stmt, flat
from .naming import Naming
from .plan import BackwardPlan
from .rules import CASTS, added, total
from .trees import Names, base, function_name, names, quote, swap, text

ZERO = quote("ZERO")


class Pullback:
    """Writer of the adjoints of single assignments.

    Attributes
    ----------
    homes : for each local and each statement that mentions it, the innermost loop that it does not outlive.
    once : inputs of whose gradient every element is added to exactly once, so that it need not start from zero.
    """

    def __init__(self, plan: BackwardPlan, naming: Naming, face: Interface) -> None:
        self.plan, self.kernel, self.naming, self.face = plan, plan.kernel, naming, face
        self.homes = self.find_homes()
        self.once: Names = set()

    def find_homes(self) -> dict[str, dict[Stmt, For | None]]:
        """Find, for each local and each statement that mentions it, the innermost loop that it does not outlive."""
        homes: dict[str, dict[Stmt, For | None]] = {}
        for s in flat(self.kernel.body):
            mentioned = {n for e in s.trees for n in names(e)}
            loops = [p for p in self.plan.facts.parent[s] if isinstance(p, For)]
            for name in mentioned:
                inner = [p for p in loops if name in self.plan.facts.locals[p]]
                homes.setdefault(name, {})[s] = inner[-1] if inner else None
        return homes

    def assignment(self, s: Assign) -> list[Stmt]:
        """The adjoint of one assignment: what its target's adjoint adds to those of its operands."""
        own, root, made = self.naming.of(s.target), self.kernel.written(s), list[Stmt]()
        found = self.leaves(s, own)
        mine = any(text(e) == text(s.target) for e, _ in found)
        others = any(self.kernel.root(base(e)) == root and text(e) != text(s.target) for e, _ in found)
        first = others or (mine and type(s) is Accum)  # read it whole before a line below adds to it
        often = len(found) > 1 or any(isinstance(n, ast.IfExp) for _, d in found for n in ast.walk(d))
        if first or (isinstance(s.target, ast.Subscript) and often and not mine):
            seed = ast.Name(self.naming.fresh("seed"))
            made.append(Assign(s.line, seed, own))  # read once: for the compiler, a line below might write to it
            found = self.leaves(s, seed)
        if first and type(s) is not Accum:
            made.append(Assign(s.line, own, ZERO))
        leaves: dict[str, tuple[ast.expr, list[ast.expr]]] = {}
        for e, d in found:
            leaves.setdefault(text(e), (e, []))[1].append(d)
        kept = None if first else leaves.pop(text(s.target), None)
        named, leaves = self.shared(s, leaves)
        made += named
        made += [self.add(s, e, total(ds)) for e, ds in leaves.values()]
        if first or type(s) is Accum or self.plan.unconsumed(root):
            return made
        if kept:
            new = total(kept[1])
            made += [Assign(s.line, own, new)] if text(new) != text(own) else []
        elif not self.is_first(s) and not (root in self.kernel.arrays and self.plan.facts.assigned_once(root)):
            made.append(Assign(s.line, own, ZERO))
        return made

    def shared(
        self, s: Stmt, leaves: dict[str, tuple[ast.expr, list[ast.expr]]]
    ) -> tuple[list[Stmt], dict[str, tuple[ast.expr, list[ast.expr]]]]:
        """Name the products that stand in what several leaves receive, the largest first."""
        made: list[Stmt] = []
        while True:
            count: dict[str, int] = {}
            found: dict[str, ast.expr] = {}
            for _, ds in leaves.values():
                for e in (x for d in ds for x in _products(d)):
                    found.setdefault(text(e), e)
                    count[text(e)] = count.get(text(e), 0) + 1
            guards = {t for t, e in found.items() if isinstance(e, ast.IfExp)}
            again = [t for t in found if count[t] > 1 and (len(leaves) > 1 or t in guards)]
            if not again:
                return made, leaves
            largest = max(again, key=len)
            name = ast.Name(self.naming.fresh("shared"))
            made.append(Assign(s.line, name, found[largest]))

            def put(e: ast.expr, name: ast.expr = name, largest: str = largest) -> ast.expr | None:
                return name if isinstance(e, ast.BinOp | ast.Call | ast.IfExp) and text(e) == largest else None

            leaves = {t: (e, [swap(d, put) for d in ds]) for t, (e, ds) in leaves.items()}

    def is_first(self, s: Assign) -> bool:
        """Return whether a local is first touched here in its home, so that its adjoint is not read again."""
        name = s.name
        if not isinstance(s.target, ast.Name):
            return False
        homes = self.homes[name]
        home = homes[s]
        every, parent = set(homes.values()), self.plan.facts.parent
        if any(a is not b and (a is None or (b is not None and a in parent[b])) for a in every for b in every):
            return False
        block = home.body if home else self.kernel.body
        here: Stmt = s
        while True:
            inside = self.plan.facts.block_of[here]
            before = set(flat(inside[: inside.index(here)]))
            if any(other in before for other in homes):
                return False
            if inside is block:
                return True
            here = self.plan.facts.parent[here][-1]
            if not isinstance(here, If) or here in homes:
                return False

    def add(self, s: Stmt, e: ast.expr, d: ast.expr) -> Stmt:
        """Add to the adjoint of a name or an element."""
        own, root = self.naming.of(e), self.kernel.root(base(e))
        if root in self.once and (flag := self.face.flag(f"d{root}")):
            return Assign(s.line, own, ast.IfExp(ast.Name(flag), added(own, d), d))
        return Accum(s.line, own, d)

    def leaves(self, s: Assign, seed: ast.expr) -> list[Leaf]:
        """The names and elements that an assignment reads, each with the derivative times `seed`."""
        parts = {SEED.id: seed, RESULT.id: self.naming.show(s.target)}

        def put(e: ast.expr) -> ast.expr | None:
            return parts.get(e.id) if isinstance(e, ast.Name) else self.naming.shape(e)

        return [(e, swap(d, put)) for e, d in self.plan.activity.derivatives[s]]

    def log_sum_exp(self, s: LogSumExp) -> list[Stmt]:
        """The adjoint of a log of a sum of exponentials: each term has its share, exp(term - lse)."""
        own = self.naming.of(s.target)
        loop = self.naming.loop(s.loop, [self.add(s, e, d) for e, d in self.leaves(s, own)])
        loop.line = s.line
        return [loop] if self.is_first(s) else [loop, Assign(s.line, own, ZERO)]


def _products(e: ast.expr) -> list[ast.expr]:
    """The products, quotients, functions and guards in an expression, without those in indices and in guards."""
    if isinstance(e, ast.IfExp):
        return [e]
    if not isinstance(e, ast.BinOp | ast.UnaryOp | ast.Call):
        return []
    product = isinstance(e, ast.BinOp) and isinstance(e.op, ast.Mult | ast.Div)
    own = [e] if product or (isinstance(e, ast.Call) and function_name(e) not in CASTS) else []
    return own + [x for part in ast.iter_child_nodes(e) if isinstance(part, ast.expr) for x in _products(part)]
