"""The declared ops, one file an op: formula, shapes, FLOPs, source and a float64 NumPy reference.

A file of this folder is found by being there: each `Op` that it defines is an attribute here, as in
``ops.gelu_forward``. An op that `cpuopt.differentiable` made is one too, as in ``ops.relu2_forward``.

Nothing here imports numba or a kernel: the references judge the kernels and share no code with them.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..wording import nearest
from .collective import BLOCK, COLLECTIVES, Collective
from .declaration import Op
from .optimizer import USUAL, Number, Optimizer
from .update import updated


def _declared() -> list[Op]:
    """Import the files of this folder, and list the ops that kernels compute."""
    found: dict[str, Op] = {}
    for file in iter_modules(__path__):
        for op in vars(import_module(f"{__name__}.{file.name}")).values():
            if isinstance(op, Op) and found.setdefault(op.name, op) is not op:
                raise ValueError(f"cpuopt/ops/{file.name}.py declares {op.name} a second time; give it another name")
    return [op for op in found.values() if not isinstance(op, Collective)]


def _place(op: Op) -> str:
    """Return the key that sorts ops: by name, a forward before what belongs to it."""
    return op.name.removesuffix("_forward")


_ops = sorted(_declared(), key=_place)
OPTIMIZERS = {op.name: op for op in _ops if isinstance(op, Optimizer)}
"""The optimizers by name."""
_ops += [updated(op, optimizer) for op in _ops if op.updates for optimizer in OPTIMIZERS.values()]
ALL: dict[str, Op] = {op.name: op for op in sorted(_ops, key=_place)}
"""Every declared op by name, in the order of names; a forward comes before its backward."""
DECLARED = frozenset(ALL)
"""The names of the package's own, whose FLOPs and bytes the tests check; files of users add theirs to `ALL`."""

globals().update(ALL)
dequantize: Op  # mypy takes `__getattr__` for the others, and would take these for the files of their names
sumsq: Op


def __getattr__(name: str) -> Op:
    if name in ALL:
        return ALL[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"cpuopt.ops has no op {name!r}; {nearest(name, ALL)}")


__all__ = [
    "ALL",
    "BLOCK",
    "COLLECTIVES",
    "OPTIMIZERS",
    "USUAL",
    "Collective",
    "Number",
    "Op",
    "Optimizer",
    "updated",
    *ALL,
]
