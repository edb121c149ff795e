"""The models that the package brings; the inputs of a language model."""

from __future__ import annotations

from ..ops.declaration import Shape


def specs(B: int, T: int) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype of the inputs of a language model."""
    return {"tokens": ((B, T), "int32"), "targets": ((B, T), "int32")}
