"""Backward kernels generated from the vanilla forward kernels, for every op whose forward lies in the subset.

The text of each is kept in the cache and made anew when the forward or the generator changes.
"""

from __future__ import annotations

from typing import Any

from ... import ops, registry
from ...ad import UnsupportedError
from ...ad.ops import load
from ...op import Dim
from ..jit import kernel

REFUSED: dict[str, str] = {}
"""For each backward op that has no generated kernel, the line of its forward that forbids it."""


def register(op: Any, forward: registry.Kernel, variant: str = "generated") -> None:
    """Generate the backward `op` of a forward kernel, or load it, and register it."""
    module = load(op, forward)
    sizes = {a.name: product(a.shape) for a in forward.op.arrays} | {s.name: s.size for s in forward.scratch}
    scratch = [(name, times(factor, sizes[like])) for name, (factor, like) in module.SCRATCH.items()]
    function = getattr(module, op.name)
    kernel(op, variant, scratch=scratch, parallel="prange" in function.__code__.co_names)(function)


def product(shape: tuple[Dim, ...]) -> Any:
    """The size of an array."""
    size: Any = 1
    for dim in shape:
        size = dim * size
    return size


def times(factor: int, size: Any) -> Any:
    """A multiple of a scratch size, which may be a function of the sizes."""
    return (lambda sizes: factor * size(sizes)) if callable(size) and not isinstance(size, Dim) else size * factor


for _op in ops.ALL.values():
    _forward = registry.KERNELS.get((_op.inverts.name, registry.BASE)) if _op.inverts else None
    if _forward:
        try:
            register(_op, _forward)
        except UnsupportedError as e:
            REFUSED[_op.name] = str(e)
