"""The records on vectors, by the code of ``simd``: floats, and words of two bfloat16."""

from dataclasses import replace
from math import lcm

from numba import prange

from ....ops.storage import WIDE
from ...compile.jit import helper
from .. import simd
from ..constants import ZERO
from ..lanes import load, store
from ..pairs import halves, interleave, load_pair, pack_rows, pair, put, read_of, words
from ..simd import HOST, LANES, MR, NR, PER_WORD, at, copy
from . import MicroKernel
from .blocking import FEW, FLOATS_DEPTH, LEAST, WORDS_DEPTH

# floats ---------------------------------------------------------------------------------------------------------------


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
def lay_floats(to, i, x, row, column):
    """Copy a vector of a row."""
    store(to, i, load(x, row * x.shape[1] + column))


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
    name=HOST.name,
    features=HOST.features,
    instruction="FMA",
    storage=WIDE,
    group=1,
    order="serial",
    lines=1,
    rows=MR,
    columns=NR,
    wide=simd.product,
    narrow=simd.narrow_product,
    put=put_float,
    transpose=simd.transpose,
    pack=pack_floats,
    lay=lay_floats,
    one=one_float,
    words=in_place,
    sums=in_place,
    operand=in_place,
    elements=same,
    weight=copy_or_weight,
    rounds=False,
    few=FEW * MR,
    few_depth=FLOATS_DEPTH,
    avoids_aliases=False,
    tall=-(-LEAST // lcm(MR, LANES)) * lcm(MR, LANES),
)


# bfloat16 -------------------------------------------------------------------------------------------------------------


@helper(forceinline=True)
def load_pairs(x, row, column):
    """Load a vector of words of two rows, whose odd halves are zero beyond the last row."""
    i = row * x.shape[1] + column
    return load_pair(x, i, i + x.shape[1] if row + 1 < x.shape[0] else -1)


@helper(forceinline=True)
def lay_pairs(to, i, x, row, column):
    """Write a vector of words of two rows."""
    store(to, i, load_pairs(x, row, column))


@helper(forceinline=True)
def one_pair(x, row, column):
    """Return a word of two rows, whose odd half is zero beyond the last row."""
    i = row * x.shape[1] + column
    return pair(x, i, i + x.shape[1] if row + 1 < x.shape[0] else -1)


def pack_pairs_by(put, interleave, lines):
    """Make the function that packs panels of words of two rows."""

    @helper()
    def pack_pairs(panel, x, row, column, depth):
        """Put words of x[row + 2 k, column + j] and x[row + 2 k + 1, column + j] in line k of a panel.

        A row beyond the last is zero, and so are columns beyond the last.
        """
        R, C = x.shape
        columns = min(NR, C - column)
        whole, rows = columns // LANES * LANES, min(depth, (R - row) // 2) if columns == NR else 0
        interleave(panel, 0, NR, x, row * C + column, C, rows)
        for k in range(rows, depth):
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


PAIRS = replace(
    FLOATS,
    instruction="vdpbf16ps" if HOST.dot else "two FMAs",
    storage="bfloat16",
    group=2,
    order="pairs",
    lines=PER_WORD,
    wide=simd.pair_product,
    narrow=simd.narrow_pair_product,
    listed=simd.listed_pair_product if HOST.ahead else None,
    put=put,
    transpose=simd.transpose_words,
    pack=pack_pairs_by(put, interleave, PER_WORD),
    lay=lay_pairs,
    one=one_pair,
    words=words_of,
    sums=sums_of,
    operand=operand_of,
    elements=halves,
    weight=read_of,
    rounds=True,
    few=0,  # neighbouring rows must be interleaved
    few_depth=WORDS_DEPTH,
    avoids_aliases=True,  # such a write takes as long as for floats, but the product takes half the time
)
RECORDS = FLOATS, PAIRS
