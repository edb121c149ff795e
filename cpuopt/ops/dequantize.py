"""A weight in int8: blocks of 64 numbers with one scale each, and the numbers that they stand for.

Forward::

    out[n, i] = q[n, i] * scales[n]

Each scale is a bfloat16, so a product has at most 15 bits and float32 holds it exactly; a bfloat16 holds it rounded to
nearest. A weight (OC, C) has its blocks along C, and if C is no multiple of 64, across the ends of rows. Quantizing is
symmetric::

    scales[n] = max_i |x[n, i]| / 127, rounded up to bfloat16
    q[n, i]   = x[n, i] / scales[n], rounded to nearest even, so |x - q * scales[n]| <= scales[n] / 2

Division and rounding are exact in IEEE 754, so every machine makes the same numbers.

Source: Dettmers et al. 2022 (arXiv 2110.02861), section 2.1, with linear steps; Q8_0 of ggml.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UserError
from .declaration import HALF, Op, inp, out, symbols
from .storage import TYPES, WIDE

(K,) = symbols("K")
WIDTH = 64
"""Numbers of a block."""
LIMIT = 2.0**127
"""Numbers from here on have no scale whose multiples are all finite."""
MOST = 127
PART = 1 << 12
"""Blocks that are quantized at a time, in the cache."""
Array = np.ndarray[Any, Any]
NUMBER = TYPES[WIDE].dtype.type


def reference(q, scales):
    return {"out": q * scales[:, None]}


dequantize = Op(
    "dequantize",
    out("out", K, WIDTH, types=HALF),
    inp("q", K, WIDTH, types=("int8",)),
    inp("scales", K, types=("bfloat16",)),
    label="Dequantize",
    flops=WIDTH * K,
    reference=reference,
    source="Dettmers et al. 2022, section 2.1",
)


class Quantized(np.ndarray[Any, Any]):
    """The int8 of a weight. Numbers that are assigned to it as a whole, ``x[...] = numbers``, are quantized.

    Attributes
    ----------
    scales : of its blocks, in their order; written with it.
    """

    scales: Array

    @classmethod
    def of(cls, q: Array, scales: Array) -> Quantized:
        """Return the weight that lies in two arrays."""
        found = q.view(cls)
        found.scales = scales
        return found

    @classmethod
    def made(cls, x: Array) -> Quantized:
        """Quantize an array of float32, whose size is a multiple of `WIDTH`."""
        found = cls.of(np.empty(x.shape, np.int8), np.empty(x.size // WIDTH, TYPES["bfloat16"].dtype))
        found[...] = x
        return found

    def __setitem__(self, key: Any, x: Any) -> None:
        if key is not ...:
            raise UserError("a weight in int8 is assigned as a whole, x[...] = numbers, since blocks share a scale")
        q, scales = self.view(np.ndarray).reshape(-1, WIDTH), self.scales
        if isinstance(x, Quantized):
            q[...], scales[...] = x.view(np.ndarray).reshape(q.shape), x.scales
            return
        blocks = np.ascontiguousarray(np.broadcast_to(x, self.shape), NUMBER).reshape(-1, WIDTH)
        for at in range(0, len(blocks), PART):
            part = blocks[at : at + PART]
            most = np.maximum(part.max(1), -part.min(1))
            if not most.max() < LIMIT:
                raise UserError(f"a weight in int8 holds {most.max()}; expected finite numbers below {LIMIT:.4g}")
            up = ((most / NUMBER(MOST)).view(np.uint32) + 0xFFFF) >> 16
            scales[at : at + PART] = np.maximum(up, most > 0).astype(np.uint16).view(scales.dtype)
            by = scales[at : at + PART].astype(NUMBER)[:, None]
            q[at : at + PART] = np.rint(part / np.where(by > 0, by, NUMBER(1)))


def numbers(x: Array) -> Array:
    """Return the float32 that a weight in int8 stands for; any other array as it is."""
    if not isinstance(x, Quantized):
        return x
    q = x.view(np.ndarray).reshape(-1, WIDTH).astype(NUMBER)
    found: Array = q * x.scales.astype(NUMBER)[:, None]
    return found.reshape(x.shape)
