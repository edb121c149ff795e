"""The embedding's gradient and its update for the rows that tokens name, where ``classifier_update`` did the others.

The gradient of row v, for each v among `tokens`, is that which the head has put aside, and the embedding's own; with
AdamW as the optimizer::

    dwte[v]              = sum over the (b, t) with tokens[b, t] = v of held[b, t] + dout[b, t]
    wte[v], m[v], v[v]   = adamw(wte[v], m[v], v[v], dwte[v])
    sumsq                = sum of dwte[v]^2
    dwpe[t]             += sum over b of dout[b, t]

Source: ``embedding_backward``, ``sumsq`` and the optimizer.
"""

import numpy as np

from .declaration import B, C, Op, T, V, acc, index, inp, maxT, out
from .embedding import embedding_backward
from .optimizer import Optimizer, for_each_optimizer
from .sumsq import sumsq


@for_each_optimizer
def embedding_update(optimizer: Optimizer) -> Op:
    """Declare it for an optimizer."""
    arrays = list(optimizer.names("wte").values())

    def reference(**given):
        dout, tokens = given["dout"], given["tokens"]
        rows, place = np.unique(tokens, return_inverse=True)
        grad = np.zeros((len(rows), dout.shape[-1]))
        np.add.at(grad, place.reshape(tokens.shape), given["held"] + dout)
        found = {n: given[n].copy() for n in arrays}
        for n, x in optimizer.apply({**given, **{n: given[n][rows] for n in arrays}}, "wte", grad).items():
            found[n][rows] = x
        found["sumsq"] = np.array([(grad**2).sum()])
        if given["dwpe"] is not None:
            found["dwpe"] = np.zeros(given["dwpe"].shape)
            found["dwpe"][: dout.shape[1]] = dout.sum(axis=0)
        return found

    return optimizer.fuse(
        "embedding_update",
        [
            *optimizer.places("wte", V, C, reduces=B * T),
            acc("dwpe", maxT, C, reduces=B, optional=True),
            out("sumsq", 1, reduces=B * T + C),
            inp("held", B, T, C),
            inp("dout", B, T, C),
            index("tokens", B, T, below=V),
            *optimizer.scalars(),
            *optimizer.counts,
        ],
        reference,
        label="Encoder Backward",
        flops=(5 + optimizer.each) * B * T * C,
        moves=dict.fromkeys((*arrays, "dwpe", "dout"), 2 * B * T * C),
        source=f"embedding_backward, sumsq and {optimizer.name}",
        fuses=(embedding_backward, sumsq),
    )
