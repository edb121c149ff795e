"""The storage types of attention: how rows become operands of its products, which sum in float32.

A product of tiles reads its first operand by words and its second by vectors of words. A word holds the
neighbours along the summed axis that one instruction multiplies (``micro``). Operands that are not read in place are
written to the working memory `w` of a thread.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import prange

from ..compile.jit import helper
from ..toolkit.constants import ZERO
from ..toolkit.elementwise import bounds, chunks
from ..toolkit.lanes import load, load_some, spread, store, transpose
from ..toolkit.micro import MicroKernel
from ..toolkit.micro.records import MICRO_KERNELS
from ..toolkit.pairs import (
    interleaved,
    is_half,
    load_pair,
    load_some_words,
    load_words,
    pair,
    rounded,
    store_first,
    store_second,
)
from ..toolkit.simd import LANES, at
from ..toolkit.simd import transpose as transpose_square
from ..toolkit.tiles import BLOCK, PART, flat, product_by, up


class RowView(NamedTuple):
    """Rows of channels: a flat array, the offset of the first row, and the distance of neighbours."""

    array: Any
    first: int
    step: int


@helper()
def rows_of(x):
    """View an array along its last axis."""
    return RowView(flat(x), 0, x.shape[-1])


@helper()
def thirds(qkv):
    """View a fused array as q, k and v."""
    C, x = qkv.shape[-1] // 3, flat(qkv)
    return RowView(x, 0, 3 * C), RowView(x, C, 3 * C), RowView(x, 2 * C, 3 * C)


@helper()
def rows_from(x, token, channel):
    """View rows from a token and a channel on."""
    return RowView(x.array, x.first + token * x.step + channel, x.step)


@helper(parallel=True)
def convert(to, x):
    """Copy between an array and its sums, if these are not the same."""
    count = chunks(to) if is_half(to) or is_half(x) else 0
    for chunk in prange(count):
        lo, hi = bounds(chunk, to)
        for i in range(lo, hi):
            to[i] = x[i]


@dataclass(frozen=True)
class Operands:
    """A storage type of rows, and of the weights of attention and their adjoints.

    Attributes
    ----------
    micro : the micro-kernel.
    product : its product of tiles, of `tiles.product_by`.
    part : the keys, from a multiple of it on, that have weights or zeros if a query reads one of them.
    folds : whether `turn` multiplies by the scale of the scores; a bfloat16 would be rounded once more.
    rows : ``rows(w, room, x, n, HS)`` makes the first operand of a sum over channels, in place if it can, and returns
        its pointer and the distance of its rows.
    columns : ``columns(w, room, x, n, HS, copied)`` makes the second one of a sum over rows, likewise.
    turn : ``turn(w, to, room, x, n, HS, scale)`` makes the second one of a sum over channels; the room for `columns` is
        behind the room.
    put_weights : ``put_weights(w, score, k, q, p, p1)`` stores the weights of keys k and k + 1 for queries from q on.
    put_adjoints : ``put_adjoints(w, score, datt, paired, k, q, p, p1, ds, ds1)`` stores weights and adjoints of scores.
    by_query : ``by_query(w, x, to, to_row, n_q, n_k)`` makes the first operand of a sum over keys from what the last
        two stored at x, in place if it can, and returns its pointer and the distances of its rows and words.
    """

    micro: MicroKernel
    product: Any
    part: int
    folds: bool
    rows: Any
    columns: Any
    turn: Any
    put_weights: Any
    put_adjoints: Any
    by_query: Any


def pack_by(unit, load, load_some):
    """Make the function that copies rows as words, from those that load a vector of words, or a part of one."""

    @helper()
    def pack(w, to, x, n, room, HS):
        """Copy n rows; zeros fill up the last vector, and `room` rows. Return their width."""
        width = up((HS + unit - 1) // unit, LANES)
        for t in range(n):
            for i in range(0, width, LANES):
                left, place = HS - unit * i, x.first + t * x.step + unit * i
                words = load(x.array, place) if left >= unit * LANES else load_some(x.array, place, left)
                store(w, to + t * width + i, words)
        for i in range(n * width, room * width, LANES):
            store(w, to + i, spread(ZERO))
        return width

    return pack


def rows_by(unit, pack):
    """Make the function that returns rows in place if their channels are whole words, else a copy."""

    @helper()
    def rows(w, room, x, n, HS):
        if HS % unit == 0:
            return at(x.array, x.first), x.step // unit
        return at(w, room), pack(w, room, x, n, n, HS)

    return rows


def by_query_of(micro):
    """Make the function that returns words of keys by query: transposed, if the micro-kernel reads rows in tiles."""
    unit, tiled = micro.group, micro.tiled

    @helper()
    def by_query(w, x, to, to_row, n_q, n_k):
        if not tiled:
            return at(w, x), 1, BLOCK
        for q in range(0, n_q, LANES):
            for word in range(0, (n_k + unit - 1) // unit, LANES):
                transpose_square(at(w, to + q * to_row + word), to_row, at(w, x + word * BLOCK + q), BLOCK)
        return at(w, to), to_row, 1

    return by_query


# float32 -------------------------------------------------------------------------------------------------------------

pack_floats = pack_by(1, load, load_some)


@helper()
def float_columns(w, room, x, n, HS, copied):
    """Return rows in place if they are whole vectors, else a copy of such."""
    if HS % LANES == 0 and not copied:
        return at(x.array, x.first), x.step
    return at(w, room), pack_floats(w, room, x, n, n, HS)


@helper()
def turn_floats(w, to, room, x, n, HS, scale):
    """Transpose rows, scaled; a copy of them, unless they are squares of vectors."""
    rows, first, step = x
    if HS % LANES > 0 or n % LANES > 0:
        rows, first, step = w, room, pack_floats(w, room, x, n, up(n, LANES), HS)
    for t in range(0, n, LANES):
        for i in range(0, HS, LANES):
            transpose(w, to + i * BLOCK + t, BLOCK, rows, first + t * step + i, step, scale)


@helper(forceinline=True)
def put_floats(w, tile, k, q, x, x1):
    """Store numbers of two keys in their rows of a tile."""
    store(w, tile + k * BLOCK + q, x)
    store(w, tile + (k + 1) * BLOCK + q, x1)


@helper(forceinline=True)
def put_adjoint_floats(w, score, datt, paired, k, q, p, p1, ds, ds1):
    """Store weights in place of scores, and adjoints of scores in place of those of weights."""
    put_floats(w, score, k, q, p, p1)
    put_floats(w, datt, k, q, ds, ds1)


FLOATS = MICRO_KERNELS["float32"]
FLOAT32 = Operands(
    micro=FLOATS,
    product=product_by(FLOATS),
    part=PART,
    folds=True,
    rows=rows_by(1, pack_floats),
    columns=float_columns,
    turn=turn_floats,
    put_weights=put_floats,
    put_adjoints=put_adjoint_floats,
    by_query=by_query_of(FLOATS),
)


# bfloat16 ------------------------------------------------------------------------------------------------------------

pack_words = pack_by(2, load_words, load_some_words)


def pair_columns_by(micro):
    """Make the function that interleaves rows t and t + 1; zeros are beyond the last, and fill up the last vector."""
    put, lines = micro.put, micro.lines

    @helper()
    def pair_columns(w, room, x, n, HS, copied):
        width, whole = up(HS, LANES), HS - HS % LANES
        for t in range(0, n, 2):
            panel, i = room + t // 2 * lines * width, x.first + t * x.step
            j = i + x.step if t + 1 < n else -1
            for c in range(0, whole, LANES):
                put(w, panel + c, width, load_pair(x.array, i + c, j + c if j >= 0 else -1))
            for c in range(whole, HS):
                put(w, panel + c, width, pair(x.array, i + c, j + c if j >= 0 else -1))
            for c in range(HS, width):
                put(w, panel + c, width, ZERO)
        return at(w, room), width

    return pair_columns


def turn_words_by(micro):
    """Make the function that transposes the words of rows, which are not scaled."""
    transpose_words, lines = micro.transpose, micro.lines

    @helper()
    def turn_words(w, to, room, x, n, HS, scale):
        width = pack_words(w, room, x, n, up(n, LANES), HS)
        for t in range(0, n, LANES):
            for i in range(0, width, LANES):
                transpose_words(at(w, to + i * lines * BLOCK + t), BLOCK, at(w, room + t * width + i), width)

    return turn_words


@helper(forceinline=True)
def put_weight_words(w, score, k, q, p, p1):
    """Store words of two keys in row k / 2."""
    store(w, score + k // 2 * BLOCK + q, interleaved(rounded(p, p1)))


@helper(forceinline=True)
def put_adjoint_words(w, score, datt, paired, k, q, p, p1, ds, ds1):
    """Store words of two queries in place of scores and adjoints of weights, and words of two keys in `paired`.

    The words of a row lie in its first half, so that a row of queries overwrites none that is still to be read.
    """
    weights, adjoints, i = rounded(p, p1), rounded(ds, ds1), k * BLOCK + q // 2
    store_first(w, score + i, weights)
    store_first(w, datt + i, adjoints)
    store_second(w, score + i + BLOCK, weights)
    store_second(w, datt + i + BLOCK, adjoints)
    store(w, paired + k // 2 * BLOCK + q, interleaved(adjoints))


def words_by(micro: MicroKernel) -> Operands:
    """Make the operands of a record of words."""
    return Operands(
        micro=micro,
        product=product_by(micro),
        part=BLOCK if micro.tiled else PART,
        folds=False,
        rows=rows_by(2, pack_words),
        columns=pair_columns_by(micro),
        turn=turn_words_by(micro),
        put_weights=put_weight_words,
        put_adjoints=put_adjoint_words,
        by_query=by_query_of(micro),
    )


BFLOAT16 = words_by(MICRO_KERNELS["bfloat16"])
