"""Token embedding, with an optional position embedding added.

Forward, with p = t, or p = t - starts[b, t] if `starts` is given, as in rows of several examples::

    out[b, t, :] = wte[tokens[b, t], :] + wpe[p, :]

Backward::

    dwte[v, :] += sum over the (b, t) with tokens[b, t] = v of dout[b, t, :]
    dwpe[p, :] += sum over the (b, t) of that position of dout[b, t, :]

Source: Radford et al. 2019 (GPT-2); ``torch.nn.functional.embedding``; ``encoder_forward`` of llm.c.
"""

import numpy as np

from .attention import STARTS
from .declaration import HALF, B, C, Op, T, Updates, V, acc, index, inp, maxT, out

SOURCE = "Radford et al. 2019; torch.nn.functional.embedding"


def positions(T, starts):
    """Return the positions of tokens in their examples, (T,) or (B, T)."""
    return np.arange(T) if starts is None else np.arange(T) - starts


def reference_forward(tokens, wte, wpe, starts=None):
    x = wte[tokens]
    return {"out": x if wpe is None else x + wpe[positions(tokens.shape[1], starts)]}


def reference_backward(dout, tokens, dwte, dwpe, starts=None):
    grads = {}
    if dwte is not None:
        grads["dwte"] = np.zeros(dwte.shape, dout.dtype)
        np.add.at(grads["dwte"], tokens, dout)
    if dwpe is not None:
        grads["dwpe"] = np.zeros(dwpe.shape, dout.dtype)
        np.add.at(grads["dwpe"], np.broadcast_to(positions(dout.shape[1], starts), dout.shape[:2]), dout)
    return grads


embedding_forward = Op(
    "embedding_forward",
    out("out", B, T, C),
    index("tokens", B, T, below=V),
    inp("wte", V, C, types=HALF, operand=False),
    inp("wpe", maxT, C, optional=True),
    STARTS,
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
    STARTS,
    label="Encoder Backward",
    flops=2 * B * T * C,
    without={"dwte": B * T * C},
    moves={"dwte": 2 * B * T * C, "dwpe": 2 * B * T * C},
    reference=reference_backward,
    source=SOURCE,
    inverts=embedding_forward,
    updates=Updates("embedding_update", ("dwte",), rows="tokens"),
)
