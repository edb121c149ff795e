"""Grouped-query attention, in the tiles and on the vectors of multi-head attention: the key heads lie elsewhere."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import kernel
from ..toolkit.queue import deal
from ..toolkit.tiles import flat
from .attention import (
    BACKWARD_SCRATCH,
    FORWARD_SCRATCH,
    backward,
    count_blocks,
    forward,
    forward_floats,
    limits_of,
    row_floats,
)
from .decode import DECODE_SCRATCH, decode


@kernel(ops.gqa_forward, "optimized", scratch=FORWARD_SCRATCH)
def gqa_forward(out, lse, q, k, v, starts, window, cap, work, queue):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: blocks of queries of each head, handed out by ticket, the longest of a head first.
    Memory: four tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    C, KC, NH = q.shape[2], k.shape[2], lse.shape[1]
    floats, places = forward_floats(C // NH), (0, C, 0, 0, KC)
    qs, ks, vs, limits = flat(q), flat(k), flat(v), limits_of(starts, window, cap)
    deal(queue, count_blocks(lse))
    for worker in prange(work.shape[0] // floats):
        forward(out, lse, qs, ks, vs, limits, places, C // KC, work, np.int64(worker) * floats, queue)


@kernel(ops.gqa_backward, "optimized", scratch=BACKWARD_SCRATCH)
def gqa_backward(
    dq, dq_add, dk, dk_add, dv, dv_add, dout, q, k, v, out, lse, starts, window, cap, kept, work, queue, steps
):
    """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

    Parallel: rows of all query heads, handed out by ticket. A row follows the one before it of the same head, and the
    last row of a head follows that of the head before it in the group; both have earlier tickets. So each gradient
    gathers its tiles in one order, whatever the threads.
    Memory: two copies of C numbers a token, of all tokens if T > BLOCK; seven tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
    """
    C, KC, NH = q.shape[2], k.shape[2], lse.shape[1]
    floats, places, adds = row_floats(C // NH), (0, C, 0, 0, KC), (dq_add, dk_add, dv_add)
    dqs, dks, dvs = flat(dq), flat(dk), flat(dv)
    qs, ks, vs, limits = flat(q), flat(k), flat(v), limits_of(starts, window, cap)
    deal(queue, count_blocks(lse))
    for i in range(steps.shape[0]):
        steps[i] = 0
    for worker in prange(work.shape[0] // floats):
        w, group = np.int64(worker), C // KC
        backward(
            dqs, dks, dvs, adds, dout, qs, ks, vs, out, lse, limits, places, group, kept, work, w, floats, queue, steps
        )


@kernel(ops.gqa_decode, "optimized", scratch=DECODE_SCRATCH, parallel=False)
def gqa_decode(out, keys, values, q, k, v, position, window, cap, att, work):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: batch and key head, with all query heads of its group; batch and query head if there are many queries.
    Each owns its channels of `out`, its part of the cache, and a slice of `att` and `work`. If there is little to
    read, one thread does them all.
    Memory: one row of attention weights a query head; tiles for each of them if there are many queries.
    Bound: memory for one query; compute for many.
    Source: for many, Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    places, qs, ks, vs = (0, q.shape[2], 0, 0, k.shape[2]), flat(q), flat(k), flat(v)
    decode(out, out, keys, values, qs, ks, vs, places, position, window, np.float32(cap), att, work)
