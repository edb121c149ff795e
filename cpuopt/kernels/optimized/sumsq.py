"""Sum of squares on vectors: chunks of fixed size, summed in order, so that the number of threads changes no bit."""

from numba import prange

from ... import ops
from ..compile.jit import kernel
from ..toolkit.epilogue import squares

CHUNK = 16384  # elements: 64 KB, and few enough terms that sums of one chunk stay accurate


@kernel(ops.sumsq, "optimized", scratch=[("partial", lambda sizes: sizes["N"] // CHUNK + 1)])
def sumsq(out, inp, partial):
    """One partial sum for each chunk; these are added in float64.

    Parallel: the chunks; for one, no threads are started.
    Memory: one element a chunk.
    Bound: memory.
    """
    n = inp.shape[0]
    chunks = (n + CHUNK - 1) // CHUNK
    if chunks == 1:
        partial[0] = squares(inp)
    else:
        for chunk in prange(chunks):
            partial[chunk] = squares(inp[chunk * CHUNK : min(chunk * CHUNK + CHUNK, n)])
    total = 0.0
    for chunk in range(chunks):
        total += partial[chunk]
    out[0] = total
