"""SwiGLU and GeGLU, naive: libm's exp or tanh for each element."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

S = np.float32(np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)  # Hendrycks and Gimpel 2016
HALF, ONE, THREE = np.float32(0.5), np.float32(1), np.float32(3)


@kernel(ops.swiglu_forward, "vanilla")
def swiglu_forward(out, inp, up):
    """Element by element; the exponent is never positive, so that neither the value nor its slope overflows.

    Parallel: the elements.
    Bound: compute, the exp.
    """
    for i in prange(inp.shape[0]):
        e = np.exp(-abs(inp[i]))
        out[i] = inp[i] * (ONE if inp[i] > 0 else e) / (ONE + e) * up[i]


@kernel(ops.swiglu_backward, "vanilla")
def swiglu_backward(dinp, dinp_add, dup, dup_add, dout, inp, up):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the exp.
    """
    for i in prange(inp.shape[0]):
        s = ONE / (ONE + np.exp(-inp[i]))
        d = dout[i] * up[i] * s * (ONE + inp[i] * (ONE - s))  # out[i] = inp[i] * s * up[i]
        du = dout[i] * inp[i] * s
        dinp[i] = dinp[i] + d if dinp_add else d
        dup[i] = dup[i] + du if dup_add else du


@kernel(ops.geglu_forward, "vanilla")
def geglu_forward(out, inp, up):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the tanh.
    """
    for i in prange(inp.shape[0]):
        x = inp[i]
        out[i] = HALF * x * (ONE + np.tanh(S * (x + CUBIC * x * x * x))) * up[i]


@kernel(ops.geglu_backward, "vanilla")
def geglu_backward(dinp, dinp_add, dup, dup_add, dout, inp, up):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the tanh.
    """
    for i in prange(inp.shape[0]):
        x = inp[i]
        t = np.tanh(S * (x + CUBIC * x * x * x))
        slope = HALF * (ONE + t) + HALF * x * (ONE - t * t) * S * (ONE + THREE * CUBIC * x * x)
        d = dout[i] * up[i] * slope  # out[i] = x/2 * (1 + tanh(...)) * up[i]
        du = dout[i] * HALF * x * (ONE + t)
        dinp[i] = dinp[i] + d if dinp_add else d
        dup[i] = dup[i] + du if dup_add else du
