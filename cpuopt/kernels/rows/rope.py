"""Rotary position embedding of few tokens behind a cache, on one thread."""

from ... import ops
from ..compile.jit import kernel
from ..optimized.rope import FORTH, rotate


@kernel(ops.rope_decode, "rows", parallel=False)
def rope_decode(out, inp, cos, sin, position):
    """Rotate the two channels of each pair by the angle of a position behind others, vector by vector.

    Bound: compute.
    """
    B, T, _ = inp.shape
    for bt in range(B * T):
        rotate(out, False, inp, bt, min(position + bt % T, cos.shape[0] - 1), cos, sin, FORTH)
