"""Residual connection, naive."""

from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.residual_forward, "vanilla")
def residual_forward(out, inp1, inp2):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(out.shape[0]):
        out[i] = inp1[i] + inp2[i]


@kernel(ops.residual_backward, "vanilla")
def residual_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    for i in prange(dout.shape[0]):
        d = dout[i]  # out[i] = inp1[i] + inp2[i]
        dinp1[i] = dinp1[i] + d if dinp1_add else d
        dinp2[i] = dinp2[i] + d if dinp2_add else d
