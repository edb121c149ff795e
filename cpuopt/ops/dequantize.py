"""A weight in int8: blocks of numbers along its rows with one scale each, and the numbers that they stand for.

Forward::

    out[n, i] = q[n, i] * scales[n]

A product of an int8 and a scale has at most 19 bits, so float32 holds it exactly; a bfloat16 holds it rounded to
nearest. `BLOCKS` has the sizes of blocks and the types of their scales. A weight (OC, C) has its blocks along C, and
across the ends of rows if C is no multiple of their size; those of ``w8a8`` are its rows, which products multiply as
they are (``matmul_int8.py``). Quantizing is symmetric::

    scales[n] = max_i |x[n, i]| / 127, rounded up to a type of 16 bits, or to the nearest float32;
                0 for a row of float32 below 2^-100
    q[n, i]   = x[n, i] / scales[n], rounded to nearest even, so |x - q * scales[n]| <= scales[n] / 2

`quantize_rows` does this for the rows of a weight that is trained, after each step; a row with NaN, infinity or a
magnitude of 2^127 or more has a scale of NaN, and so a product of NaN.

Division and rounding are exact in IEEE 754, so every machine makes the same numbers. The numbers of a block of Q8_0
come back as they are if one of its int8 is 127 or -127: their largest over 127 is the scale. llama.cpp writes no others
but those that are all zero.

Source: Dettmers et al. 2022 (arXiv 2110.02861), section 2.1, with linear steps; Q8_0 of ggml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from .declaration import HALF, OC, C, Op, inp, out, symbols
from .storage import TYPES, WIDE

Array = np.ndarray[Any, Any]
NUMBER = TYPES[WIDE].dtype.type
K, W = symbols("K W")
ROWS = "w8a8"
"""The base whose blocks are rows: weights of 8 bits, which products multiply with activations of 8 bits."""
BLOCKS: Mapping[str, tuple[int, str]] = {"int8": (64, "bfloat16"), "q8_0": (32, "float16"), ROWS: (0, WIDE)}
"""The numbers of a block, 0 for a row, and the type of its scale, by the name of a base; ``q8_0`` is that of ggml."""
LIMITS: Mapping[str, float] = {"bfloat16": 2.0**127, "float16": 127 * 65504 + 0.5, WIDE: 2.0**127}
"""Numbers from here on have no scale of a type whose multiples are all finite."""
MOST = 127
LEAST = NUMBER(2.0**-100)
"""The magnitude below which a row of float32 counts as zeros."""
PART = 1 << 12
"""Blocks that are quantized at a time, in the cache."""


def quantized(x: Array, kind: str) -> tuple[Array, Array]:
    """Quantize blocks of finite float32.

    Parameters
    ----------
    x : (blocks, numbers of each).
    kind : the type of scales.

    Returns
    -------
    q : of x's shape, int8.
    scales : (blocks,).
    """
    most = np.maximum(x.max(1), -x.min(1))
    exact = most / NUMBER(MOST)
    scales = np.where(most < LEAST, NUMBER(0), exact)
    if kind != WIDE:
        near = exact.astype(TYPES[kind].dtype)
        bits = f"u{near.itemsize}"
        up = np.maximum(near.view(bits) + (near.astype(NUMBER) < exact), most > 0)  # the next number
        scales = up.astype(bits).view(near.dtype)
    by = scales.astype(NUMBER)[:, None]
    return np.rint(np.where(by > 0, x, NUMBER(0)) / np.where(by > 0, by, NUMBER(1))).astype(np.int8), scales


def reference(q, scales):
    return {"out": q * scales[:, None]}


def reference_rows(weight):
    x = weight.astype(NUMBER)
    some = (np.abs(x) < LIMITS[WIDE]).all(1)
    q, scales = quantized(np.where(some[:, None], x, NUMBER(0)), WIDE)
    return {"q": q.astype(weight.dtype), "scales": np.where(some, scales, np.nan).astype(weight.dtype)}


dequantize = Op(
    "dequantize",
    out("out", K, W, types=HALF),
    inp("q", K, W, types=("int8",), operand=False),
    inp("scales", K, types=("bfloat16", "float16")),
    label="Dequantize",
    flops=W * K,
    reference=reference,
    source="Dettmers et al. 2022, section 2.1",
)

quantize_rows = Op(
    "quantize_rows",
    out("q", OC, C, types=("int8",)),
    out("scales", OC),
    inp("weight", OC, C, types=HALF, operand=False),
    label="Quantize rows",
    flops=2 * OC * C,
    reference=reference_rows,
    source="Dettmers et al. 2022, section 2.1; Wortsman et al. 2023",
)


def width_of(shape: Sequence[int], base: str) -> int:
    """Return the numbers of a block of a weight."""
    return BLOCKS[base][0] or shape[-1]


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
    def made(cls, x: Array, base: str = "int8") -> Quantized:
        """Quantize an array of float32, whose size is a multiple of that of a block."""
        blocks, scale = x.size // width_of(x.shape, base), BLOCKS[base][1]
        found = cls.of(np.empty(x.shape, np.int8), np.empty(blocks, TYPES[scale].dtype))
        found[...] = x
        return found

    @property
    def kind(self) -> str:
        """The name of its blocks in `BLOCKS`."""
        return next(name for name, (_, scale) in BLOCKS.items() if scale == self.scales.dtype.name)

    @property
    def limit(self) -> float:
        """The number below which all that are assigned must be."""
        return LIMITS[self.scales.dtype.name]

    @property
    def blocks(self) -> Array:
        """Its int8, a block in each row."""
        return self.view(np.ndarray).reshape(self.scales.size, -1)

    def __setitem__(self, key: Any, x: Any) -> None:
        if key is not ...:
            raise UserError("a weight in int8 is assigned as a whole, x[...] = numbers, since blocks share a scale")
        q, scales = self.blocks, self.scales
        if isinstance(x, Quantized):
            q[...], scales[...] = x.blocks, x.scales
            return
        blocks = np.ascontiguousarray(np.broadcast_to(x, self.shape), NUMBER).reshape(q.shape)
        for at in range(0, len(blocks), PART):
            part = blocks[at : at + PART]
            if not (most := max(part.max(), -part.min())) < self.limit:
                raise UserError(f"a weight in int8 holds {most}; expected finite numbers below {self.limit:.4g}")
            q[at : at + PART], scales[at : at + PART] = quantized(part, scales.dtype.name)


def numbers(x: Array) -> Array:
    """Return the float32 that a weight in a narrower type stands for."""
    if not isinstance(x, Quantized):
        return x.astype(NUMBER, copy=False)
    found: Array = x.blocks.astype(NUMBER) * x.scales.astype(NUMBER)[:, None]
    return found.reshape(x.shape)
