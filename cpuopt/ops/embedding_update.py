"""The embedding's gradient and AdamW step for the rows that tokens name, where ``classifier_update`` did the others.

The gradient of row v, for each v among `tokens`, is that which the head has put aside, and the embedding's own::

    dwte[v]              = sum over the (b, t) with tokens[b, t] = v of held[b, t] + dout[b, t]
    wte[v], m[v], v[v]   = adamw(wte[v], m[v], v[v], dwte[v])
    sumsq                = sum of dwte[v]^2
    dwpe[t]             += sum over b of dout[b, t]

Source: ``embedding_backward``, ``sumsq`` and ``adamw``.
"""

import numpy as np

from .adamw import adamw
from .adamw import reference as adamw_reference
from .declaration import B, C, Op, T, V, acc, index, inp, maxT, out, scalar, state
from .embedding import embedding_backward
from .sumsq import sumsq


def reference(  # the declared arguments
    wte, wte_m, wte_v, dwpe, held, dout, tokens, lr, beta1, beta2, eps, weight_decay, step
):
    rows, place = np.unique(tokens, return_inverse=True)
    grad = np.zeros((len(rows), wte.shape[1]))
    np.add.at(grad, place.reshape(tokens.shape), held + dout)
    hyper = (lr, beta1, beta2, eps, weight_decay, 1.0, step)
    new = adamw_reference(wte[rows], wte_m[rows], wte_v[rows], grad, *hyper)
    found = {"wte": wte.copy(), "wte_m": wte_m.copy(), "wte_v": wte_v.copy(), "sumsq": np.array([(grad**2).sum()])}
    for name, x in zip(("wte", "wte_m", "wte_v"), new.values(), strict=True):
        found[name][rows] = x
    if dwpe is not None:
        found["dwpe"] = np.zeros(dwpe.shape)
        found["dwpe"][: dout.shape[1]] = dout.sum(axis=0)
    return found


embedding_update = Op(
    "embedding_update",
    state("wte", V, C, reduces=B * T),
    state("wte_m", V, C, reduces=B * T),
    state("wte_v", V, C, reduces=B * T),
    acc("dwpe", maxT, C, reduces=B, optional=True),
    out("sumsq", 1, reduces=B * T + C),
    inp("held", B, T, C),
    inp("dout", B, T, C),
    index("tokens", B, T, below=V),
    scalar("lr"),
    scalar("beta1"),
    scalar("beta2"),
    scalar("eps"),
    scalar("weight_decay"),
    scalar("step", integer=True),
    label="Encoder Backward + AdamW",
    flops=21 * B * T * C,
    moves=dict.fromkeys(("wte", "wte_m", "wte_v", "dwpe", "dout"), 2 * B * T * C),
    reference=reference,
    source="embedding_backward, sumsq and adamw",
    fuses=(embedding_backward, sumsq, adamw),
)
