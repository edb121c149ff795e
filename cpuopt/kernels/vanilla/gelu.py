"""GELU, naive: libm's tanh for each element."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

S = np.float32(np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)  # Hendrycks and Gimpel 2016
HALF, ONE, THREE = np.float32(0.5), np.float32(1), np.float32(3)


@kernel(ops.gelu_forward, "vanilla")
def gelu_forward(out, inp):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the tanh.
    """
    for i in prange(inp.shape[0]):
        x = inp[i]
        out[i] = HALF * x * (ONE + np.tanh(S * (x + CUBIC * x * x * x)))


@kernel(ops.gelu_backward, "vanilla")
def gelu_backward(dinp, dinp_add, dout, inp):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the tanh.
    """
    for i in prange(inp.shape[0]):
        x = inp[i]
        t = np.tanh(S * (x + CUBIC * x * x * x))
        slope = HALF * (ONE + t) + HALF * x * (ONE - t * t) * S * (ONE + THREE * CUBIC * x * x)
        d = slope * dout[i]  # out[i] = x/2 * (1 + tanh(...))
        dinp[i] = dinp[i] + d if dinp_add else d
