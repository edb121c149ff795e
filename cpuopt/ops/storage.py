"""Storage types: one record for each type that the elements of an array may have.

A storage type says how an element lies in memory, and in which type kernels compute with it. bfloat16 has the exponent
of float32 and 8 bits of precision. Kernels read it as float32, which is exact, compute in float32, and round to nearest
even when they store. NumPy's bfloat16 is that of ``ml_dtypes``.

Source: ``ml_dtypes`` (JAX); the format is the upper half of IEEE 754 binary32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Storage:
    """A storage type.

    Attributes
    ----------
    name : NumPy's name, which declarations, programs and records use.
    computes : the type of a kernel's arithmetic on its elements, by NumPy's name.
    """

    name: str
    computes: str

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of NumPy's arrays."""
        return np.dtype(getattr(ml_dtypes, self.name, self.name))

    @cached_property
    def short(self) -> str:
        """The name in a table: ``bf16``, ``f32``."""
        letters = self.name.rstrip("0123456789")
        return f"{'bf' if letters == 'bfloat' else letters[0]}{8 * self.bytes}"

    @cached_property
    def bytes(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @cached_property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers."""
        return np.dtype(self.computes).kind == "f"

    @cached_property
    def eps(self) -> float:
        """The relative spacing of the numbers in which kernels compute; 0 of whole numbers."""
        return float(np.finfo(self.computes).eps) if self.is_float else 0.0

    @cached_property
    def limits(self) -> Any:
        """Precision and range of a floating-point type, as of ``numpy.finfo``."""
        return ml_dtypes.finfo(self.dtype)

    def nan(self, low: int) -> int:
        """Return the bits of a quiet NaN with as many of the lowest bits of `low` as its mantissa holds."""
        mantissa = int(self.limits.nmant) - 1
        quiet = (1 << 8 * self.bytes - 1) - (1 << mantissa)
        return quiet | low & (1 << mantissa) - 1


TYPES = {
    t.name: t
    for t in (
        Storage("float32", "float32"),
        Storage("bfloat16", "float32"),
        Storage("float16", "float32"),
        Storage("float64", "float64"),
        Storage("int8", "int8"),
        Storage("int32", "int32"),
        Storage("int64", "int64"),
    )
}
"""The storage types by name."""
WIDE = "float32"
"""The storage type of what names no other, and the type of sums."""


def storage(x: Any) -> Storage:
    """Return the storage type of an array, or of the name of one."""
    return TYPES[x if isinstance(x, str) else x.dtype.name]


def is_float(x: Any) -> bool:
    """Return whether an object is an array of floating-point numbers."""
    return isinstance(x, np.ndarray) and x.dtype.name in TYPES and storage(x).is_float
