"""Products of a linear layer whose frozen weight is int8, one scale for each row (output), multiplied as integers.

Forward, where each row of `inp` is quantized first, to nearest::

    out[bt, o]  += step[bt] * scales[o] * sum_c q[bt, c] * weight[o, c]  + bias[o]

The gradient of the input. The scales go into `dout`, so that the same int8 serve, and each row is quantized at random::

    dinp[bt, c] += step[bt] * sum_o q[bt, o] * weight[o, c],   q, step of g[bt, o] = dout[bt, o] * scales[o]

A row x with the largest magnitude m is quantized in float32, each operation rounded by itself. Its int8 have magnitudes
up to n = 127, or less for a row of more than 131,072 elements, so that int32 holds its sums (`most_of`)::

    step = m / n,  q[i] = x[i] * (n / m)                        rounded to nearest even; or
                   q[i] = floor(x[i] * (n / m) + u[i])          at random, with the mean right to 2^-17

Every element of a row with m < 2^-100 counts as zero. A row with NaN or infinity has a step of NaN, and so a result
of NaN. u[i] is the lower half of the random word of ``rounding.py`` over 2^16, for the element's index in `dout`. Its
`draw` is made of the run's `seed`, the `counter` of micro-batches and the `stream` of the call, as for dropout.

The sums are integers, and exact. So neither their order nor the instruction changes a bit.

Source: Dettmers et al. 2022 (LLM.int8(), arXiv 2208.07339), section 2.2, with a scale a row and a scale a column; Gupta
et al. 2015 for the rounding; Wortsman et al. 2023 (SwitchBack, arXiv 2304.13013) for the gradient of the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .declaration import BT, HALF, OC, C, Op, acc, inp, scalar
from .dequantize import LEAST
from .rounding import bits_of, draw_of
from .storage import WIDE, storage

Array = np.ndarray[Any, Any]
SOURCE = "Dettmers et al. 2022, section 2.2; Wortsman et al. 2023"
NUMBER = storage(WIDE).dtype.type
LARGEST = 2**31 - 1


def most_of(K: int) -> int:
    """Return the largest int8 of a row of K elements: its sums with any int8 fit into int32."""
    return min(127, LARGEST // (128 * K))


def quantized(x: Array, bits: Array | None = None) -> tuple[Array, Array]:
    """Quantize the rows of float32 (R, K).

    Parameters
    ----------
    bits : 16 random bits of each element, to round at random; None: to nearest even.

    Returns
    -------
    q : (R, K) int8.
    step : (R, 1) float32, of one unit of q.
    """
    n = NUMBER(most_of(x.shape[1]))
    most = np.abs(x).max(axis=1, keepdims=True)
    some = np.isfinite(most) & (most >= LEAST)
    step = np.where(some, most / n, np.where(np.isfinite(most), NUMBER(0), NUMBER(np.nan)))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        q = np.where(some, x * np.where(some, n / most, NUMBER(0)), NUMBER(0))
    if bits is None:
        return np.rint(q).astype(np.int8), step
    drawn = np.floor(q + (NUMBER(128) + bits.reshape(x.shape).astype(NUMBER) / NUMBER(2**16)))
    return np.clip(drawn - 128, -127, 127).astype(np.int8), step


def reference_forward(inp, weight, scales, bias):
    q, step = quantized(inp.astype(NUMBER))
    kind = inp.dtype
    found = step.astype(kind) * scales * (q.astype(kind) @ weight.astype(kind).T)
    return {"out": found + (0 if bias is None else bias)}


def reference_backward_input(dout, weight, scales, stream, seed, counter):
    g = dout.astype(NUMBER) * scales.astype(NUMBER)
    q, step = quantized(g, bits_of(draw_of(seed, counter, stream), 0, dout.size, 0))
    return {"dinp": step.astype(dout.dtype) * (q.astype(dout.dtype) @ weight.astype(dout.dtype))}


matmul_int8_forward = Op(
    "matmul_int8_forward",
    acc("out", BT, OC, reduces=C, types=HALF),
    inp("inp", BT, C, types=HALF),
    inp("weight", OC, C, types=("int8",)),
    inp("scales", OC),
    inp("bias", OC, optional=True, start=0),
    label="Matmul int8 Forward",
    flops=2 * BT * C * OC,
    reference=reference_forward,
    source=SOURCE,
)

matmul_int8_backward_input = Op(
    "matmul_int8_backward_input",
    acc("dinp", BT, C, reduces=OC, types=HALF),
    inp("dout", BT, OC, types=HALF),
    inp("weight", OC, C, types=("int8",)),
    inp("scales", OC),
    scalar("stream", integer=True, low=0, high=1000, usual=1),
    scalar("seed", integer=True, low=0, high=2**62),
    scalar("counter", integer=True, low=0, high=2**40, usual=1),
    label="Matmul int8 Backward dinp",
    flops=2 * BT * C * OC,
    reference=reference_backward_input,
    source=SOURCE,
)
