"""A linear layer with GELU for few tokens: GELU takes a chunk of sums when they are there."""

from numba import prange

from ... import ops
from ..jit import kernel
from ..optimized.gelu import forward as gelu
from .matmul import CHUNK, products


@kernel(ops.matmul_gelu_forward, "rows")
def matmul_gelu_forward(out, pre, inp, weight, bias):
    """Dot products, and their GELU.

    Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
    Bound: the memory that `weight` streams through, once.
    """
    BT, OC = pre.shape
    for chunk in prange((OC + CHUNK - 1) // CHUNK):
        lo, hi = chunk * CHUNK, min(OC, chunk * CHUNK + CHUNK)
        products(pre, inp, weight, bias, lo, hi)
        for bt in range(BT):
            gelu(out, pre, bt * OC + lo, bt * OC + hi)
