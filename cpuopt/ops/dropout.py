"""Dropout: each element is zeroed with probability p, and the others grow by 1/(1 - p).

Forward and backward, in an evaluation with p = 0::

    out   = keep * inp
    dinp += keep * dout        where keep[i] = (u[i] >= p) / (1 - p)

The random number u[i] in [0, 1) is a function of four numbers and of the place i, so no mask is stored, and neither
threads nor ranks change it: the run's `seed`, the `counter` of micro-batches since its start, the `stream` of this call
in the model, all mixed to a key; and i::

    u[i] = the upper 24 bits of mix(key + i * 0x9E3779B97F4A7C15) / 2^24

The counter begins at 1; 0 stands for an evaluation.

Source: Srivastava et al. 2014 (Dropout); ``torch.nn.functional.dropout``. ``mix`` is the 64-bit finalizer of Steele,
Lea and Flood 2014 (Fast Splittable Pseudorandom Number Generators), section 5, with the constants of Stafford's Mix13.
"""

import numpy as np

from .declaration import N, Op, acc, inp, out, scalar

SOURCE = "Srivastava et al. 2014; Steele, Lea and Flood 2014, section 5, for the random numbers"
GAMMA = np.uint64(0x9E3779B97F4A7C15)
M1, M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(z):
    """Mix 64 bits, so that each of them depends on all."""
    z = (z ^ (z >> np.uint64(30))) * M1
    z = (z ^ (z >> np.uint64(27))) * M2
    return z ^ (z >> np.uint64(31))


def keep(n, p, stream, seed, counter):
    """Compute the factors of n elements."""
    if not counter:
        return np.ones(n)
    key = np.zeros(1, np.uint64)
    for number in (seed, counter, stream):
        key = mix(key + np.array([number]).astype(np.uint64) + GAMMA)
    u = (mix(key + np.arange(n, dtype=np.uint64) * GAMMA) >> np.uint64(40)) / 2**24
    return (u >= np.float32(p)) / (1 - p)


def reference_forward(inp, p, stream, seed, counter):
    return {"out": keep(len(inp), p, stream, seed, counter) * inp}


def reference_backward(dout, p, stream, seed, counter):
    return {"dinp": keep(len(dout), p, stream, seed, counter) * dout}


NUMBERS = (
    scalar("p", low=0, high=0.9, usual=0.1),
    scalar("stream", integer=True, low=0, high=1000, usual=1),
    scalar("seed", integer=True, low=0, high=2**62),
    scalar("counter", integer=True, low=0, high=2**40, usual=1),
)

dropout_forward = Op(
    "dropout_forward",
    out("out", N),
    inp("inp", N),
    *NUMBERS,
    label="Dropout Forward",
    flops=1 * N,
    reference=reference_forward,
    source=SOURCE,
)
dropout_backward = Op(
    "dropout_backward",
    acc("dinp", N),
    inp("dout", N),
    *NUMBERS,
    label="Dropout Backward",
    flops=1 * N,
    reference=reference_backward,
    source=SOURCE,
    inverts=dropout_forward,
)
