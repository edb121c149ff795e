"""Sums along an axis, copies along an axis, and the transpose of two axes.

B stands for all axes in front, C for all behind.

Forward::

    out[b, c]        = sum over t of inp[b, t, c]        sum
    out[b, t, c]     = inp[b, c]                         expand
    out[b, h, t, c]  = inp[b, t, h, c]                   transpose

Backward::

    dinp[b, t, c]    += dout[b, c]
    dinp[b, c]       += sum over t of dout[b, t, c]
    dinp[b, t, h, c] += dout[b, h, t, c]

A mean is a sum times 1/T. A value that is broadcast is expanded first.

Source: ``torch.sum``, ``torch.Tensor.expand``, ``torch.transpose``.
"""

import numpy as np

from .declaration import NH, B, C, Op, T, acc, inp, out


def total(inp):
    return {"out": inp.sum(axis=1)}


def copies(x, like):
    return np.repeat(x[:, None], like.shape[1], axis=1)


def swapped(x):
    return x.transpose(0, 2, 1, 3)


sum_forward = Op(
    "sum_forward",
    out("out", B, C, reduces=T),
    inp("inp", B, T, C),
    label="Sum Forward",
    flops=1 * B * T * C,
    reference=total,
    source="torch.sum",
)
sum_backward = Op(
    "sum_backward",
    acc("dinp", B, T, C),
    inp("dout", B, C),
    label="Sum Backward",
    flops=1 * B * T * C,
    reference=lambda dout, dinp: {"dinp": copies(dout, dinp)},
    source="torch.sum",
    inverts=sum_forward,
)
expand_forward = Op(
    "expand_forward",
    out("out", B, T, C),
    inp("inp", B, C),
    label="Expand Forward",
    flops=0 * T,
    reference=lambda inp, out: {"out": copies(inp, out)},
    source="torch.Tensor.expand",
)
expand_backward = Op(
    "expand_backward",
    acc("dinp", B, C, reduces=T),
    inp("dout", B, T, C),
    label="Expand Backward",
    flops=1 * B * T * C,
    reference=lambda dout: {"dinp": dout.sum(axis=1)},
    source="torch.Tensor.expand",
    inverts=expand_forward,
)
transpose_forward = Op(
    "transpose_forward",
    out("out", B, NH, T, C),
    inp("inp", B, T, NH, C),
    label="Transpose Forward",
    flops=0 * T,
    reference=lambda inp: {"out": swapped(inp)},
    source="torch.transpose",
)
transpose_backward = Op(
    "transpose_backward",
    acc("dinp", B, T, NH, C),
    inp("dout", B, NH, T, C),
    label="Transpose Backward",
    flops=1 * B * T * NH * C,
    reference=lambda dout: {"dinp": swapped(dout)},
    source="torch.transpose",
    inverts=transpose_forward,
)
