"""The names of the forward's values, and of their adjoints, in the backward."""

from __future__ import annotations

import ast
import keyword

import numpy as np

from .kernel import NUMBER, For, Interface, PlainKernel, Stmt, assigned
from .plan import BackwardPlan
from .rules import CONSTANTS
from .trees import MODULES, Names, base, element, index, quote, swap, words

WORDS = {
    *CONSTANTS,
    "CHUNKS",
    "SCRATCH",
    "chunk",
    "part",
    "np",
    "math",
    "prange",
    "range",
    "int",
    "len",
    "push",
    "bool",
}
WORDS |= {word[1:] for word in keyword.kwlist if word.startswith("d")}  # "el": its adjoint would be called "del"
DIGITS = "0123456789"


def reserved(name: str) -> bool:
    """Return whether generated text may use a name for its own values.

    These are ``j0``, ``tape``, ``tape2``, ``tape2_top``, ``dx_parts`` and so on.
    """
    tape = name.removesuffix("_top").rstrip(DIGITS) == "tape"
    return name in WORDS or tape or name.endswith(("_parts", "_memory", "_copy")) or name.rstrip(DIGITS) == "j" != name


def make_room(kernel: PlainKernel, params: list[str], name: str) -> None:
    """Rename the locals and globals of a kernel that have names which its backward needs.

    Parameters
    ----------
    params, name : parameters and name of the backward.

    Raises
    ------
    UnsupportedError
        For a parameter, whose name must stay.
    """
    for n in kernel.params:
        if reserved(n):
            kernel.refuse_parameter(f"the backward needs the name of the parameter '{n}' for itself")
    same = {n for n, v in CONSTANTS.items() if isinstance(kernel.names.get(n), np.float32) and kernel.names[n] == v}
    numbers = {n for n, value in kernel.names.items() if isinstance(value, NUMBER | np.ndarray)} - same
    own = ({*assigned(kernel.body), *kernel.views, *kernel.local} - {*kernel.params}) | numbers
    needed = {*params, *(f"d{n}" for n in kernel.arrays), name} - {*kernel.params}
    taken = own | needed | {*kernel.params, *kernel.names}
    new = {}
    for n in sorted(own):
        if n in needed or reserved(n):
            other = f"{n}_"
            while other in taken or reserved(other):
                other += "_"
            taken.add(other)
            new[n] = other
    kernel.rename(new)


