"""An optimizer's update by its rule, on vectors: one pass over the gradient, the parameters and their states."""

import numpy as np
from numba import prange

from ..compile.jit import helper
from ..toolkit.rules import by_rule

CHUNK = 8192  # elements: 32 KB a stream, so that the four arrays of AdamW fill 128 KB of the L2 cache


@by_rule("optimized", "", "param")
def update(rule):
    """Chunk by chunk.

    Parallel: chunks of fixed size; for one, no threads are started.
    Bound: memory.
    """
    rows, update_chunk = rule.rows, rule.update

    @helper(parallel=True)
    def update(param, param_numbers, grad, grad_scale):
        scale, n = np.float32(grad_scale), grad.shape[0]
        if n <= CHUNK:
            update_chunk(param, grad, scale, param_numbers)
        else:
            for chunk in prange((n + CHUNK - 1) // CHUNK):
                part = slice(chunk * CHUNK, min(chunk * CHUNK + CHUNK, n))
                update_chunk(rows(param, part), grad[part], scale, param_numbers)

    return update
