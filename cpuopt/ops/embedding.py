"""Token embedding, with an optional position embedding added.

Forward::

    out[b, t, :] = wte[tokens[b, t], :] + wpe[t, :]

Backward::

    dwte[v, :] += sum over the (b, t) with tokens[b, t] = v of dout[b, t, :]
    dwpe[t, :] += sum over b of dout[b, t, :]

Source: Radford et al. 2019 (GPT-2); ``torch.nn.functional.embedding``; ``encoder_forward`` of llm.c.
"""

import numpy as np

from .declaration import HALF, B, C, Op, T, Updates, V, acc, index, inp, maxT, out

SOURCE = "Radford et al. 2019; torch.nn.functional.embedding"


def reference_forward(tokens, wte, wpe):
    x = wte[tokens]
    return {"out": x if wpe is None else x + wpe[: tokens.shape[1]]}


def reference_backward(dout, tokens, dwte, dwpe):
    grads = {}
    if dwte is not None:
        grads["dwte"] = np.zeros(dwte.shape, dout.dtype)
        np.add.at(grads["dwte"], tokens, dout)
    if dwpe is not None:
        grads["dwpe"] = np.zeros(dwpe.shape, dout.dtype)
        grads["dwpe"][: dout.shape[1]] = dout.sum(axis=0)
    return grads


embedding_forward = Op(
    "embedding_forward",
    out("out", B, T, C),
    index("tokens", B, T, below=V),
    inp("wte", V, C, types=HALF, operand=False),
    inp("wpe", maxT, C, optional=True),
    label="Encoder Forward",
    flops=B * T * C,
    moves={"wte": B * T * C, "wpe": B * T * C},
    reference=reference_forward,
    source=SOURCE,
)

embedding_backward = Op(
    "embedding_backward",
    acc("dwte", V, C, reduces=B * T, needed=False),
    acc("dwpe", maxT, C, reduces=B, optional=True),
    inp("dout", B, T, C),
    index("tokens", B, T, below=V),
    label="Encoder Backward",
    flops=2 * B * T * C,
    without={"dwte": B * T * C},
    moves={"dwte": 2 * B * T * C, "dwpe": 2 * B * T * C},
    reference=reference_backward,
    source=SOURCE,
    inverts=embedding_forward,
    updates=Updates("embedding_update", ("dwte",), rows="tokens"),
)
