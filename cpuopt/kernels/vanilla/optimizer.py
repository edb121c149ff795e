"""An optimizer's update by its rule, naive."""

import numpy as np
from numba import prange

from ..compile.jit import helper
from ..toolkit.rules import by_rule

CHUNK = 1024


@by_rule("vanilla")
def update(epilogue):
    """Chunk by chunk.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    step = epilogue.step

    @helper(parallel=True)
    def update(to, grad, grad_scale):
        scale, n = np.float32(grad_scale), grad.shape[0]
        for chunk in prange((n + CHUNK - 1) // CHUNK):
            part = slice(chunk * CHUNK, min(chunk * CHUNK + CHUNK, n))
            step(to, part, grad[part], scale)

    return update
