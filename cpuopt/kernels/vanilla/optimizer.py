"""An optimizer's update by its rule, naive."""

import numpy as np
from numba import prange

from ..compile.jit import helper
from ..toolkit.rules import by_rule

CHUNK = 1024


@by_rule("vanilla", "", "param")
def update(rule):
    """Chunk by chunk.

    Parallel: chunks of fixed size.
    Bound: memory.
    """
    rows, step = rule.rows, rule.update

    @helper(parallel=True)
    def update(param, param_numbers, grad, grad_scale):
        scale, n = np.float32(grad_scale), grad.shape[0]
        for chunk in prange((n + CHUNK - 1) // CHUNK):
            part = slice(chunk * CHUNK, min(chunk * CHUNK + CHUNK, n))
            step(rows(param, part), grad[part], scale, param_numbers)

    return update
