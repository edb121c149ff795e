"""Functions of one value, naive; their backwards are generated from these loops."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

ZERO, ONE = np.float32(0), np.float32(1)


@kernel(ops.relu_forward, "vanilla")
def relu_forward(out, inp):
    """Element by element; a NaN stays.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(out.shape[0]):
        out[i] = ZERO if inp[i] <= ZERO else inp[i]


@kernel(ops.tanh_forward, "vanilla")
def tanh_forward(out, inp):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the tanh.
    """
    for i in prange(out.shape[0]):
        out[i] = np.tanh(inp[i])


@kernel(ops.sigmoid_forward, "vanilla")
def sigmoid_forward(out, inp):
    """Element by element; the exponent is never positive, so that neither the value nor its slope overflows.

    Parallel: the elements.
    Bound: compute, the exp.
    """
    for i in prange(out.shape[0]):
        e = np.exp(min(inp[i], -inp[i]))
        out[i] = (ONE if inp[i] > ZERO else e) / (ONE + e)


@kernel(ops.reciprocal_forward, "vanilla")
def reciprocal_forward(out, inp):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(out.shape[0]):
        out[i] = ONE / inp[i]
