"""SwiGLU, naive: libm's exp for each element."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

ONE = np.float32(1)


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
