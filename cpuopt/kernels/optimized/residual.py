"""Residual connection on vectors."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel

CHUNK = 4096  # elements: what slicing costs is spread over 16 KB an array, and each thread still gets several chunks


@helper()
def forward(out, inp1, inp2):
    """Do one chunk."""
    for i in range(out.shape[0]):
        out[i] = inp1[i] + inp2[i]


@helper()
def copy_or_add(dinp, add, dout):
    """Do one chunk of one gradient."""
    if add:
        for i in range(dout.shape[0]):
            dinp[i] += dout[i]
    else:
        for i in range(dout.shape[0]):
            dinp[i] = dout[i]


@kernel(ops.residual_forward, "optimized")
def residual_forward(out, inp1, inp2):
    """Chunk by chunk, a vector at a time.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    n = out.shape[0]
    for chunk in prange((n + CHUNK - 1) // CHUNK):
        lo, hi = chunk * CHUNK, min(chunk * CHUNK + CHUNK, n)
        forward(out[lo:hi], inp1[lo:hi], inp2[lo:hi])


@kernel(ops.residual_backward, "optimized")
def residual_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout):
    """Chunk by chunk: `dout` comes from memory once and from the L1 cache for the second gradient.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    n = dout.shape[0]
    for chunk in prange((n + CHUNK - 1) // CHUNK):
        lo, hi = chunk * CHUNK, min(chunk * CHUNK + CHUNK, n)
        copy_or_add(dinp1[lo:hi], dinp1_add, dout[lo:hi])  # out = inp1 + inp2
        copy_or_add(dinp2[lo:hi], dinp2_add, dout[lo:hi])
