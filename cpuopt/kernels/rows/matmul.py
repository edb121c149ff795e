"""A linear layer for few tokens: each row of the weight is read once and multiplied with all of them.

Four rows that lie far apart are read at a time, and what comes next of each is fetched: memory answers four streams
sooner than one, and the processor does not see by itself where a row goes on in the next page.

Of bfloat16 a vector is one of words, each of two neighbours, and half as many bytes are read.
"""

from numba import prange

from ... import ops
from ...ops.storage import WIDE
from ..compile.jit import helper, kernel
from ..toolkit.constants import ZERO
from ..toolkit.lanes import load, load_some, spread, sum_lanes
from ..toolkit.pairs import add_pairs, load_some_words, load_words
from ..toolkit.simd import LANES, LINE, at, prefetch
from ..toolkit.threads import SMALL

CHUNK = 8  # rows of each stream that a thread takes in one go
AHEAD = 256  # floats from what is multiplied to what is fetched; 64 to 2,048 were as fast


@helper(forceinline=True)
def multiply_add(x, y, total):
    """Add the products of floats to sums."""
    return total + x * y


def products_by(load, load_some, add, width):
    """Make the function of the products of quarters, from the loads of `width` elements and the sum of their products.

    ``products(out, inp, weight, bias, lo, hi)`` computes columns `lo` to `hi` of out, and those one, two and three
    quarters of all columns further.
    """
    step, line, ahead = 2 * width, LINE * width // LANES, AHEAD * width // LANES

    @helper(forceinline=True)
    def four(x, i, w, j, stride, C):
        """Multiply C numbers with four rows, `stride` apart; two sums each, so that few products wait for others."""
        j1, j2, j3 = j + stride, j + 2 * stride, j + 3 * stride
        whole = C - C % step
        a0, a1, a2, a3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
        b0, b1, b2, b3 = spread(ZERO), spread(ZERO), spread(ZERO), spread(ZERO)
        for k in range(0, whole, step):
            for n in range(ahead, ahead + step, line):
                prefetch(at(w, j + k + n))
                prefetch(at(w, j1 + k + n))
                prefetch(at(w, j2 + k + n))
                prefetch(at(w, j3 + k + n))
            m = k + width
            a, b = load(x, i + k), load(x, i + m)
            a0, b0 = add(a, load(w, j + k), a0), add(b, load(w, j + m), b0)
            a1, b1 = add(a, load(w, j1 + k), a1), add(b, load(w, j1 + m), b1)
            a2, b2 = add(a, load(w, j2 + k), a2), add(b, load(w, j2 + m), b2)
            a3, b3 = add(a, load(w, j3 + k), a3), add(b, load(w, j3 + m), b3)
        for k in range(whole, C, width):
            n = C - k
            a = load_some(x, i + k, n)
            a0, a1 = add(a, load_some(w, j + k, n), a0), add(a, load_some(w, j1 + k, n), a1)
            a2, a3 = add(a, load_some(w, j2 + k, n), a2), add(a, load_some(w, j3 + k, n), a3)
        return sum_lanes(a0 + b0), sum_lanes(a1 + b1), sum_lanes(a2 + b2), sum_lanes(a3 + b3)

    @helper()
    def products(out, inp, weight, bias, lo, hi):
        BT, C = inp.shape
        quarter = weight.shape[0] // 4
        for o in range(lo, hi):
            for bt in range(BT):
                s0, s1, s2, s3 = four(inp, bt * C, weight, o * C, quarter * C, C)
                if bias.shape[0] > 0:
                    s0, s1 = s0 + bias[o], s1 + bias[o + quarter]
                    s2, s3 = s2 + bias[o + 2 * quarter], s3 + bias[o + 3 * quarter]
                out[bt, o], out[bt, o + quarter] = s0, s1
                out[bt, o + 2 * quarter], out[bt, o + 3 * quarter] = s2, s3

    @helper()
    def last(out, inp, weight, bias):
        """Compute the last columns, three at most, which quarters leave over."""
        BT, C = inp.shape
        OC = weight.shape[0]
        for o in range(OC - OC % 4, OC):
            for bt in range(BT):
                total = spread(ZERO)
                for k in range(0, C, width):
                    total = add(load_some(inp, bt * C + k, C - k), load_some(weight, o * C + k, C - k), total)
                out[bt, o] = sum_lanes(total) + (bias[o] if bias.shape[0] > 0 else ZERO)

    return products, last


BY = {
    WIDE: products_by(load, load_some, multiply_add, LANES),
    "bfloat16": products_by(load_words, load_some_words, add_pairs, 2 * LANES),
}
"""The products of each storage type."""


@helper()
def nothing(more, x, lo, hi):
    """End a product without an epilogue."""


def linear_then(epilogue, of):
    """Make the function of a linear layer that calls ``epilogue(more, out, lo, hi)`` when out[lo:hi], flat, is there.

    `more` is the tuple of the arrays that the epilogue takes besides; `of` is the storage type.
    """
    products, last = BY[of]

    @helper()
    def chunk(out, more, inp, weight, bias, lo, hi):
        BT, OC = out.shape
        products(out, inp, weight, bias, lo, hi)
        for bt in range(BT):
            for quarter in range(4):
                start = bt * OC + OC // 4 * quarter
                epilogue(more, out, start + lo, start + hi)

    @helper(parallel=True)
    def linear(out, more, inp, weight, bias):
        BT, OC = out.shape
        quarter = OC // 4
        if weight.itemsize * OC * inp.shape[1] < SMALL:
            chunk(out, more, inp, weight, bias, 0, quarter)
        else:
            for i in prange((quarter + CHUNK - 1) // CHUNK):
                chunk(out, more, inp, weight, bias, i * CHUNK, min(quarter, i * CHUNK + CHUNK))
        last(out, inp, weight, bias)
        for bt in range(BT):
            epilogue(more, out, bt * OC + 4 * quarter, bt * OC + OC)

    return linear


def register(of):
    """Register the kernel of a storage type."""
    linear = linear_then(nothing, of)

    @kernel(ops.matmul_forward, "rows", of=of, parallel=False)
    def matmul_forward(out, inp, weight, bias):
        """Dot products.

        Parallel: chunks of rows of `weight`; each owns those columns of `out`.
        Bound: the memory that `weight` streams through, once.
        """
        linear(out, (), inp, weight, bias)


for of in BY:
    register(of)
