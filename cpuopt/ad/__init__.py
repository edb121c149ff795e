"""Generated backward kernels: reverse-mode differentiation of loops over arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from . import emit
from .flatten import flatten, restore_early
from .kernel import Interface, Stmt, Task, UnsupportedError
from .naming import make_room
from .plan import BackwardPlan
from .reverse import Reverse
from .shift import unshift
from .subset import read

__all__ = ["Backward", "Interface", "UnsupportedError", "differentiate", "read"]


@dataclass
class Backward:
    """A generated backward kernel.

    Attributes
    ----------
    text : the module's source.
    body : its statements, each with its forward line.
    scratch : working memory that it asks for after its parameters: name, and how many times the size of which array.
    """

    name: str
    text: str
    body: list[Stmt]
    plan: BackwardPlan
    params: list[str]
    scratch: dict[str, tuple[int, str]]

    def module(self) -> ModuleType:
        """Write the text to the cache and import it."""
        key = hashlib.sha256(self.text.encode()).hexdigest()[:32]
        return emit.load(self.name, key, lambda: self.text)

    @property
    def function(self) -> Callable[..., None]:
        """The backward as a plain Python function, which numba may compile."""
        return getattr(self.module(), self.name)  # type: ignore[no-any-return]


def differentiate(
    forward: Callable[..., None],
    wrt: Iterable[str],
    outs: Iterable[str],
    *,
    name: str | None = None,
    interface: Interface | None = None,
    saved: Iterable[str] = (),
    hidden: Iterable[str] = (),
    fresh: Iterable[str] = (),
    record_all: bool = False,
) -> Backward:
    """Write the backward of a forward kernel.

    Parameters
    ----------
    forward : a function of arrays and numbers, compiled or not, in the subset that `cpuopt.ad.subset` names.
    wrt : the arrays to differentiate with respect to.
    outs : the arrays whose adjoints are given.
    name : the name of the backward.
    interface : its parameters; by default those of the forward, then the adjoints of `outs` (read), then those of
        `wrt` (added to). The forward's outputs are then working memory: pass them as they were before the forward.
    saved : outputs that the backward gets as the forward left them.
    hidden : parameters of the forward that the backward does not get.
    fresh : outputs whose content before the call is not read.
    record_all : whether every overwritten value is recorded, without a plan: slow, for comparison.

    Raises
    ------
    UnsupportedError
        For code outside the subset; the message has file, line, reason, and what to write instead.
    """
    axes = {n: len(sizes) for n, sizes in interface.sizes.items()} if interface else {}
    kernel = read(forward, axes=axes)
    wrt, outs, saved = list(wrt), list(outs), set(saved)
    if interface:
        kernel.arrays |= {n: k for n, k in axes.items() if n in kernel.params}
    for role, given in (("wrt", wrt), ("outs", outs)):
        for n in given:
            if n not in kernel.arrays:
                raise UnsupportedError(f"{kernel.file}: {role} names '{n}'; arrays: {', '.join(kernel.arrays)}")
    for n in wrt:
        if line := kernel.first_write(n):
            kernel.refuse(line, f"'{n}' is written, and is differentiated with respect to", "write to another array")
    for n in outs:
        if not kernel.first_write(n):
            kernel.refuse_parameter(f"nothing is written to '{n}'", "name an array that the kernel writes")
    name = name or f"{kernel.name}_backward"
    for n in [*outs, *wrt]:
        for adjoint in {f"d{n}", f"d{n}_add"} & {*kernel.params}:
            kernel.refuse_parameter(f"the backward needs the name '{adjoint}' for the adjoint of '{n}'")
    if interface is None:
        adjoints = [f"d{n}" for n in [*outs, *(w for w in wrt if w not in outs)]]
        interface = Interface([*kernel.params, *adjoints])
    make_room(kernel, interface.params, name)
    if not record_all:
        unshift(kernel, {*outs, *saved}, saved)
        restore_early(kernel, saved)
    kernel = flatten(kernel, wrt, saved)
    plan = BackwardPlan(Task(kernel, wrt, outs, saved, {*hidden, *kernel.local}, set(fresh), record_all))
    body = Reverse(plan, interface).write()
    doc = f"The backward of {kernel.name}, generated from its source."
    text = emit.module(kernel, name, interface.params, body, doc, interface.scratch)
    return Backward(name, text, body, plan, interface.params, interface.scratch)
