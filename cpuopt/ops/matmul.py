"""Matrix product of each row with a weight stored (out, in), with an optional bias: a linear layer.

Forward::

    out[bt, o] = sum_c inp[bt, c] * weight[o, c] + bias[o]

Backward, two ops that are timed and swapped apart::

    dinp[bt, c]   += sum_o  dout[bt, o] * weight[o, c]          matmul_backward_input
    dweight[o, c] += sum_bt dout[bt, o] * inp[bt, c]            matmul_backward_weight
    dbias[o]      += sum_bt dout[bt, o]

Source: ``torch.nn.functional.linear``; ``matmul_forward`` and ``matmul_backward`` of llm.c.
"""

from .declaration import BT, HALF, OC, C, Op, Updates, acc, inp, out

SOURCE = "torch.nn.functional.linear"


def reference_forward(inp, weight, bias):
    return {"out": inp @ weight.T + (0 if bias is None else bias)}


def reference_backward_input(dout, weight):
    return {"dinp": dout @ weight}


def reference_backward_weight(dout, inp):
    return {"dweight": dout.T @ inp, "dbias": dout.sum(axis=0)}


matmul_forward = Op(
    "matmul_forward",
    out("out", BT, OC, reduces=C, types=HALF),
    inp("inp", BT, C, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    inp("bias", OC, optional=True, start=0),
    label="Matmul Forward",
    flops=2 * BT * C * OC,
    reference=reference_forward,
    source=SOURCE,
    role="product",
)

matmul_backward_input = Op(
    "matmul_backward_input",
    acc("dinp", BT, C, reduces=OC, types=HALF),
    inp("dout", BT, OC, types=HALF),
    inp("weight", OC, C, types=HALF, fan_in=C),
    label="Matmul Backward dinp",
    flops=2 * BT * C * OC,
    reference=reference_backward_input,
    source=SOURCE,
    inverts=matmul_forward,
)

matmul_backward_weight = Op(
    "matmul_backward_weight",
    acc("dweight", OC, C, reduces=BT, needed=False),
    acc("dbias", OC, reduces=BT, optional=True),
    inp("dout", BT, OC, types=HALF),
    inp("inp", BT, C, types=HALF),
    label="Matmul Backward dw/db",
    flops=2 * BT * C * OC,
    without={"dweight": 2 * BT * C * OC},
    reference=reference_backward_weight,
    source=SOURCE,
    inverts=matmul_forward,
    updates=Updates("matmul_update", ("dweight", "dbias")),
)