class Naming:
    """The names in one backward.

    Attributes
    ----------
    copied : outputs whose given adjoint is consumed, so that the backward works on a copy.
    parts : adjoint arrays of which each chunk holds a part at this place.
    """

    def __init__(self, plan: BackwardPlan, face: Interface) -> None:
        self.kernel, self.face, self.outs = plan.kernel, face, plan.task.outs
        self.taken = self.kernel.taken
        self.adjoints: dict[str, str] = {}
        self.parts: Names = set()
        self.copied = [n for n in plan.task.outs if n in plan.activity.active and not plan.unconsumed(n)]
        for name in self.kernel.arrays:
            if name in plan.activity.active:
                if f"d{name}" in self.taken:
                    plan.kernel.refuse_parameter(f"the backward needs the name 'd{name}' for the adjoint of '{name}'")
                self.adjoints[name] = f"d{name}_copy" if name in self.copied else f"d{name}"
            elif name in plan.task.wrt:
                self.adjoints[name] = f"d{name}"  # zero
        self.taken |= set(self.adjoints.values()) | set(face.params)

    def adjoint(self, name: str) -> str:
        """The name of a value's adjoint."""
        if name not in self.adjoints:
            self.adjoints[name] = self.fresh(f"d{name}")
        return self.adjoints[name]

    def fresh(self, name: str) -> str:
        """A name that is not taken."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def show(self, e: ast.expr) -> ast.expr:
        """An expression of the forward as one of the backward: shapes are read from its own arguments."""
        if not any(isinstance(n, ast.Attribute) and n.attr in ("shape", "dtype") for n in ast.walk(e)):
            return e
        return swap(e, self.shape)  # type: ignore[no-any-return]

    def shape(self, e: ast.expr) -> ast.expr | None:
        """A size, shape or type by an argument of the backward for that of an array of the forward."""
        match e:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int(k))
            ) if name not in MODULES and not self.shaped(name):
                return self.extent(name, k)
            case ast.Attribute(value=ast.Name(id=name), attr="shape" | "dtype" as attr) if name not in MODULES:
                if attr == "shape" and not self.shaped(name):
                    return ast.Tuple(self.extents(name))
                return ast.Attribute(ast.Name(self.shaped(name) or f"d{self.outs[0]}"), attr)
        return None

    def shaped(self, name: str) -> str:
        """An argument of the backward that has a forward array's shape; "" if there is none."""
        if name in self.face.params or name in self.kernel.views:
            return name
        if f"d{name}" in self.face.params:
            return f"d{name}"
        same = [other for other, sizes in self.face.sizes.items() if sizes == self.face.sizes.get(name)]
        return next(filter(None, map(self.given, same)), "")

    def given(self, name: str) -> str:
        """The argument of the backward that is a forward array or its adjoint; "" if there is none."""
        return next((n for n in (name, f"d{name}") if n in self.face.params), "")

    def extents(self, name: str) -> list[ast.expr]:
        """The size of each axis of a forward array whose shape no argument of the backward has."""
        return [self.extent(name, k) for k in range(self.kernel.arrays[name])]

    def extent(self, name: str, k: int) -> ast.expr:
        """The size of one axis: the declared one, with the size of an argument's axis for each symbol."""
        known: dict[str, ast.expr] = {}
        for other, sizes in self.face.sizes.items():
            if array := self.given(other):
                for axis, size in enumerate(sizes):
                    value = quote("x.shape[axis]", x=ast.Name(array), axis=ast.Constant(axis))
                    known |= {size: value, **{n: x for n, x in solved(quote(size), value) if n not in known}}
        wanted = self.face.sizes.get(name, ())[k] if k < len(self.face.sizes.get(name, ())) else ""
        if wanted in known:
            return known[wanted]
        declared = quote(wanted or "unknown")
        if lacking := sorted(words(declared) - known.keys()):
            self.kernel.refuse_parameter(
                f"the backward needs the size '{lacking[0]}' of '{name}', which no array has that it is given",
                "declare an input or the first output with it",
            )
        return quote(wanted, **known)  # type: ignore[no-any-return]

    def of(self, e: ast.expr) -> ast.expr:
        """The adjoint of an expression that is a name or an element."""
        new, at = self.adjoint(base(e)), [self.show(i) for i in index(e)]
        if not at:
            return ast.Name(new)
        return element(f"{new}_parts", [quote("chunk"), *at]) if new in self.parts else element(new, at)

    def loop(self, s: For, body: list[Stmt], parallel: bool = False) -> For:
        """A loop of the forward around statements of the backward."""
        lo, hi, step = s.bounds
        return For(s.line, s.var, (self.show(lo), self.show(hi), step), body, parallel)


def solved(declared: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """The size of the one symbol in a declared size such as ``2*L + 1``, from the value of that; none of a product."""
    match declared:
        case ast.Name(id=name):
            return [(name, value)]
        case ast.BinOp(left=x, op=op, right=y) if isinstance(op, ast.Add | ast.Mult):
            sides = [(a, b) for a, b in ((x, y), (y, x)) if not words(a) and words(b)]
            if sides:
                number, rest = sides[0]
                code = "value - number" if isinstance(op, ast.Add) else "value // number"
                return solved(rest, quote(code, value=value, number=number))
    return []


def every(axes: int) -> list[ast.expr]:
    """The indices of an element in the loops of `nest`."""
    return [ast.Name(f"j{k}") for k in range(axes)]


def nest(d: str, axes: int, body: list[Stmt], parallel: bool = False) -> list[Stmt]:
    """Loops over all elements of an array, `d` or one of its shape."""
    for k in reversed(range(axes)):
        body = [along(d, k, body, parallel and k == 0)]
    return body


def along(d: str, axis: int, body: list[Stmt], parallel: bool = False) -> For:
    """A loop over one axis of an array."""
    size = quote("d.shape[axis]", d=ast.Name(d), axis=ast.Constant(axis))
    return For(0, f"j{axis}", (quote("0"), size, 1), body, parallel)
