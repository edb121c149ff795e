"""The micro-kernels of products as records: all that the loops of a product know of a storage type.

An operand is a matrix of *words* of 32 bits: each is a float32, or `group` neighbours along the summed axis. A word
adds `group` products to a sum. The order in which they are added is a property with a name:

========  ==========================================================================
"serial"  ``c += a[k] * b[k]`` for each k
"pairs"   ``c += a[k + 1] * b[k + 1]``, then ``c += a[k] * b[k]``, for every second k
"amx"     ``c += even + odd``, the sums of the even and of the odd products of 32 neighbours
========  ==========================================================================

Each product and sum is rounded to float32 once, as a fused multiply-add does. So sums have the same bits on all
machines that compute them in the same order.
"""

from dataclasses import dataclass, replace
from typing import Any

from numba import prange

from ...ops.storage import WIDE
from ..compile.jit import helper
from . import amx, simd
from .lanes import load
from .pairs import ZERO, halves, load_pair, pack_rows, pair, put, put_words, read_of, words
from .simd import HOST, LANES, MR, NR, PER_WORD, at, copy


@dataclass(frozen=True)
class MicroKernel:
    """How this machine multiplies operands of a storage type; all sums are float32.

    Attributes
    ----------
    storage : the type of both operands.
    group : the neighbours along k in a word.
    order : the order in which products are added.
    lines : the lines of a panel for each word.
    rows : most rows of a product.
    unit : the words of k that its blocks are multiples of: those of a tile.
    wide, narrow : the product of a few rows with a panel, of all its columns and of one vector (`simd.product_of`); of
        any number of rows if it is `tiled` (`amx.multiply_of`).
    listed : `wide` with a list of places to fetch, if the machine leaves memory time for it (`Tile.ahead`).
    put : ``put(panel, i, line, word)`` writes a word to a panel, whose lines are `line` floats apart.
    transpose : writes a square of words to a panel, transposed.
    pack : ``pack(panel, x, row, column, depth)`` packs NR columns of ``depth * group`` rows; zeros beyond the last.
    load, one : ``load(x, row, column)`` interleaves `group` rows from `row` on: LANES columns, or one.
    words : ``words(x, room)`` returns rows as words, and what is left of `room` if they had to be packed there.
    sums : ``sums(x, room)`` returns where the sums of a result x are kept, and what is left of `room`.
    operand : ``operand(x, room)`` returns the array of the storage type to which a float32 operand is rounded, and what
        is left of `room`.
    elements : ``elements(x)`` views float32 of scratch as elements of the storage type.
    weight : ``weight(master, copy)`` returns what products read of a weight that may have a copy.
    rounds : whether elements have less precision than sums, so that a result is stored when its sum is complete.
    few : most tokens for which the gradient of the input reads rows of weight in place.
    short_depth : most k of a block of that gradient for a small number of tokens.
    avoids_aliases : whether a forward keeps from writing tiles to rows that share places in the first-level cache.
    """

    storage: str
    group: int
    order: str
    lines: int
    rows: int
    unit: int
    wide: Any
    narrow: Any
    listed: Any
    put: Any
    transpose: Any
    pack: Any
    load: Any
    one: Any
    words: Any
    sums: Any
    operand: Any
    elements: Any
    weight: Any
    rounds: bool
    few: int
    short_depth: int
    avoids_aliases: bool

    @property
    def tiled(self) -> bool:
        """Whether its operands are tiles, whose packed rows lie one behind the other and are not interleaved."""
        return self.unit > 1

    def room(self, *shapes: tuple[int, int]) -> int:
        """Count the floats in which `words` packs matrices of some shapes."""
        return sum(rows * -(-K // self.group) for rows, K in shapes if K % self.group)


# float32 --------------------------------------------------------------------------------------------------------------


@helper()
def put_float(panel, i, line, x):
    """Write a float to a panel."""
    panel[i] = x


@helper()
def pack_floats(panel, x, row, column, depth):
    """panel[k, j] = x[row + k, column + j], and zero beyond the last column."""
    C = x.shape[1]
    if column + NR <= C:
        copy(at(panel, 0), NR, at(x, row * C + column), C, depth)
    else:
        for k in range(depth):
            for j in range(NR):
                panel[k * NR + j] = x[row + k, column + j] if column + j < C else ZERO


@helper(forceinline=True)
def load_floats(x, row, column):
    """Load a vector of a row."""
    return load(x, row * x.shape[1] + column)


@helper(forceinline=True)
def one_float(x, row, column):
    """Return an element."""
    return x[row, column]


@helper(inline="always")
def in_place(x, room):
    """Return what is given."""
    return x, room


@helper(inline="always")
def same(x):
    """Return what is given."""
    return x


@helper()
def copy_or_weight(weight, copy):
    """Return the copy, if there is one."""
    return copy if copy.shape[0] > 0 else weight


FLOATS = MicroKernel(
    storage=WIDE,
    group=1,
    order="serial",
    lines=1,
    rows=MR,
    unit=1,
    wide=simd.product,
    narrow=simd.narrow_product,
    listed=None,
    put=put_float,
    transpose=simd.transpose,
    pack=pack_floats,
    load=load_floats,
    one=one_float,
    words=in_place,
    sums=in_place,
    operand=in_place,
    elements=same,
    weight=copy_or_weight,
    rounds=False,
    few=5 * MR,  # copying a panel would cost more than it saves
    short_depth=192,  # dout and dinp of few tokens are small, and it pays to keep the panel, 12 KB, in L1
    avoids_aliases=False,
)


# bfloat16 -------------------------------------------------------------------------------------------------------------


@helper(forceinline=True)
def load_pairs(x, row, column):
    """Load a vector of words of two rows, whose odd halves are zero beyond the last row."""
    i = row * x.shape[1] + column
    return load_pair(x, i, i + x.shape[1] if row + 1 < x.shape[0] else -1)


@helper(forceinline=True)
def one_pair(x, row, column):
    """Return a word of two rows, whose odd half is zero beyond the last row."""
    i = row * x.shape[1] + column
    return pair(x, i, i + x.shape[1] if row + 1 < x.shape[0] else -1)


def pack_pairs_by(put, lines):
    """Make the function that packs panels of words of two rows."""

    @helper()
    def pack_pairs(panel, x, row, column, depth):
        """Put words of x[row + 2 k, column + j] and x[row + 2 k + 1, column + j] in line k of a panel.

        A row beyond the last is zero, and so are columns beyond the last.
        """
        columns = min(NR, x.shape[1] - column)
        whole = columns // LANES * LANES
        for k in range(depth):
            to = k * lines * NR
            for n in range(0, whole, LANES):
                put(panel, to + n, NR, load_pairs(x, row + 2 * k, column + n))
            for n in range(whole, columns):
                put(panel, to + n, NR, one_pair(x, row + 2 * k, column + n))
            for n in range(columns, NR):
                put(panel, to + n, NR, ZERO)

    return pack_pairs


@helper(parallel=True)
def words_of(x, room):
    """View rows as words, or pack those of an odd number of elements at the end of `room`; return the rest of it."""
    R, K = x.shape
    if K % 2 == 0:
        return words(x), room
    rest = room.size - R * (K // 2 + 1)
    packed = room[rest:].reshape(R, K // 2 + 1)
    for i in prange(R):
        pack_rows(packed, x, i, i + 1)
    return packed, room[:rest]


@helper()
def sums_of(x, room):
    """Take memory for the sums of x from the end of `room`; return the rest of it too."""
    rest = room.size - x.size
    return room[rest:].reshape(x.shape), room[:rest]


@helper()
def operand_of(x, room):
    """Make rows of whole words in `room` for those of x; return the rest of it too."""
    rows, width = x.shape[0], (x.shape[1] + 1) // 2
    return halves(room[: rows * width].reshape(rows, width)), room[rows * width :]


PAIRS = MicroKernel(
    storage="bfloat16",
    group=2,
    order="pairs",
    lines=PER_WORD,
    rows=MR,
    unit=1,
    wide=simd.pair_product,
    narrow=simd.narrow_pair_product,
    listed=simd.listed_pair_product if simd.HOST.ahead else None,
    put=put,
    transpose=simd.transpose_words,
    pack=pack_pairs_by(put, PER_WORD),
    load=load_pairs,
    one=one_pair,
    words=words_of,
    sums=sums_of,
    operand=operand_of,
    elements=halves,
    weight=read_of,
    rounds=True,
    few=0,  # neighbouring rows must be interleaved
    short_depth=768,  # as for many tokens
    avoids_aliases=True,  # such a write takes as long as for floats, but the product takes half the time
)
TILES = replace(
    PAIRS,
    order="amx",
    lines=1,
    rows=amx.ROWS,
    unit=amx.SIDE,
    wide=amx.multiply_of(NR // LANES),
    narrow=amx.multiply_of(1),
    listed=None,
    put=put_words,
    transpose=simd.transpose,
    pack=pack_pairs_by(put_words, 1),
)
MICRO_KERNELS = FLOATS, TILES if HOST.order == "amx" else PAIRS
