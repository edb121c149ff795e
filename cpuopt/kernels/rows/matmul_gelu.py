"""A linear layer with GELU for few tokens: GELU takes a chunk of sums when they are there."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..optimized.gelu import forward as gelu
from ..toolkit.threads import SMALL
from .matmul import CHUNK, last_products, products


@helper()
def activated(out, pre, inp, weight, bias, lo, hi):
    """Compute columns `lo` to `hi` of out and pre, and those one, two and three quarters of all columns further."""
    BT, OC = pre.shape
    products(pre, inp, weight, bias, lo, hi)
    for bt in range(BT):
        for start in range(bt * OC, bt * OC + OC - 3, max(1, OC // 4)):
            gelu(out, pre, start + lo, start + hi)


@kernel(ops.matmul_gelu_forward, "rows")
def matmul_gelu_forward(out, pre, inp, weight, bias):
    """Dot products, and their GELU.

    Parallel: chunks of rows of `weight`; each owns those columns of `out` and `pre`.
    Bound: the memory that `weight` streams through, once.
    """
    BT, OC = pre.shape
    quarter = OC // 4
    if 4 * weight.shape[0] * weight.shape[1] < SMALL:
        activated(out, pre, inp, weight, bias, 0, quarter)
    else:
        for chunk in prange((quarter + CHUNK - 1) // CHUNK):
            activated(out, pre, inp, weight, bias, chunk * CHUNK, min(quarter, chunk * CHUNK + CHUNK))
    last_products(pre, inp, weight, bias)
    for bt in range(BT):
        gelu(out, pre, bt * OC + 4 * quarter, bt * OC + OC)
