"""Loops that apply a formula element by element, a vector at a time; and the chunks that threads share.

A formula takes a vector of each input, and returns a tuple: a vector of each output. Outputs, their flags (whether to
add) and inputs are tuples. An input may be one float32, which stands for all elements.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compile.jit import helper
from .lanes import FLOATS, INT, Lanes, vector
from .simd import LANES

CHUNK = 4096  # elements: 16 KB an array, a multiple of all LANES; few enough that each of many threads gets some
SET, SET_BOTH = (False,), (False, False)  # flags of one output and of two that are overwritten


class Each(Lanes):
    """Emitter for the first `n` elements, LANES at most, from `i` of several arrays."""

    def __init__(self, context, builder, i, n) -> None:
        super().__init__(context, builder)
        self.i, self.mask = i, self.first(n)

    def get(self, kind, array):
        """Load from an array; a float fills all lanes."""
        if kind == types.float32:
            return self.spread(array)
        return self.read(kind, self.point(kind, array, self.i), self.mask)

    def put(self, kind, array, v):
        """Store to an array."""
        self.write(kind, self.point(kind, array, self.i), v, self.mask)


@intrinsic
def load_each(typingctx, xs, i, n):
    """Load x[i : i + n] of each input."""

    def codegen(context, builder, signature, args):
        each = Each(context, builder, *args[1:])
        found = [each.get(kind, builder.extract_value(args[0], k)) for k, kind in enumerate(signature.args[0])]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(vector, len(xs))(xs, INT, INT), codegen


@intrinsic
def store_each(typingctx, outs, adds, i, n, values):
    """Store to out[i : i + n] of each output, or add."""

    def codegen(context, builder, signature, args):
        outs, adds, i, n, values = args
        each = Each(context, builder, i, n)
        for k, kind in enumerate(signature.args[0]):
            out, add, v = (builder.extract_value(x, k) for x in (outs, adds, values))
            cell = cgutils.alloca_once_value(builder, v)
            with builder.if_then(cgutils.is_true(builder, add)):
                builder.store(builder.fadd(each.get(kind, out), v, flags=("contract",)), cell)
            each.put(kind, out, builder.load(cell, typ=FLOATS))
        return context.get_dummy_value()

    return types.void(outs, adds, INT, INT, values), codegen


def loop_of(formula):
    """Make the loop ``loop(outs, adds, xs, lo, hi)``, which applies a formula to the elements from lo to hi."""

    @helper(_nrt=False)  # counting references to the arrays of tuples would cost a short stretch more than its elements
    def loop(outs, adds, xs, lo, hi):
        whole = hi - (hi - lo) % LANES
        for i in range(lo, whole, LANES):
            store_each(outs, adds, i, LANES, formula(*load_each(xs, i, LANES)))
        if whole < hi:
            store_each(outs, adds, whole, hi - whole, formula(*load_each(xs, whole, hi - whole)))

    return loop


@helper()
def chunks(x):
    """Count the chunks of an array."""
    return (x.shape[0] + CHUNK - 1) // CHUNK


@helper()
def bounds(chunk, x):
    """Return where a chunk of an array begins and ends."""
    return chunk * CHUNK, min(chunk * CHUNK + CHUNK, x.shape[0])
