"""GeGLU, naive: libm's tanh for each element."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel
from .gelu import CUBIC, HALF, ONE, THREE, S


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
