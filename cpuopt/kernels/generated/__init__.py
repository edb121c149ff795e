"""Backward kernels generated from the vanilla forward kernels, for every op whose forward lies in the subset.

The text of each is kept in the cache and rebuilt when the forward or the generator changes. A backward that nobody
wrote by hand is the vanilla one too.
"""

from __future__ import annotations

from typing import Any

from ... import ops
from ...ad import UnsupportedError
from ...ops.declaration import Dim, Op
from .. import registry
from ..compile.jit import kernel
from .load import load

REFUSED: dict[str, str] = {}
"""The reason why an op has neither a generated kernel nor one for its backward."""


def register(op: Any, forward: registry.Kernel, variant: str = registry.GENERATED, **options: Any) -> None:
    """Generate the backward `op` of a forward kernel, or load it, and register it; `options` are those of `kernel`."""
    module = load(op, forward)
    sizes = {a.name: product(a.shape) for a in forward.op.arrays} | {s.name: s.size for s in forward.scratch}
    scratch = [(name, times(factor, sizes[like])) for name, (factor, like) in module.SCRATCH.items()]
    function = getattr(module, op.name)
    kernel(op, variant, scratch=scratch, parallel="prange" in function.__code__.co_names, **options)(function)


def product(shape: tuple[Dim, ...]) -> Any:
    """Return the size of an array."""
    size: Any = 1
    for dim in shape:
        size = dim * size
    return size


def times(factor: int, size: Any) -> Any:
    """Return a multiple of a scratch size, which may be a function of the sizes."""
    return (lambda sizes: factor * size(sizes)) if callable(size) and not isinstance(size, Dim) else size * factor


def reason(op: Op) -> str:
    """Return the reason why nothing is generated for an op."""
    if op.fuses:
        parts = [part.name for part in op.fuses]
        return f"{op.name}: it fuses {', '.join(parts[:-1])} and {parts[-1]}; a --swap of those leaves them apart"
    return f"{op.name}: it has no declared backward, so there is nothing to differentiate"


def register_all() -> None:
    """Generate the backward of each vanilla forward, or load it, and note why others have none."""
    for op in ops.ALL.values():
        if op.inverts:
            try:
                for variant in (registry.GENERATED, registry.BASE):
                    if (op.name, variant) not in registry.KERNELS:
                        register(op, registry.KERNELS[op.inverts.name, registry.BASE], variant)
            except UnsupportedError as e:
                REFUSED[op.name] = str(e)
        elif not op.backwards:
            REFUSED[op.name] = reason(op)
