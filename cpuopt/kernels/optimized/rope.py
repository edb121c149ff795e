"""Rotary position embedding on vectors: some pairs of a head at a time."""

from numba import prange

from ... import ops
from ..compile.jit import helper, kernel
from ..toolkit.constants import ONE
from ..toolkit.elementwise import load_each, store_each
from ..toolkit.simd import LANES

FORTH, BACK = ONE, -ONE


@helper(forceinline=True)
def rotate_some(out, add, inp, i, P, cos, sin, place, n, sign):
    """Rotate up to LANES pairs from channel i; their angles are at `place` of the tables."""
    (x,), (y,), (c, s) = load_each((inp,), i, n), load_each((inp,), i + P, n), load_each((cos, sin), place, n)
    s = s * sign
    store_each((out,), (add,), i, n, (x * c - y * s,))
    store_each((out,), (add,), i + P, n, (y * c + x * s,))


@helper()
def rotate(out, add, inp, token, place, cos, sin, sign):
    """Rotate a token by the angles of a row of the tables, or back."""
    C, P = inp.shape[2], cos.shape[1]
    row, whole = place * P, P - P % LANES
    for lo in range(token * C, token * C + C, 2 * P):
        for i in range(0, whole, LANES):
            rotate_some(out, add, inp, lo + i, P, cos, sin, row + i, LANES, sign)
        if whole < P:
            rotate_some(out, add, inp, lo + whole, P, cos, sin, row + whole, P - whole, sign)


@helper(forceinline=True)
def position(starts, token, T):
    """Return the position of a token in its example."""
    return token % T - starts[token // T, token % T] if starts.shape[0] > 0 else token % T


@kernel(ops.rope_forward, "optimized")
def rope_forward(out, inp, cos, sin, starts):
    """Rotate the two channels of each pair, vector by vector.

    Parallel: the tokens.
    Bound: memory.
    """
    B, T, _ = inp.shape
    for bt in prange(B * T):
        rotate(out, False, inp, bt, position(starts, bt, T), cos, sin, FORTH)


@kernel(ops.rope_backward, "optimized")
def rope_backward(dinp, dinp_add, dout, cos, sin, starts):
    """Rotate the two gradients of each pair back, vector by vector.

    Parallel: the tokens.
    Bound: memory.
    """
    B, T, _ = dout.shape
    for bt in prange(B * T):
        rotate(dinp, dinp_add, dout, bt, position(starts, bt, T), cos, sin, BACK)


@kernel(ops.rope_decode, "optimized")
def rope_decode(out, inp, cos, sin, position):
    """Rotate the two channels of each pair by the angle of a position behind others, vector by vector.

    Parallel: the tokens.
    Bound: memory.
    """
    B, T, _ = inp.shape
    for bt in prange(B * T):
        rotate(out, False, inp, bt, min(position + bt % T, cos.shape[0] - 1), cos, sin, FORTH)
