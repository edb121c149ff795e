"""The head and its loss in one, over blocks of tokens: the logits of all tokens never exist at one time.

Forward, which only an evaluation needs::

    loss, losses = cross_entropy(inp @ weight^T, targets)

Backward, which gives the loss as well, since it has the logits; a gradient that nothing needs is absent::

    dlogits  = d cross_entropy(inp @ weight^T, targets) * dloss
    dinp    += dlogits @ weight
    dweight += dlogits^T @ inp

Update, for so few tokens that all of their logits may exist at one time: an optimizer's step instead of dweight. Where
the weight is the token embedding too, the rows of the tokens get more gradient later. They wait: `held` has, for the
first of equal tokens, the gradient of its row, and zeros for the others; ``embedding_update`` finishes those rows.
The products read `copy`, the weight in a narrower type, if there is one.

Source: ``matmul`` and ``cross_entropy``; blocks of tokens, and the gradient in the forward's pass, are those of Hsu et
al. 2024 (Liger Kernel, arXiv 2410.10989), section 3.2.
"""

import numpy as np

from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .cross_entropy import reference_backward as loss_backward
from .cross_entropy import reference_forward as loss_forward
from .declaration import BT, HALF, IGNORE_INDEX, C, Op, V, acc, index, inp, operand, out
from .matmul import matmul_backward_input, matmul_backward_weight, matmul_forward
from .optimizer import Optimizer, for_each_optimizer
from .sumsq import sumsq

SOURCE = "matmul and cross_entropy; blocks of tokens after Hsu et al. 2024 (Liger Kernel), section 3.2"
BLOCK = 256
"""Tokens whose logits exist at one time: 51 MB with GPT-2's vocabulary."""


def reference_forward(inp, weight, targets, ignore_index):
    found = loss_forward(inp @ weight.T, targets, ignore_index)
    return {"loss": found["loss"], "losses": found["losses"]}


def reference_backward(dloss, inp, weight, targets, ignore_index):
    logits = inp @ weight.T
    found = loss_forward(logits, targets, ignore_index)
    dlogits = loss_backward(dloss, logits, found["lse"], targets, ignore_index)["dlogits"]
    dlogits = operand(dlogits)
    dinp = (weight.T @ dlogits.T).T  # in half of the time that BLAS takes for dlogits @ weight
    grads = {"dinp": dinp, "dweight": dlogits.T @ inp}
    return {"loss": found["loss"], "losses": found["losses"], **grads}


classifier_forward = Op(
    "classifier_forward",
    out("loss", 1, reduces=BT + V + C),
    out("losses", BT, reduces=V + C),
    inp("inp", BT, C, types=HALF),
    inp("weight", V, C, types=HALF, fan_in=C),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Classifier Forward",
    flops=2 * BT * C * V + 4 * BT * V,
    reference=reference_forward,
    source=SOURCE,
    fuses=(matmul_forward, cross_entropy_forward),
)

classifier_backward = Op(
    "classifier_backward",
    out("loss", 1, reduces=BT + V + C),
    out("losses", BT, reduces=V + C),
    acc("dinp", BT, C, reduces=V + C, needed=False),
    acc("dweight", V, C, reduces=BT + V + C, needed=False),
    inp("dloss", 1),
    inp("inp", BT, C, types=HALF),
    inp("weight", V, C, types=HALF, fan_in=C),
    index("targets", BT, below=V, ignored="ignore_index"),
    IGNORE_INDEX,
    label="Classifier",
    flops=6 * BT * C * V + 8 * BT * V,
    without={"dinp": 2 * BT * C * V, "dweight": 2 * BT * C * V},
    reference=reference_backward,
    source=SOURCE,
    fuses=(
        matmul_forward,
        cross_entropy_forward,
        cross_entropy_backward,
        matmul_backward_input,
        matmul_backward_weight,
    ),
)


@for_each_optimizer
def classifier_update(optimizer: Optimizer) -> Op:
    """Declare the update for an optimizer."""

    def reference(**given):
        tokens, read = given["tokens"], given["weight"] if given["copy"] is None else given["copy"]
        found = reference_backward(given["dloss"], given["inp"], read, given["targets"], given["ignore_index"])
        grad = found.pop("dweight")
        new = optimizer.apply(given, "weight", grad)
        if tokens is None:
            return found | new | {"sumsq": np.array([(grad**2).sum()])}
        rows, first = np.unique(tokens, return_index=True)
        held = np.zeros((len(tokens), grad.shape[1]))
        held[first] = grad[rows]
        for name, x in new.items():
            x[rows] = given[name][rows]
        return found | new | {"held": held, "sumsq": np.array([(grad**2).sum() - (held**2).sum()])}

    return optimizer.fuse(
        "classifier_update",
        [
            out("loss", 1, reduces=BT + V + C),
            out("losses", BT, reduces=V + C),
            acc("dinp", BT, C, reduces=V + C),
            *optimizer.places("weight", V, C, reduces=BT + V + C, fan_in=C),
            out("held", BT, C, reduces=BT + V + C, optional=True),
            out("sumsq", 1, reduces=BT + V + C),
            inp("dloss", 1),
            inp("inp", BT, C, types=HALF),
            inp("copy", V, C, types=HALF, optional=True, fan_in=C),
            index("targets", BT, below=V, ignored="ignore_index"),
            index("tokens", BT, below=V, optional=True),
            IGNORE_INDEX,
            *optimizer.scalars(),
            *optimizer.counts,
        ],
        reference,
        label="Classifier",
        flops=6 * BT * C * V + 8 * BT * V + (2 + optimizer.each) * V * C,
        source=SOURCE,
        fuses=(classifier_backward, sumsq),
    )
