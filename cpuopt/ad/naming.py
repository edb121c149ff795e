"""What the values of the forward, and their adjoints, are called in the backward."""

from __future__ import annotations

import ast
import keyword
import re

import numpy as np

from .kernel import NUMBER, Kernel, Names, UnsupportedError, assigned, base, index, parse, text
from .lines import Interface
from .plan import Plan
from .rules import CONSTANTS

WORDS = {*CONSTANTS, "CHUNKS", "SCRATCH", "chunk", "part", "np", "math", "prange", "range", "int", "len"}
PATTERNS = [r"j\d+", r"tape\d*(_top)?", r"\w+_(parts|memory|copy)"]
KEYWORDS = {word[1:] for word in keyword.kwlist if word.startswith("d")}  # "el": its adjoint would be called "del"
RESERVED = re.compile("|".join([*sorted(WORDS | KEYWORDS), *PATTERNS]))
"""What generated text says besides the kernel's own names, their adjoints, and names that it knows to be free."""


def make_room(kernel: Kernel, params: list[str], name: str) -> None:
    """Rename the locals and globals of a kernel that have names which its backward needs.

    Parameters
    ----------
    params, name : of the backward.

    Raises
    ------
    UnsupportedError
        For a parameter, whose name is not ours to change.
    """
    for n in kernel.params:
        if RESERVED.fullmatch(n):
            kernel.refuse_parameter(f"the backward needs the name of the parameter '{n}' for itself")
    same = {n for n, v in CONSTANTS.items() if kernel.names.get(n) == v and isinstance(kernel.names[n], np.float32)}
    numbers = {n for n, value in kernel.names.items() if isinstance(value, NUMBER)} - same
    own = ({*assigned(kernel.body), *kernel.views} - {*kernel.params}) | numbers
    needed = {*params, *(f"d{n}" for n in kernel.arrays), name} - {*kernel.params}
    taken = own | needed | {*kernel.params, *kernel.names}
    new = {}
    for n in sorted(own):
        if n in needed or RESERVED.fullmatch(n):
            other = f"{n}_"
            while other in taken or RESERVED.fullmatch(other):
                other += "_"
            taken.add(other)
            new[n] = other
    kernel.rename(new)


class Naming:
    """The names in one backward.

    Attributes
    ----------
    copied : outputs whose given adjoint is consumed, so that the backward works on a copy.
    parts : adjoint arrays of which, at this place, each chunk holds a part.
    """

    def __init__(self, plan: Plan, face: Interface) -> None:
        self.kernel, self.face = plan.kernel, face
        self.taken = {*self.kernel.params, *self.kernel.views, *assigned(self.kernel.body), *self.kernel.names}
        self.adjoints: dict[str, str] = {}
        self.parts: Names = set()
        self.copied = [n for n in plan.task.outs if n in plan.activity.active and not plan.unconsumed(n)]
        for name in self.kernel.arrays:
            if name in plan.activity.active:
                if f"d{name}" in self.taken:
                    plan.kernel.refuse_parameter(f"the backward needs the name 'd{name}' for the adjoint of '{name}'")
                self.adjoints[name] = f"d{name}_copy" if name in self.copied else f"d{name}"
        self.taken |= set(self.adjoints.values()) | set(face.params)

    def adjoint(self, name: str) -> str:
        """The name of a value's adjoint."""
        if name not in self.adjoints:
            new = f"d{name}"
            while new in self.taken:
                new += "_"
            self.taken.add(new)
            self.adjoints[name] = new
        return self.adjoints[name]

    def fresh(self, name: str) -> str:
        """A name that is not taken."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def show(self, e: ast.expr) -> str:
        """An expression of the forward as text of the backward."""
        plain = text(e)
        if ".shape" not in plain:
            return plain
        e = parse(plain)
        for node in ast.walk(e):
            if isinstance(node, ast.Attribute) and node.attr == "shape" and isinstance(node.value, ast.Name):
                node.value = ast.Name(self.shaped(node.value.id), ast.Load())
        return text(e)

    def shaped(self, name: str) -> str:
        """An argument of the backward that has a forward array's shape."""
        if name in self.face.params or name in self.kernel.views:
            return name
        if f"d{name}" in self.face.params:
            return f"d{name}"
        for other, sizes in self.face.sizes.items():
            if sizes == self.face.sizes.get(name) and (other in self.face.params or f"d{other}" in self.face.params):
                return other if other in self.face.params else f"d{other}"
        raise UnsupportedError(
            f"{self.kernel.file}: the backward is given neither '{name}' nor 'd{name}', whose shape it needs; "
            "read the size from another array"
        )

    def target(self, e: ast.expr, new: str) -> str:
        """The adjoint of a name or of an element."""
        if isinstance(e, ast.Name):
            return new
        assert isinstance(e, ast.Subscript)
        at = ", ".join(self.show(i) for i in index(e))
        return f"{new}_parts[chunk, {at}]" if new in self.parts else f"{new}[{at}]"

    def of(self, e: ast.expr) -> str:
        """The adjoint of an expression that is a name or an element."""
        return self.target(e, self.adjoint(base(e)))

    def range(self, lo: ast.expr, hi: ast.expr, step: int) -> str:
        """The arguments of a range."""
        parts = [] if text(lo) == "0" and step == 1 else [self.show(lo)]
        return ", ".join([*parts, self.show(hi), *([str(step)] if step != 1 else [])])
