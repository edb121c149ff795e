"""An optimizer's update by its rule, naive: one loop over the parameters."""

import numpy as np
from numba import prange

from ..compile.jit import helper
from ..toolkit.rules import by_rule


@by_rule("vanilla", "", "param")
def update(rule):
    """Element by element.

    Parallel: the elements.
    Bound: memory.
    """
    step = rule.step

    @helper(parallel=True)
    def update(param, param_numbers, grad, grad_scale):
        scale = np.float32(grad_scale)
        for i in prange(grad.shape[0]):
            step(param, i, grad[i] * scale, param_numbers)

    return update
