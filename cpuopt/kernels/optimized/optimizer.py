"""An optimizer's update by its rule, on vectors: one pass over the gradient, the parameters and their states."""

import numpy as np
from numba import prange

from ..compile.jit import helper
from ..toolkit.rules import by_rule

CHUNK = 8192  # elements: 32 KB a stream, so that the four arrays of AdamW fill 128 KB of the L2 cache


@by_rule("optimized")
def update(epilogue):
    """Chunk by chunk.

    Parallel: chunks of fixed size; for one, no threads are started.
    Bound: memory.
    """
    step = epilogue.step

    @helper(parallel=True)
    def update(to, grad, grad_scale):
        scale, n = np.float32(grad_scale), grad.shape[0]
        if n <= CHUNK:
            step(to, slice(0, n), grad, scale)
        else:
            for chunk in prange((n + CHUNK - 1) // CHUNK):
                part = slice(chunk * CHUNK, min(chunk * CHUNK + CHUNK, n))
                step(to, part, grad[part], scale)

    return update
