"""Products of small matrices, parts of them too, for attention; their results; and how rows of tiles wait for others.

A matrix is small enough for the caches, so there is no blocking: only the micro-kernel's groups of rows and columns.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compile.jit import helper
from .constants import ZERO  # noqa: F401  (which kernels import from here)
from .lanes import INT, Lanes, load, load_some, store, store_some
from .micro.blocking import BLOCK, LOOKS
from .simd import I32, LANES, MR, NR, at

COLS = NR
PART = min(LANES, 2 ** (MR.bit_length() - 1))  # most rows of a micro-tile that share a range; a vector has whole groups
WHOLE, COLUMNS, DEPTH = range(3)
"""What the range of a row limits in a product c = a @ b: nothing; the columns of c; or what is summed over, since a is
zero beyond it."""


@helper()
def up(n, step):
    """Round up to a multiple."""
    return (n + step - 1) // step * step


@helper()
def flat(x):
    """View an array as one row."""
    return x.reshape(x.size)


def whole_product_by(record):
    """Make the product of tiles by a micro-kernel in tiles of its own: a range would save less than it costs."""
    wide, narrow, columns = record.wide, record.narrow, record.columns

    @helper()
    def product(c, c_row, a, a_row, a_step, b, b_row, rows, cols, depth, limit, adds):
        """Do what the product on vectors does, for all rows and columns; neighbours in a row of a are 1 apart."""
        for j in range(0, cols, columns):
            y, to = at(b, j), at(c, j)
            if cols - j > LANES:
                wide(rows, a, a_row, y, b_row, to, c_row, depth, adds, (y, 0, 0, 4))
            else:
                narrow(rows, a, a_row, y, b_row, to, c_row, depth, adds, (y, 0, 0, 4))

    return product


def product_by(record):
    """Make the product of tiles by a micro-kernel.

    `group` elements of a row of a lie in one float, and b has `lines` rows for each float of a's.
    """
    if record.tiled:
        return whole_product_by(record)
    micro, narrow, unit, lines = record.wide, record.narrow, record.group, record.lines

    @helper()
    def product(c, c_row, a, a_row, a_step, b, b_row, rows, cols, depth, limit, adds):
        """Compute or add ``c[i, j] = sum over k < depth of a[i, k] * b[k, j]`` for i < rows and j < cols.

        c, a and b are pointers. Rows are `c_row`, `a_row` and `b_row` floats apart, neighbours in a row of a `a_step`.
        Columns are rounded up to LANES. `limit` is what the range of a row limits, an array r and an offset r0: row i
        has the range from ``r[r0 + i]`` up to ``r[r0 + BLOCK + i]``; neither end falls from row to row. PART rows from
        a multiple of it on compute all that one of them needs, and columns are whole vectors. An empty range adds
        nothing.
        """
        part, r, r0 = limit
        groups = (rows + MR - 1) // MR if part == WHOLE else (rows + PART - 1) // PART
        size, longer = rows // groups if part == WHOLE else PART, rows % groups if part == WHOLE else 0
        i = 0
        for g in range(groups):
            n = min(size + 1 if g < longer else size, rows - i)
            j, stop, k, end = 0, cols, 0, depth
            if part != WHOLE:
                low, high = np.int64(r[r0 + i]), np.int64(r[r0 + BLOCK + i + n - 1])
                if part == COLUMNS:
                    j, stop = low // LANES * LANES, min(cols, high)
                else:
                    k, end = low // unit, min(depth, (high + unit - 1) // unit)
            x = at(a, i * a_row + k * a_step)
            while j < stop and k < end:
                y, to = at(b, k * lines * b_row + j), at(c, i * c_row + j)
                if j % COLS > 0 or stop - j <= LANES:
                    narrow(n, x, a_row, a_step, y, b_row, to, c_row, end - k, adds, (y, 0, 0))
                    j += LANES
                else:
                    micro(n, x, a_row, a_step, y, b_row, to, c_row, end - k, adds, (y, 0, 0))
                    j += COLS
            i += n

    return product


@helper()
def unpack(x, x0, x_row, tile, tile0, width, rows, cols, scale, adds):
    """Write or add packed rows, scaled, to rows that lie `x_row` apart."""
    for t in range(rows):
        for i in range(0, cols, LANES):
            place, n = x0 + t * x_row + i, cols - i
            v = load(tile, tile0 + t * width + i) * scale
            if adds:
                v = v + load_some(x, place, n)
            if n >= LANES:
                store(x, place, v)
            else:
                store_some(x, place, v, n)


@intrinsic
def tell(typingctx, steps, i, n):
    """Set the int32 `i` of an array to n; whoever reads it afterwards sees all that this thread has written before."""

    def codegen(context, builder, signature, args):
        steps, i, n = args
        place = builder.bitcast(Lanes(context, builder).point(signature.args[0], steps, i), I32.as_pointer())
        builder.store_atomic(builder.trunc(n, I32), place, "release", 4)
        return context.get_dummy_value()

    return types.void(steps, INT, INT), codegen


@intrinsic
def wait_for(typingctx, steps, i, n):
    """Wait until the int32 `i` of an array is n. The thread that sets it must not wait for this one.

    After some looks at it the thread offers its core each time: the one that it waits for may have none.
    """

    def codegen(context, builder, signature, args):
        steps, i, n = args
        place = builder.bitcast(Lanes(context, builder).point(signature.args[0], steps, i), I32.as_pointer())
        offer = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        before = builder.block
        look, again, yields, on = (builder.append_basic_block(name) for name in ("look", "again", "yields", "on"))
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(I32)
        there = builder.load_atomic(place, "acquire", 4, typ=I32)
        builder.cbranch(builder.icmp_signed("==", there, builder.trunc(n, I32)), on, again)
        builder.position_at_end(again)
        more = builder.add(looks, I32(1))
        builder.cbranch(builder.icmp_signed("<", looks, I32(LOOKS)), look, yields)
        builder.position_at_end(yields)
        builder.call(offer, [])
        builder.branch(look)
        looks.add_incoming(I32(0), before)
        looks.add_incoming(more, again)
        looks.add_incoming(looks, yields)
        builder.position_at_end(on)
        return context.get_dummy_value()

    return types.void(steps, INT, INT), codegen
