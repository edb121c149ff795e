"""The package's kernels as texts that the judge takes: a start for who writes a faster one."""

from __future__ import annotations

from ..errors import RefusedError, UserError
from ..kernels.compile.jit import takes_all
from ..kernels.registry import BASE, KERNELS
from ..lab.starter import copied
from ..ops.declaration import Op
from . import rules


def text_of(op: Op, variant: str = BASE, name: str = "mine") -> str:
    """Write one of the package's kernels as a candidate, with what it needs of its file, registered under a name.

    Raises
    ------
    UserError
        For a kernel that does not stand alone: it is made by a rule, or imports another.
    """
    kernel = KERNELS[op.name, variant]
    if kernel.written or takes_all(getattr(kernel.function, "py_func", kernel.function)):
        raise UserError(f"{kernel.name} has no text of its own: a rule makes it")
    imports, body = copied(op, name, variant)
    text = "\n".join([*dict.fromkeys(imports), "", body])
    try:
        found = rules.read(text)
    except RefusedError as e:
        raise UserError(f"{kernel.name} does not stand alone: {e}") from e
    if (op.name, name) not in found:
        raise UserError(f"{kernel.name} has no text of its own: a rule makes it")
    return text
