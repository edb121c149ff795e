"""Blocks and chunks of products: how work is cut, and the product of a few rows with a panel.

The sizes of blocks depend on the shape alone, so that no element is summed in another order on more threads.
"""

from ..compile.jit import helper
from .micro.blocking import ALIASED, LINE, PLACES
from .simd import LANES, NR, at

PACKED = 0  # as a row stride: the rows of a group lie interleaved


def up(n, step):
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step


@helper()
def ceil(n, step):
    """Count the steps of `step` that cover `n`."""
    return (n + step - 1) // step


@helper()
def padded(depth):
    """Round the words of a packed row up to whole lines of the cache, which are whole tiles."""
    return ceil(depth, LINE) * LINE


@helper()
def even(total, most, unit):
    """Size of the fewest equal pieces of `most` or less, which `unit` divides; a last one may be shorter."""
    return ceil(ceil(total, ceil(total, most)), unit) * unit


@helper()
def pieces(total, most, unit, others, threads):
    """Count the pieces of `total`, of `most` or less, of which each stands for `others` chunks.

    `unit` divides `most`. Where chunks are few, there are as many for each thread as for the next, and two or more.
    """
    units, turn = ceil(total, unit), 2 * threads
    count = ceil(units, most // unit)
    if count * others < 4 * turn:
        count = ceil(ceil(count * others, turn) * turn, others)
    return min(count, units)


@helper()
def piece(i, count, total, unit):
    """Start of the i-th of `count` pieces of `total`: whole units, as many in each but for one.

    The larger ones are spread, so that half of the pieces are half of the work.
    """
    return min(total, unit * (i * ceil(total, unit) // count))


@helper()
def largest(count, total, unit):
    """Size of the largest piece."""
    return unit * ceil(ceil(total, unit), count)


@helper()
def token_pieces(M, most, threads):
    """Count the pieces of M tokens, of `most` or less: with at least as many as threads, each thread gets as many."""
    count = ceil(M, most)
    return ceil(count, threads) * threads if count >= threads else count


@helper()
def place(chunk, m_chunks, n_chunks, by_tokens):
    """Find the piece of tokens and the piece of the result's columns of a chunk.

    By tokens, neighbouring chunks have the same tokens: their rows stay in the caches of the threads that do them in
    other kernels too, and each thread reads the whole weight. Otherwise neighbouring chunks have the same columns.
    """
    return (chunk // n_chunks, chunk % n_chunks) if by_tokens else (chunk % m_chunks, chunk // m_chunks)


def count_groups_by(micro):
    """Make the function that counts the groups of rows, `row` floats apart: of at most `micro.rows` each.

    Where the micro-kernel reads a word at a time, a group has fewer rows than would evict each other from L1.
    """
    most, tiled = micro.rows, micro.tiled

    @helper()
    def count_groups(rows, row):
        aliased = not tiled and row != PACKED and row % ALIASED == 0
        return ceil(rows, min(most, PLACES - 1) if aliased else most)

    return count_groups


def multiply_by(micro, product):
    """Make the product of rows of a, in the even groups of `count_groups`, with one panel, by a micro-kernel.

    `fetch` is what comes next: a pointer, and the floats by which it moves on for each group, and for each second k
    shifted right by the last number. One in tiles is made of groups already.
    """
    if micro.tiled:
        return product
    count_groups = count_groups_by(micro)

    @helper()
    def multiply(rows, a, row, b, line, c, c_row, depth, add, fetch):
        ahead, apart, step, shift = fetch
        groups = count_groups(rows, row)
        size, longer = rows // groups, rows % groups
        lo = 0
        for g in range(groups):
            n = size + 1 if g < longer else size
            start, r, s = (lo * depth, 1, n) if row == PACKED else (lo * row, row, 1)
            x = at(ahead, g * apart)
            product(n, at(a, start), r, s, b, line, at(c, lo * c_row), c_row, depth, add, (x, step, shift))
            lo += n

    return multiply


def multiply_columns_by(micro):
    """Make the same function of the number of columns first: of one vector of them or less, it computes no more."""
    multiply_wide, multiply_narrow = multiply_by(micro, micro.wide), multiply_by(micro, micro.narrow)

    @helper()
    def multiply(columns, rows, a, row, b, line, c, c_row, depth, add, fetch):
        if columns > LANES:
            multiply_wide(rows, a, row, b, line, c, c_row, depth, add, fetch)
        else:
            multiply_narrow(rows, a, row, b, line, c, c_row, depth, add, fetch)

    return multiply


@helper()
def add_columns(x, row, column, tile, rows, add):
    """Write or add what lies inside of x of a tile in scratch: the edge that a whole tile would pass."""
    for i in range(rows):
        for j in range(x.shape[1] - column):
            new = tile[i * NR + j]
            x[row + i, column + j] = x[row + i, column + j] + new if add else new
