"""Attention of bfloat16: queries, keys and values become float32 once, and what is rounded is rounded at the end.

The products are those of ``attention``: of float32, since a tile of scores stays in the cache either way.
"""

from numba import prange

from ... import ops
from ...ops.declaration import HS, NH, NKV, B, C, T
from ..compile.jit import helper, kernel
from ..toolkit.elementwise import bounds, chunks
from ..toolkit.tiles import flat
from .attention import BACKWARD_SCRATCH, FORWARD_SCRATCH, attention_backward, attention_forward
from .decode import DECODE_SCRATCH, attention_decode
from .gqa import gqa_backward, gqa_decode, gqa_forward

HALF = "bfloat16"
QUERIES, KEYS = B * T * NH * HS, B * T * NKV * HS


@helper(parallel=True)
def convert(to, x):
    """Copy an array into one of another type."""
    for chunk in prange(chunks(to)):
        lo, hi = bounds(chunk, to)
        for i in range(lo, hi):
            to[i] = x[i]


@helper()
def widened(x, room, start):
    """Copy an array into a part of float32 memory; return it, and where the part ends."""
    wide = room[start : start + x.size]
    convert(wide, flat(x))
    return wide.reshape(x.shape), start + x.size


@kernel(
    ops.attention_forward, "optimized", of=HALF, scratch=[*FORWARD_SCRATCH, ("wide", 3 * B * T * C)], parallel=False
)
def forward(out, lse, qkv, work, queue, wide):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: as for float32.
    Memory: qkv in float32; four tiles for each thread.
    Bound: compute.
    """
    x, _ = widened(qkv, wide, 0)
    attention_forward(out, lse, x, work, queue)


@kernel(
    ops.attention_backward, "optimized", of=HALF, scratch=[*BACKWARD_SCRATCH, ("wide", 3 * B * T * C)], parallel=False
)
def backward(dqkv, dqkv_add, dout, qkv, out, lse, kept, work, queue, steps, wide):
    """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

    Parallel: as for float32.
    Memory: qkv in float32; two copies of C numbers a token, of all tokens if T > BLOCK; seven tiles for each thread.
    Bound: compute.
    """
    x, _ = widened(qkv, wide, 0)
    attention_backward(dqkv, dqkv_add, dout, x, out, lse, kept, work, queue, steps)


@kernel(ops.gqa_forward, "optimized", of=HALF, scratch=[*FORWARD_SCRATCH, ("wide", QUERIES + 2 * KEYS)], parallel=False)
def grouped_forward(out, lse, q, k, v, work, queue, wide):
    """Block by block of keys, with a running maximum and sum for each query.

    Parallel: as for float32.
    Memory: q, k and v in float32; four tiles for each thread.
    Bound: compute.
    """
    qs, end = widened(q, wide, 0)
    ks, end = widened(k, wide, end)
    vs, end = widened(v, wide, end)
    gqa_forward(out, lse, qs, ks, vs, work, queue)


@kernel(
    ops.gqa_backward,
    "optimized",
    of=HALF,
    scratch=[*BACKWARD_SCRATCH, ("wide", QUERIES + 2 * KEYS), ("sums", 2 * KEYS)],
    parallel=False,
)
def grouped_backward(
    dq, dq_add, dk, dk_add, dv, dv_add, dout, q, k, v, out, lse, kept, work, queue, steps, wide, sums
):  # fmt: skip
    """Row by row of tiles; the heads of a group add to dk and dv, which are therefore float32 until the last.

    Parallel: as for float32.
    Memory: q, k, v, dk and dv in float32; two copies of C numbers a token, of all tokens if T > BLOCK; seven tiles for
    each thread.
    Bound: compute.
    """
    qs, end = widened(q, wide, 0)
    ks, end = widened(k, wide, end)
    vs, end = widened(v, wide, end)
    sk, sv = sums[: k.size].reshape(k.shape), sums[k.size :].reshape(k.shape)
    if dk_add:
        convert(flat(sk), flat(dk))
    if dv_add:
        convert(flat(sv), flat(dv))
    gqa_backward(dq, dq_add, sk, dk_add, sv, dv_add, dout, qs, ks, vs, out, lse, kept, work, queue, steps)
    convert(flat(dk), flat(sk))
    convert(flat(dv), flat(sv))


@kernel(
    ops.attention_decode, "optimized", of=HALF, scratch=[*DECODE_SCRATCH, ("wide", 4 * B * T * NH * HS)], parallel=False
)
def decode(out, keys, values, qkv, position, att, work, wide):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: as for float32.
    Memory: qkv and out in float32; one row of attention weights a head; tiles for each head of many queries.
    Bound: memory for one query; compute for many.
    """
    x, end = widened(qkv, wide, 0)
    made = wide[end : end + out.size].reshape(out.shape)
    attention_decode(made, keys, values, x, position, att, work)
    convert(flat(out), flat(made))


@kernel(
    ops.gqa_decode, "optimized", of=HALF, scratch=[*DECODE_SCRATCH, ("wide", 2 * QUERIES + 2 * KEYS)], parallel=False
)
def grouped_decode(out, keys, values, q, k, v, position, att, work, wide):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: as for float32.
    Memory: q, k, v and out in float32; one row of attention weights a head; tiles for each head of many queries.
    Bound: memory for one query; compute for many.
    """
    qs, end = widened(q, wide, 0)
    ks, end = widened(k, wide, end)
    vs, end = widened(v, wide, end)
    made = wide[end : end + out.size].reshape(out.shape)
    gqa_decode(made, keys, values, qs, ks, vs, position, att, work)
    convert(flat(out), flat(made))
