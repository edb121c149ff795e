"""Rotary position embedding of NH heads, in the rotate-half form: channel i of a head pairs with channel i + P.

Forward, for token t, head h and pair i < P, where P is half of a head. The position p is t, or t - starts[t] if
`starts` is given, as in rows of several examples::

    out[t, h, i]     = inp[t, h, i]     * cos[p, i] - inp[t, h, i + P] * sin[p, i]
    out[t, h, i + P] = inp[t, h, i + P] * cos[p, i] + inp[t, h, i]     * sin[p, i]

The backward rotates the other way::

    dinp[t, h, i]     += dout[t, h, i]     * cos[p, i] + dout[t, h, i + P] * sin[p, i]
    dinp[t, h, i + P] += dout[t, h, i + P] * cos[p, i] - dout[t, h, i]     * sin[p, i]

``rope_decode`` does the same for tokens behind `position` others. The tables are constants, with a row for each
position; beyond the last row it is repeated, which only padding needs.

Source: Su et al. 2021 (arXiv 2104.09864), equation 34, in the order of channels of ``transformers``.
"""

import numpy as np

from .attention import STARTS
from .declaration import HALF, NH, B, Op, P, T, acc, inp, maxT, out, scalar
from .embedding import positions

SOURCE = "Su et al. 2021, equation 34; apply_rotary_pos_emb of transformers"


def rotate(x, cos, sin, sign):
    """Rotate pairs of channels of (B, T, 2*NH*P) by the angles of tables (T, P) or (B, T, P)."""
    half = cos.shape[-1]
    heads = x.reshape(*x.shape[:2], -1, 2, half)
    first, second = heads[..., 0, :], heads[..., 1, :]
    cos, sin = cos[..., None, :], sign * sin[..., None, :]
    return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-2).reshape(x.shape)


def reference_forward(inp, cos, sin, starts=None):
    p = positions(inp.shape[1], starts)
    return {"out": rotate(inp, cos[p], sin[p], 1)}


def reference_backward(dout, cos, sin, starts=None):
    p = positions(dout.shape[1], starts)
    return {"dinp": rotate(dout, cos[p], sin[p], -1)}


def reference_decode(inp, cos, sin, position):
    places = np.minimum(position + np.arange(inp.shape[1]), len(cos) - 1)
    return {"out": rotate(inp, cos[places], sin[places], 1)}


HEADS = (B, T, 2 * NH * P)
MOVES = dict.fromkeys(("cos", "sin"), T * P)

rope_forward = Op(
    "rope_forward",
    out("out", *HEADS, types=HALF),
    inp("inp", *HEADS),
    inp("cos", maxT, P),
    inp("sin", maxT, P),
    STARTS,
    label="RoPE Forward",
    flops=6 * B * T * NH * P,
    moves=MOVES,
    reference=reference_forward,
    source=SOURCE,
)

rope_backward = Op(
    "rope_backward",
    acc("dinp", *HEADS, types=HALF),
    inp("dout", *HEADS),
    inp("cos", maxT, P),
    inp("sin", maxT, P),
    STARTS,
    label="RoPE Backward",
    flops=6 * B * T * NH * P,
    moves=MOVES,
    reference=reference_backward,
    source=SOURCE,
    inverts=rope_forward,
)

rope_decode = Op(
    "rope_decode",
    out("out", *HEADS, types=HALF),
    inp("inp", *HEADS),
    inp("cos", maxT, P),
    inp("sin", maxT, P),
    scalar("position", integer=True, low=0, high=maxT),
    label="RoPE Decode",
    flops=6 * B * T * NH * P,
    moves=MOVES,
    reference=reference_decode,
    source=SOURCE,
)
