"""Products element by element, on vectors."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, bounds, chunks, loop_of


@helper(forceinline=True)
def product(x, y):
    """Multiply."""
    return (x * y,)


@helper(forceinline=True)
def scaled(x, factor, shift):
    """Multiply and add."""
    return (x * factor + shift,)


@helper(forceinline=True)
def products(dout, x, y):
    """Compute the gradients of x and y."""
    return dout * y, dout * x  # out = x * y


multiply, scale, gradients = loop_of(product), loop_of(scaled), loop_of(products)


@kernel(ops.mul_forward, "optimized")
def mul_forward(out, inp1, inp2):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(out)):
        multiply((out,), SET, (inp1, inp2), *bounds(chunk, out))


@kernel(ops.mul_backward, "optimized")
def mul_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout, inp1, inp2):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(dinp1)):
        gradients((dinp1, dinp2), (dinp1_add, dinp2_add), (dout, inp1, inp2), *bounds(chunk, dinp1))


@kernel(ops.scale_forward, "optimized")
def scale_forward(out, inp, factor, shift):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(out)):
        scale((out,), SET, (inp, np.float32(factor), np.float32(shift)), *bounds(chunk, out))


@kernel(ops.scale_backward, "optimized")
def scale_backward(dinp, dinp_add, dout, factor):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    for chunk in prange(chunks(dinp)):
        multiply((dinp,), (dinp_add,), (dout, np.float32(factor)), *bounds(chunk, dinp))  # out = factor * inp
