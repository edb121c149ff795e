"""Products element by element, naive."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.mul_forward, "vanilla")
def mul_forward(out, inp1, inp2):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(out.shape[0]):
        out[i] = inp1[i] * inp2[i]


@kernel(ops.mul_backward, "vanilla")
def mul_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout, inp1, inp2):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(dout.shape[0]):
        d1 = dout[i] * inp2[i]  # out[i] = inp1[i] * inp2[i]
        d2 = dout[i] * inp1[i]
        dinp1[i] = dinp1[i] + d1 if dinp1_add else d1
        dinp2[i] = dinp2[i] + d2 if dinp2_add else d2


@kernel(ops.scale_forward, "vanilla")
def scale_forward(out, inp, factor, shift):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(out.shape[0]):
        out[i] = np.float32(factor) * inp[i] + np.float32(shift)


@kernel(ops.scale_backward, "vanilla")
def scale_backward(dinp, dinp_add, dout, factor):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(dout.shape[0]):
        d = np.float32(factor) * dout[i]  # out[i] = factor * inp[i]
        dinp[i] = dinp[i] + d if dinp_add else d
