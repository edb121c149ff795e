"""Products element by element, on vectors."""

import numpy as np

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import SET, chunks_of, loop_of


@helper(forceinline=True)
def product(x, y):
    """Multiply."""
    return (x * y,)


@helper(forceinline=True)
def products(dout, x, y):
    """Compute the gradients of x and y."""
    return dout * y, dout * x  # out = x * y


multiply, gradients = chunks_of(loop_of(product)), chunks_of(loop_of(products))


@kernel(ops.mul_forward, "optimized", parallel=False)
def mul_forward(out, inp1, inp2):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    multiply((out,), SET, (inp1, inp2))


@kernel(ops.mul_backward, "optimized", parallel=False)
def mul_backward(dinp1, dinp1_add, dinp2, dinp2_add, dout, inp1, inp2):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    gradients((dinp1, dinp2), (dinp1_add, dinp2_add), (dout, inp1, inp2))


@kernel(ops.scale_forward, "optimized", parallel=False)
def scale_forward(out, inp, factor):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    multiply((out,), SET, (inp, np.float32(factor)))


@kernel(ops.scale_backward, "optimized", parallel=False)
def scale_backward(dinp, dinp_add, dout, factor):
    """Vector by vector.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    multiply((dinp,), (dinp_add,), (dout, np.float32(factor)))  # out = factor * inp
