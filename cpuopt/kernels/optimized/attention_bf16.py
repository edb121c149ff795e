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
from .decode import DECODE_SCRATCH, TILED, decode
from .gqa import gqa_backward, gqa_forward

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


def wide_floats(rows):
    """Size what is float32: rows of q, if they go in tiles; else what is made of them."""

    def size(sizes):
        many = sizes["T"] >= TILED
        return sizes["B"] * sizes["T"] * sizes["NH"] * sizes["HS"] * (rows if many else 1)

    return size


@helper(parallel=True)
def decode_bf16(out, keys, values, q, k, v, places, position, att, work, wide):
    """Attend to the cache and to the new keys."""
    made = wide[: out.size].reshape(out.shape)
    if out.shape[1] >= TILED:
        convert(wide, q)
    decode(out, made, keys, values, q, k, v, wide, places, position, att, work)


@kernel(ops.attention_decode, "optimized", of=HALF, scratch=[*DECODE_SCRATCH, ("wide", wide_floats(3))], parallel=False)
def attention_decode_bf16(out, keys, values, qkv, position, att, work, wide):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: as for float32.
    Memory: one row of attention weights a head, and out in float32; of many queries qkv, and tiles for each head.
    Bound: memory for one query; compute for many.
    """
    C, x = out.shape[2], flat(qkv)
    decode_bf16(out, keys, values, x, x, x, (0, 3 * C, C, 2 * C, 3 * C), position, att, work, wide)


@kernel(ops.gqa_decode, "optimized", of=HALF, scratch=[*DECODE_SCRATCH, ("wide", wide_floats(1))], parallel=False)
def gqa_decode_bf16(out, keys, values, q, k, v, position, att, work, wide):
    """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of the values.

    Parallel: as for float32.
    Memory: one row of attention weights a head, and out in float32; of many queries q, and tiles for each head.
    Bound: memory for one query; compute for many.
    """
    places, qs, ks, vs = (0, q.shape[2], 0, 0, k.shape[2]), flat(q), flat(k), flat(v)
    decode_bf16(out, keys, values, qs, ks, vs, places, position, att, work, wide)
