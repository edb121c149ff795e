"""Rotary position embedding, naive: pair by pair."""

from numba import prange

from ... import ops
from ..compile.jit import kernel


@kernel(ops.rope_forward, "vanilla")
def rope_forward(out, inp, cos, sin, starts):
    """Rotate the two channels of each pair.

    Parallel: the tokens.
    Bound: memory.
    """
    B, T, C = inp.shape
    P = cos.shape[1]
    NH = C // (2 * P)
    heads = inp.reshape(B, T, NH, 2, P)  # the halves of each head
    rotated = out.reshape(B, T, NH, 2, P)
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        p = t - starts[b, t] if starts.shape[0] > 0 else t
        for h in range(NH):
            for i in range(P):
                rotated[b, t, h, 0, i] = heads[b, t, h, 0, i] * cos[p, i] - heads[b, t, h, 1, i] * sin[p, i]
                rotated[b, t, h, 1, i] = heads[b, t, h, 1, i] * cos[p, i] + heads[b, t, h, 0, i] * sin[p, i]


@kernel(ops.rope_backward, "vanilla")
def rope_backward(dinp, dinp_add, dout, cos, sin, starts):
    """Rotate the two gradients of each pair back.

    Parallel: the tokens.
    Bound: memory.
    """
    B, T, C = dout.shape
    P = cos.shape[1]
    NH = C // (2 * P)
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        p = t - starts[b, t] if starts.shape[0] > 0 else t
        for h in range(NH):
            for i in range(P):
                x = dout[b, t, 2 * h * P + i]
                y = dout[b, t, 2 * h * P + P + i]
                dx = x * cos[p, i] + y * sin[p, i]
                dy = y * cos[p, i] - x * sin[p, i]
                dinp[b, t, 2 * h * P + i] = dinp[b, t, 2 * h * P + i] + dx if dinp_add else dx
                dinp[b, t, 2 * h * P + P + i] = dinp[b, t, 2 * h * P + P + i] + dy if dinp_add else dy


@kernel(ops.rope_decode, "vanilla")
def rope_decode(out, inp, cos, sin, position):
    """Rotate the two channels of each pair by the angle of a position behind others.

    Parallel: the tokens.
    Bound: memory.
    """
    B, T, C = inp.shape
    P = cos.shape[1]
    NH = C // (2 * P)
    for bt in prange(B * T):
        b, t = bt // T, bt % T
        place = min(position + t, cos.shape[0] - 1)
        for h in range(NH):
            for i in range(P):
                x = inp[b, t, 2 * h * P + i]
                y = inp[b, t, 2 * h * P + P + i]
                out[b, t, 2 * h * P + i] = x * cos[place, i] - y * sin[place, i]
                out[b, t, 2 * h * P + P + i] = y * cos[place, i] + x * sin[place, i]
