"""Matrix product on NumPy's BLAS; a product that is added goes through a block of rows of scratch."""

import numpy as np

from ... import ops
from ...ops.declaration import C
from ..compile.jit import kernel

ROWS = 256


def product(out, add, a, b, block):
    """Compute ``out = a @ b``, or add it, ROWS rows at a time."""
    if not add:
        np.matmul(a, b, out=out)
        return
    for lo in range(0, len(out), ROWS):
        rows = out[lo : lo + ROWS]
        part = block[: rows.size].reshape(rows.shape)
        np.matmul(a[lo : lo + ROWS], b, out=part)
        rows += part


@kernel(ops.matmul_forward, "blas", jit=False, same_bits=False, narrow=False)
def matmul_forward(out, inp, weight, bias):
    """One sgemm, then the bias."""
    np.matmul(inp, weight.T, out=out)
    if len(bias):
        out += bias


@kernel(ops.matmul_backward_input, "blas", jit=False, same_bits=False, narrow=False, scratch=[("block", ROWS * C)])
def matmul_backward_input(dinp, dinp_add, dout, weight, block):
    """One sgemm, or one for each block of rows."""
    product(dinp, dinp_add, dout, weight, block)


@kernel(
    ops.matmul_backward_weight,
    "blas",
    jit=False,
    same_bits=False,
    narrow=False,
    scratch=[("block", ROWS * C)],
    skips=["dweight"],
)
def matmul_backward_weight(dweight, dweight_add, dbias, dbias_add, dout, inp, block):
    """One sgemm, or one for each block of rows, and the column sums."""
    if len(dweight):
        product(dweight, dweight_add, dout.T, inp, block)
    if len(dbias):
        total = dout.sum(axis=0)
        dbias[:] = dbias + total if dbias_add else total
