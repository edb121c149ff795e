"""Grouped-query attention: the functions of multi-head attention, over an array each of queries, keys and values."""

from ... import ops
from ...ops.declaration import HS, NKV, B, T
from ..compile.jit import kernel
from ..toolkit.pairs import sums_of
from ..toolkit.tiles import flat
from ._attention_operands import convert, rows_of
from .attention import ATTENTION, Attention, limits_of
from .decode import DECODE


def register(x: Attention) -> None:
    """Register the kernels of a storage type."""
    forward, backward, micro = x.forward, x.backward, x.operands.micro
    of = micro.storage
    decode, decode_scratch = DECODE[of]
    sums = ("sums", 2 * B * T * NKV * HS if micro.rounds else 0)

    @kernel(ops.gqa_forward, "optimized", of=of, scratch=x.forward_scratch, parallel=False)
    def gqa_forward(out, lse, q, k, v, starts, window, cap, work, queue):
        """Block by block of keys, with a running maximum and sum for each query.

        Parallel: blocks of queries of each head, handed out by ticket, the longest of a head first.
        Memory: tiles for each thread.
        Bound: compute.
        Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
        """
        group, limits = q.shape[2] // k.shape[2], limits_of(starts, window, cap)
        forward(out, lse, rows_of(q), rows_of(k), rows_of(v), limits, group, work, queue)

    @kernel(ops.gqa_backward, "optimized", of=of, scratch=[*x.backward_scratch, sums], parallel=False)
    def gqa_backward(
        dq, dq_add, dk, dk_add, dv, dv_add, dout, q, k, v, out, lse, starts, window, cap, kept, work, queue, steps, sums
    ):
        """Row by row of tiles, from the diagonal back; what a block of keys gathers is kept until the last row.

        Parallel: rows of all query heads, handed out by ticket. A row follows the one before it of the same head, and
        the last row of a head follows that of the head before it in the group; both have earlier tickets. So each
        gradient gathers its tiles in one order, whatever the threads.
        Memory: two copies of C numbers a token, of all tokens if T > BLOCK; tiles for each thread; the sums
        of dk and dv, to which the heads of a group add, if these are rounded.
        Bound: compute.
        Source: Dao 2023 (arXiv 2307.08691), algorithm 2, in another order.
        """
        group, limits = q.shape[2] // k.shape[2], limits_of(starts, window, cap)
        sk, sv = sums_of(flat(dk), sums[: k.size]), sums_of(flat(dv), sums[k.size :])
        if dk_add:
            convert(sk, flat(dk))
        if dv_add:
            convert(sv, flat(dv))
        grads, saved = (flat(dq), sk, sv, dq_add, dk_add, dv_add), (flat(dout), out, lse)
        memory = kept, work, queue, steps
        backward(grads, rows_of(q), rows_of(k), rows_of(v), saved, limits, group, memory)
        convert(flat(dk), sk)
        convert(flat(dv), sv)

    @kernel(ops.gqa_decode, "optimized", of=of, scratch=decode_scratch, parallel=False)
    def gqa_decode(out, keys, values, q, k, v, position, window, cap, att, work):
        """Put the new keys and values away; then, for each query: scores, their softmax, the weighted sum of values.

        Parallel: batch and key head, with all query heads of its group; batch and query head if there are many queries.
        Each owns its channels of `out`, its part of the cache, and a slice of `att` and `work`. If there is little to
        read, one thread does them all.
        Memory: one row of attention weights a query head, and the sums of out; tiles for each of them if there are
        many queries.
        Bound: memory for one query; compute for many.
        Source: for many, Dao 2023 (arXiv 2307.08691), algorithm 1.
        """
        made, queries = sums_of(flat(out), work), rows_of(q)
        decode(out, made, keys, values, queries, rows_of(k), rows_of(v), position, window, cap, att, work)


for _storage in ATTENTION:
    register(_storage)
