"""SiLU, naive: libm's exp for each element."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

ONE = np.float32(1)


@kernel(ops.silu_forward, "vanilla")
def silu_forward(out, inp):
    """Element by element; the exponent is never positive, so that neither the value nor its slope overflows.

    A NaN goes through with its sign, which of two NaNs of a product would be that of either.

    Parallel: the elements.
    Bound: compute, the exp.
    """
    for i in prange(inp.shape[0]):
        e = np.exp(-inp[i] if inp[i] > 0 else inp[i])
        out[i] = inp[i] * (ONE if inp[i] > 0 else e) / (ONE + e)


@kernel(ops.silu_backward, "vanilla")
def silu_backward(dinp, dinp_add, dout, inp):
    """Element by element.

    Parallel: the elements.
    Bound: compute, the exp.
    """
    for i in prange(inp.shape[0]):
        s = ONE / (ONE + np.exp(-inp[i]))
        d = dout[i] * s * (ONE + inp[i] * (ONE - s))  # out[i] = inp[i] * s
        dinp[i] = dinp[i] + d if dinp_add else d
