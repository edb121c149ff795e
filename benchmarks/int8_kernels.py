"""Products in int8 as they would be, by NumPy: what `curves.py` trains with before there are kernels for it.

::

    forward   out[t, o]  = sx[t] sw[o] * sum_k qx[t, k] qw[o, k]
    dinp      g[t, o]    = dout[t, o] sw[o], of which each row is quantized to qg[t, o], sg[t]
              dinp[t, k] = sg[t] * sum_o qg[t, o] qw[o, k]
    dweight   dw[o, k]   = sum_t bf16(dout[t, o] sx[t]) qx[t, k]

Activations and weights are rounded to nearest, one scale a row. ``int8`` rounds the rows of gradients at random,
``int8-nearest`` to nearest, and ``int8-blocks`` has a scale for each 64 elements along the sum. A sum of at most 1,040
products of integers up to 127 is exact in float32, so NumPy's product has the bits that int8 would have; a longer one
is summed in float64.
"""

from typing import Any
from zlib import crc32

import numpy as np

from cpuopt import kernel, ops

Array = np.ndarray[Any, Any]
MOST, EXACT, BLOCK = 127, 1040, 64


def quantized(x: Array, at_random: bool = False, block: int = 0) -> tuple[Array, Array]:
    """Return integers of -127 to 127 as float32, and the scales of the rows, or of their blocks.

    The random numbers follow from the values, so a run has the same bits each time.
    """
    parts = x.reshape(len(x), -1, block or x.shape[1])
    scale = np.maximum(np.abs(parts).max(axis=2, keepdims=True), np.float32(1e-30)) / np.float32(MOST)
    z = parts / scale
    if at_random:
        z += np.random.default_rng(crc32(np.ascontiguousarray(x))).random(z.shape, np.float32)
    z = np.floor(z) if at_random else np.rint(z)
    return np.clip(z, -MOST, MOST).reshape(x.shape).astype(np.float32, copy=False), scale[:, :, 0]


def product(a: Array, b: Array) -> Array:
    """Return the exact product of two matrices of integers."""
    if a.shape[1] <= EXACT:
        return np.asarray(a @ b)
    return np.asarray((a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32))


def scaled_product(a: Array, scales: Array, b: Array) -> Array:
    """Return ``a @ b`` for quantized rows of a, which have one scale, or one for each block of columns."""
    if scales.shape[1] == 1:
        return scales * product(a, b)
    blocks = range(scales.shape[1])
    at = [slice(i * BLOCK, (i + 1) * BLOCK) for i in blocks]
    return np.asarray(sum(scales[:, i : i + 1] * product(a[:, at[i]], b[at[i]]) for i in blocks))


def bf16(x: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def define(variant: str, at_random: bool, block: int) -> None:
    """Define the three kernels of a variant."""

    @kernel(ops.matmul_forward, variant, jit=False, same_bits=False, narrow=False)
    def matmul_forward(out, inp, weight, bias):
        qx, sx = quantized(inp, block=block)
        if block:
            qw, sw = quantized(weight, block=block)
            w = qw.reshape(len(qw), -1, block) * sw[:, :, None]  # a scale along the sum cannot leave it
            out[:] = (qx.reshape(len(qx), -1, block) * sx[:, :, None]).reshape(qx.shape) @ w.reshape(qw.shape).T
        else:
            qw, sw = quantized(weight)
            out[:] = sx * product(qx, qw.T) * sw.T
        if len(bias):
            out += bias

    @kernel(ops.matmul_backward_input, variant, jit=False, same_bits=False, narrow=False)
    def matmul_backward_input(dinp, dinp_add, dout, weight):
        qw, sw = quantized(weight)
        qg, sg = quantized(dout * sw.T, at_random, block)
        d = scaled_product(qg, sg, qw)
        dinp[:] = dinp + d if dinp_add else d

    @kernel(ops.matmul_backward_weight, variant, jit=False, same_bits=False, narrow=False, skips=["dweight"])
    def matmul_backward_weight(dweight, dweight_add, dbias, dbias_add, dout, inp):
        if len(dweight):
            qx, sx = quantized(inp)
            d = bf16(dout * sx).T @ qx
            dweight[:] = dweight + d if dweight_add else d
        if len(dbias):
            total = dout.sum(axis=0)
            dbias[:] = dbias + total if dbias_add else total


define("int8", True, 0)
define("int8-nearest", False, 0)
define("int8-blocks", True, BLOCK)
