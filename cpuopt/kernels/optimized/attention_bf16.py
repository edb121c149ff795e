"""Attention of bfloat16: the kernels over the tiles of ``_attention_pairs``."""

import numpy as np
from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.queue import ORDERED, deal, for_each_thread
from ..toolkit.tiles import flat
from ._attention_pairs import attend, backward, forward, forward_floats, row_floats
from .attention import count_blocks, for_each_head_size, kept_floats, limits_of
from .decode import ATT, TILED, decode_by

HALF = "bfloat16"
FORWARD_SCRATCH = [("work", for_each_thread(for_each_head_size(forward_floats))), ORDERED]
BACKWARD_SCRATCH = [
    ("kept", kept_floats),
    ("work", for_each_thread(for_each_head_size(row_floats))),
    ORDERED,
    ("steps", lambda sizes: sizes["B"] * sizes["NH"] * -(-sizes["T"] // 64), "int32"),
]


@helper(parallel=True)
def attention(out, lse, q, k, v, limits, places, group, work, queue):
    """Compute attention, wherever q, k and v lie."""
    floats = forward_floats(out.shape[2] // lse.shape[1])
    deal(queue, count_blocks(lse))
    for worker in prange(work.shape[0] // floats):
        forward(out, lse, q, k, v, limits, places, group, work, np.int64(worker) * floats, queue)


@helper(parallel=True)
def gradients(dq, dk, dv, adds, dout, q, k, v, out, lse, limits, places, group, kept, work, queue, steps):
    """Compute the gradients of attention, wherever q, k and v lie."""
    floats = row_floats(out.shape[2] // lse.shape[1])
    deal(queue, count_blocks(lse))
    for i in range(steps.shape[0]):
        steps[i] = 0
    for worker in prange(work.shape[0] // floats):
        w = np.int64(worker)
        backward(dq, dk, dv, adds, dout, q, k, v, out, lse, limits, places, group, kept, work, w, floats, queue, steps)


@kernel(ops.attention_forward, "optimized", of=HALF, scratch=FORWARD_SCRATCH, parallel=False)
def attention_forward(out, lse, qkv, starts, window, cap, work, queue):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: blocks of queries of each head, handed out by ticket, the longest of a head first.
    Memory: tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    C, x, limits = out.shape[2], flat(qkv), limits_of(starts, window, cap)
    attention(out, lse, x, x, x, limits, (0, 3 * C, C, 2 * C, 3 * C), 1, work, queue)


@kernel(ops.attention_backward, "optimized", of=HALF, scratch=BACKWARD_SCRATCH, parallel=False)
def attention_backward(dqkv, dqkv_add, dout, qkv, out, lse, starts, window, cap, kept, work, queue, steps):
    """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

    Parallel: rows of all heads, handed out by ticket, as for float32.
    Memory: two copies of C numbers a token, of all tokens if T > BLOCK; tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
    """
    C, d, x, adds = out.shape[2], flat(dqkv), flat(qkv), (dqkv_add, dqkv_add, dqkv_add)
    places, limits = (0, 3 * C, C, 2 * C, 3 * C), limits_of(starts, window, cap)
    gradients(d, d, d, adds, flat(dout), x, x, x, out, lse, limits, places, 1, kept, work, queue, steps)


decode = decode_by(attend, forward_floats)


def work_floats(sizes):
    """Size what one query makes, in float32; or the tiles of each head, if there are enough queries."""
    many = sizes["T"] >= TILED
    return sizes["B"] * sizes["NH"] * (forward_floats.py_func(sizes["HS"]) if many else sizes["T"] * sizes["HS"])


DECODE_SCRATCH = [ATT, ("work", work_floats)]


@kernel(ops.attention_decode, "optimized", of=HALF, scratch=DECODE_SCRATCH, parallel=False)
def attention_decode(out, keys, values, qkv, position, window, cap, att, work):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: as for float32.
    Memory: one row of attention weights a head, and out in float32; of many queries, tiles for each head.
    Bound: memory for one query; compute for many.
    """
    C, x, made = out.shape[2], flat(qkv), work[: out.size if out.shape[1] < TILED else 0]
    decode(out, made, keys, values, x, x, x, (0, 3 * C, C, 2 * C, 3 * C), position, window, np.float32(cap), att, work)
