"""Grouped-query attention of bfloat16: the code of ``attention_bf16`` over separate q, k and v."""

import numpy as np
from numba import prange

from ... import ops
from ...ops.declaration import HS, NKV, B, T
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import bounds, chunks
from ..toolkit.tiles import flat
from .attention import limits_of
from .attention_bf16 import BACKWARD_SCRATCH, DECODE_SCRATCH, FORWARD_SCRATCH, HALF, TILED, attention, decode, gradients


@helper(parallel=True)
def convert(to, x):
    """Copy an array into one of another type."""
    for chunk in prange(chunks(to)):
        lo, hi = bounds(chunk, to)
        for i in range(lo, hi):
            to[i] = x[i]


@kernel(ops.gqa_forward, "optimized", of=HALF, scratch=FORWARD_SCRATCH, parallel=False)
def gqa_forward(out, lse, q, k, v, starts, window, cap, work, queue):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: blocks of queries of each query head, handed out by ticket, the longest of a head first.
    Memory: tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
    """
    C, KC, limits = q.shape[2], k.shape[2], limits_of(starts, window, cap)
    attention(out, lse, flat(q), flat(k), flat(v), limits, (0, C, 0, 0, KC), C // KC, work, queue)


@kernel(
    ops.gqa_backward, "optimized", of=HALF, scratch=[*BACKWARD_SCRATCH, ("sums", 2 * B * T * NKV * HS)], parallel=False
)
def gqa_backward(
    dq, dq_add, dk, dk_add, dv, dv_add, dout, q, k, v, out, lse, starts, window, cap, kept, work, queue, steps, sums
):
    """Row by row of tiles; the heads of a group add to dk and dv, which are therefore float32 until the last.

    Parallel: rows of all query heads, handed out by ticket, as for float32.
    Memory: dk and dv in float32; two copies of C numbers a token, of all tokens if T > BLOCK; tiles for each thread.
    Bound: compute.
    Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
    """
    C, KC, sk, sv = q.shape[2], k.shape[2], sums[: k.size], sums[k.size :]
    places, adds = (0, C, 0, 0, KC), (dq_add, dk_add, dv_add)
    if dk_add:
        convert(sk, flat(dk))
    if dv_add:
        convert(sv, flat(dv))
    x, y, z, d, group, limits = flat(q), flat(k), flat(v), flat(dout), C // KC, limits_of(starts, window, cap)
    gradients(flat(dq), sk, sv, adds, d, x, y, z, out, lse, limits, places, group, kept, work, queue, steps)
    convert(flat(dk), sk)
    convert(flat(dv), sv)


@kernel(ops.gqa_decode, "optimized", of=HALF, scratch=DECODE_SCRATCH, parallel=False)
def gqa_decode(out, keys, values, q, k, v, position, window, cap, att, work):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: as for float32.
    Memory: one row of attention weights a head, and out in float32; of many queries, tiles for each head.
    Bound: memory for one query; compute for many.
    """
    made = work[: out.size if out.shape[1] < TILED else 0]
    places, limit = (0, q.shape[2], 0, 0, k.shape[2]), np.float32(cap)
    decode(out, made, keys, values, flat(q), flat(k), flat(v), places, position, window, limit, att, work)
