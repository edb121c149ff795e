"""Chunks of work that threads take when they are ready: each those of its own share first, then what others have left.

The shares are equal, and those of neighbouring threads lie side by side. So kernels that cut the rows of one matrix
give a thread the same rows, which are in its caches then, and no thread waits for a slower one. Which thread does a
chunk changes no bit.

The first cache line of a queue has the number of its chunks; each other line, how many of a share have been taken.
"""

import numba
import numpy as np

from ..compile.jit import helper
from .simd import LINE, ticket


def for_each_thread(floats):
    """Size scratch of `floats`, a number or a function of sizes, for each thread that may run.

    A kernel finds the number of threads from the length.
    """
    return lambda sizes: numba.config.NUMBA_NUM_THREADS * (floats(sizes) if callable(floats) else floats)


QUEUE = ("queue", lambda sizes: LINE * (1 + numba.config.NUMBA_NUM_THREADS), "int32")
"""Scratch: a queue with a share for each thread."""
ORDERED = ("queue", 2 * LINE, "int32")
"""Scratch: a queue with one share, whose chunks are taken in their order."""


@helper()
def deal(queue, chunks):
    """Put chunks into a queue."""
    queue[0] = chunks
    for line in range(LINE, queue.shape[0], LINE):
        queue[line] = 0


@helper()
def take(queue, t):
    """Take a chunk for the t-th thread; -1 if none is left."""
    chunks, shares = np.int64(queue[0]), queue.shape[0] // LINE - 1
    for i in range(shares):
        owner = (np.int64(t) + i) % shares
        lo, hi = (owner * chunks + shares - 1) // shares, ((owner + 1) * chunks + shares - 1) // shares
        taken = (owner + 1) * LINE
        if queue[taken] < hi - lo:  # as it was a moment ago: the ticket decides
            chunk = lo + ticket(queue[taken:])
            if chunk < hi:
                return chunk
    return np.int64(-1)
