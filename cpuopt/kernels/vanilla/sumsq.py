"""Sum of squares: fixed chunks, summed in order, so that the number of threads changes no bit."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel

CHUNKS = 64


@kernel(ops.sumsq, "vanilla", scratch=[("partial", lambda sizes: CHUNKS)])
def sumsq(out, inp, partial):
    """One partial sum for each chunk.

    Parallel: the chunks, whose number does not depend on the threads.
    Bound: memory.
    """
    n = inp.shape[0]
    for chunk in prange(CHUNKS):
        total = np.float32(0)
        for x in inp[n * chunk // CHUNKS : n * (chunk + 1) // CHUNKS]:
            total += x * x
        partial[chunk] = total
    total = np.float32(0)
    for chunk in range(CHUNKS):
        total += partial[chunk]
    out[0] = total
