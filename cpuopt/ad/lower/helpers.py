"""The pass that writes the body of a function of one's own in place of its call."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any

from .. import whole
from ..trees import text
from .jumps import Loops, jumps, settle
from .rewriter import Rewriter
from .scope import outside, own
from .text import elements_stored, is_atom, renamed, set_name, stores, uses


class Bind(ast.stmt):
    """``name = value`` for an array: a parameter of the function in `call` stands for a row from here on."""

    _fields = ("name", "value", "call")
    name: str
    value: ast.expr
    call: ast.Call


class Helpers(Rewriter):
    """The pass over calls of functions of one's own."""

    def statement(self, s: ast.stmt) -> None:
        """Rewrite one statement."""
        match s:
            case ast.Assign(targets=[ast.Name()], value=ast.Name()):
                self.made.append(s)  # the statement as written: the next pass looks for it in `scope.written`
            case ast.Assign(targets=[target], value=ast.Call() as call) if own(self.scope.found(call.func)):
                found = self.inline(call, alone=True)
                if isinstance(target, ast.Tuple | ast.List):
                    value: ast.expr = ast.copy_location(ast.Tuple(found or [], ast.Load()), s)
                elif found is None:
                    self.scope.refuse(s, f"{text(call.func)} does not return one number", "unpack what it returns")
                elif len(found) != 1:
                    why = "a function that returns several values is assigned to one name"
                    self.scope.refuse(s, why, "unpack them")
                else:
                    value = found[0]
                self.put(s, self.target(target), value)
            case ast.Expr(value=ast.Call(func=func) as call) if own(self.scope.found(func)):
                self.inline(call, alone=True)
            case _:
                super().statement(s)

    def expr(self, e: ast.expr) -> Any:
        """Rewrite an expression."""
        if isinstance(e, ast.Call) and own(self.scope.found(e.func)):
            results = self.inline(e) or []
            if len(results) != 1:
                self.scope.refuse(e, f"{text(e.func)} does not return one number", "unpack what it returns")
            return results[0]
        return super().expr(e)

    def written(self, call: ast.Call, function: Any) -> tuple[list[ast.stmt], ast.expr]:
        """The statements of a function that returns one number, and the number."""
        outer, self.made = self.made, []
        (result,) = self.inline(call, function=function) or []
        self.made, made = outer, self.made
        return made, result

    def inline(self, call: ast.Call, alone: bool = False, function: Any = None) -> list[ast.expr] | None:
        """Write the body of a function; return its results, None if there are none.

        Parameters
        ----------
        alone : whether the call is a statement, or all that is assigned.
        function : what is called; by default what its name stands for.
        """
        scope, name = self.scope, text(call.func)
        found = function or scope.found(call.func)
        loop = found in whole.METHODS.values()
        scope.rewritten |= found is whole.METHODS["dot"] or not (hasattr(found, "py_func") or loop)
        if found in scope.inlining or getattr(found, "py_func", found) is scope.kernel:
            scope.refuse(call, f"{name} calls itself", "write it as a loop")
        try:
            plain, source, node = scope.source_of(found)
        except (OSError, SyntaxError):  # a lambda in the middle of a line
            node = None
        if node is None:
            scope.refuse(call, f"{name} is not a function written with def", "write it so")
        args = self.bound(call, node)
        body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if not alone and elements_stored(body) & args.keys():
            scope.refuse(call, f"{name} writes to an array inside an expression", "give its call a line of its own")
        new = self.moved(plain, node, call, source)
        body = [renamed(s, new) for s in body]
        if plain.__code__.co_filename != scope.file:
            for n in (n for s in body for n in ast.walk(s) if hasattr(n, "lineno")):
                n.lineno = call.lineno
        scope.add(body)
        body = self.given(call, node, body, {new[p]: value for p, value in args.items()}, new)
        scope.inlining.append(found)
        results = self.results(body, call, name)
        scope.inlining.pop()
        return results

    def given(
        self, call: ast.Call, node: ast.FunctionDef, body: list[ast.stmt], args: dict[str, ast.expr],
        new: dict[str, str],
    ) -> list[ast.stmt]:  # fmt: skip
        """Write what parameters stand for; return the body, with values in place of those that are read once."""
        stored, assigned = elements_stored(body), {new[n] for n in stores(node.body)}
        arrays = {new[a.arg] for a in node.args.args if self.scope.is_array(node, a.arg)}
        for p, value in args.items():
            if p in arrays:
                value = self.element(value) if isinstance(value, ast.Subscript) else value
                bind = ast.copy_location(Bind(), call)
                bind.name, bind.value, bind.call = p, value, call
                self.made.append(bind)
                continue
            value = self.expr(value)
            once = not stored and uses(body, p) <= 1
            if p not in assigned and (is_atom(value) or once):
                body = [renamed(s, {}, {p: value}) for s in body]
            else:
                self.scope.count[p] = self.scope.count.get(p, 0) + 1
                self.put(call, p, value)
        return body

    def bound(self, call: ast.Call, node: ast.FunctionDef) -> dict[str, ast.expr]:
        """The arguments of a call by their names."""
        a, refuse = node.args, self.scope.refuse
        if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or any(isinstance(x, ast.Starred) for x in call.args):
            refuse(call, f"{text(call.func)} has other than plain parameters", "name each one")
        params = [p.arg for p in a.args]
        found = dict(zip(params[len(params) - len(a.defaults) :], a.defaults, strict=True))
        found |= dict(zip(params, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        if len(call.args) > len(params) or found.keys() != set(params):
            refuse(call, f"{text(call.func)} takes {', '.join(params)}", "give it these")
        return {p: found[p] for p in params}

    def moved(
        self, plain: FunctionType, node: ast.FunctionDef, call: ast.Call, source: dict[int, str]
    ) -> dict[str, str]:
        """Names in the kernel for those of a function that is inlined."""
        scope = self.scope
        local = {*(a.arg for a in node.args.args), *stores(node.body)}
        new = {n: scope.fresh(n) for n in sorted(local)}
        theirs = outside(plain)
        for n in sorted({x.id for s in node.body for x in ast.walk(s) if isinstance(x, ast.Name)} - local):
            value = theirs.get(n)
            mine = scope.outside.get(n)
            same = value is mine or (type(value) is type(mine) and isinstance(value, int | float) and value == mine)
            if same and n not in scope.count and n not in scope.params:
                continue
            if n not in scope.taken and n not in scope.outside:
                scope.outside[n] = value
                scope.taken.add(n)
                continue
            new[n] = next((k for k, v in scope.outside.items() if v is value and k not in scope.count
                           and k not in scope.params), "") or scope.fresh(n)  # fmt: skip
            scope.outside[new[n]] = value
        if plain.__code__.co_filename == scope.file:
            scope.source.update(source)
        return new

    def results(self, body: list[ast.stmt], call: ast.Call, name: str) -> list[ast.expr] | None:
        """Write an inlined body; return its results."""
        ends = [j for s in body for j in jumps(s, (ast.Return,)) if isinstance(j, ast.Return) and j.value is not None]
        if not ends:
            self.rest(body, lambda j: [])
            return None
        parts = [_parts(j) for j in ends]
        count = len(parts[0])
        if isinstance(body[-1], ast.Return) and len(ends) == 1:
            self.rest(body[:-1])
            return [self.expr(p) for p in parts[0]]
        word = name.split(".")[-1]
        made = [self.scope.fresh(f"{word}_{k}" if count > 1 else f"{word}_is") for k in range(count)]
        for n in made:
            self.scope.count[n] = 2

        def on(j: ast.Return) -> list[ast.stmt]:
            if len(_parts(j)) != count:
                why = f"{name} returns different numbers of values"
                self.scope.refuse(call, why, "return the same number always")
            return [set_name(j, n, p) for n, p in zip(made, _parts(j), strict=True)]

        self.rest(body, on)
        return [ast.copy_location(ast.Name(n, ast.Load()), call) for n in made]

    def rest(self, body: list[ast.stmt], on: Any = None) -> None:
        """Write the statements of a body, with `on` of each return."""
        if on:
            body = settle(body, (ast.Return,), on, self.scope)
        for s in Loops(self.scope).block(body):
            self.statement(s)


def _parts(j: ast.Return) -> list[ast.expr]:
    return list(j.value.elts) if isinstance(j.value, ast.Tuple) else [j.value] if j.value else []
